// Access to the records of the tape from C++.
//
// Problem: both engines must write the same records, so that either can go on where the other
// stopped and one set of tests holds for both. Invariant: values, refs, handles and entries are
// instances of the Python classes in `lowtide/tape`; their `__slots__` are read and written here by
// offset, which Python keeps in the member descriptors. Rejected: types of our own, which every
// rule would have to be written for a second time.
#pragma once

#include <Python.h>
#include <structmember.h>

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/as_strided.h>
#include <c10/util/SmallVector.h>

#include <typeinfo>

namespace lowtide {

namespace py = pybind11;

// A new reference, given up at the end of the scope.
struct Owned {
  PyObject* object;
  explicit Owned(PyObject* stolen = nullptr) : object(stolen) {}
  Owned(Owned&& other) noexcept : object(other.release()) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object, other.object);
    return *this;
  }
  ~Owned() { Py_XDECREF(object); }
  PyObject* release() { return std::exchange(object, nullptr); }
  PyObject* get() const { return object; }
};

inline PyObject* checked(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return result;
}

using Offset = Py_ssize_t;

inline PyObject*& slot(PyObject* object, Offset offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

// Takes over a reference to `stolen`.
inline void put(PyObject* object, Offset offset, PyObject* stolen) {
  PyObject* old = std::exchange(slot(object, offset), stolen);
  Py_XDECREF(old);
}

inline void put_new(PyObject* object, Offset offset, PyObject* borrowed) {
  put(object, offset, Py_NewRef(borrowed));
}

inline bool is_none(PyObject* object) { return object == nullptr || object == Py_None; }

// The Python classes and where their slots are.
struct Layout {
  PyTypeObject *value, *ref, *handle, *operation, *entry, *region;
  Offset value_op, value_nbytes, value_held, value_keep, value_read, value_saves, value_region,
      value_scope, value_number, value_retain_from, value_version;
  Offset ref_value, ref_dtype, ref_size, ref_stride, ref_offset, ref_blank;
  Offset handle_ref, handle_region, handle_tape, handle_sequence;
  Offset operation_refs, operation_sequence, operation_facts, operation_outputs;
  Offset entry_key, entry_value, entry_weak, entry_version, entry_loose, entry_nbytes,
      entry_counted, entry_counter;
  Offset region_depth, region_policy, region_parent;
};

inline Layout layout;

inline Offset offset_of(PyTypeObject* type, const char* name) {
  Owned found(checked(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name)));
  if (!Py_IS_TYPE(found.get(), &PyMemberDescr_Type)) {
    throw py::type_error(std::string(type->tp_name) + "." + name + " is not a slot");
  }
  return reinterpret_cast<PyMemberDescrObject*>(found.get())->d_member->offset;
}

inline PyTypeObject* class_in(const py::module_& module, const char* name) {
  py::object found = module.attr(name);
  return reinterpret_cast<PyTypeObject*>(found.release().ptr());  // for the life of the process
}

inline void find_layout(const py::module_& values, const py::module_& known) {
  Layout& l = layout;
  l.value = class_in(values, "Value");
  l.ref = class_in(values, "Ref");
  l.handle = class_in(values, "Handle");
  l.operation = class_in(values, "Operation");
  l.region = class_in(values, "Region");
  l.entry = class_in(known, "Entry");
  l.value_op = offset_of(l.value, "op");
  l.value_nbytes = offset_of(l.value, "nbytes");
  l.value_held = offset_of(l.value, "held");
  l.value_keep = offset_of(l.value, "keep");
  l.value_read = offset_of(l.value, "read");
  l.value_saves = offset_of(l.value, "saves");
  l.value_region = offset_of(l.value, "region");
  l.value_scope = offset_of(l.value, "scope");
  l.value_number = offset_of(l.value, "number");
  l.value_retain_from = offset_of(l.value, "retain_from");
  l.value_version = offset_of(l.value, "version");
  l.ref_value = offset_of(l.ref, "value");
  l.ref_dtype = offset_of(l.ref, "dtype");
  l.ref_size = offset_of(l.ref, "size");
  l.ref_stride = offset_of(l.ref, "stride");
  l.ref_offset = offset_of(l.ref, "offset");
  l.ref_blank = offset_of(l.ref, "blank");
  l.handle_ref = offset_of(l.handle, "ref");
  l.handle_region = offset_of(l.handle, "region");
  l.handle_tape = offset_of(l.handle, "tape");
  l.handle_sequence = offset_of(l.handle, "sequence");
  l.operation_refs = offset_of(l.operation, "refs");
  l.operation_sequence = offset_of(l.operation, "sequence");
  l.operation_facts = offset_of(l.operation, "facts");
  l.operation_outputs = offset_of(l.operation, "outputs");
  l.entry_key = offset_of(l.entry, "key");
  l.entry_value = offset_of(l.entry, "value");
  l.entry_weak = offset_of(l.entry, "weak");
  l.entry_version = offset_of(l.entry, "version");
  l.entry_loose = offset_of(l.entry, "loose");
  l.entry_nbytes = offset_of(l.entry, "nbytes");
  l.entry_counted = offset_of(l.entry, "counted");
  l.entry_counter = offset_of(l.entry, "counter");
  l.region_depth = offset_of(l.region, "depth");
  l.region_policy = offset_of(l.region, "policy");
  l.region_parent = offset_of(l.region, "parent");
}

inline PyObject* allocate(PyTypeObject* type) { return checked(type->tp_alloc(type, 0)); }

inline int64_t integer(PyObject* object) {
  int64_t found = PyLong_AsLongLong(object);
  if (found == -1 && PyErr_Occurred()) throw py::error_already_set();
  return found;
}

// An object that holds nothing that could lead back to it, taken off the collector's list: a step
// makes several for each operation, and each full collection would go through all of them.
inline PyObject* leaf(PyObject* made) {
  PyObject_GC_UnTrack(checked(made));
  return made;
}

inline PyObject* weak_to(PyObject* object) { return leaf(PyWeakref_NewRef(object, nullptr)); }

// What a weak reference leads to, as a new reference; null if it is gone.
inline PyObject* target_of(PyObject* weak) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(weak, &found) < 0) throw py::error_already_set();
  return found;
#else
  PyObject* found = PyWeakref_GetObject(weak);
  return found == Py_None ? nullptr : Py_XNewRef(found);
#endif
}

// How a tensor lies in its storage.
struct Geometry {
  c10::SmallVector<int64_t, 5> size, stride;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;

  Geometry() = default;
  explicit Geometry(const at::Tensor& tensor)
      : size(tensor.sizes().begin(), tensor.sizes().end()),
        stride(tensor.strides().begin(), tensor.strides().end()),
        offset(tensor.storage_offset()),
        dtype(tensor.dtype()) {}

  bool fits(const at::Tensor& base) const {
    return base.dtype() == dtype && base.storage_offset() == offset && base.sizes() == size &&
        base.strides() == stride;
  }

  // This view of a tensor over the same storage. Runs below autograd.
  at::Tensor of(const at::Tensor& base) const {
    if (fits(base)) return base;
    if (typeid(*base.unsafeGetTensorImpl()) != typeid(c10::TensorImpl) && base.dtype() == dtype) {
      return at::as_strided(base, size, stride, offset);  // a kind of its own
    }
    size_t need = at::detail::computeStorageNbytes(size, stride, dtype.itemsize(), offset);
    TORCH_CHECK(need <= base.storage().nbytes(), "lowtide: a replayed tensor has ",
                base.storage().nbytes(), " bytes where ", need, " were recorded; please report this");
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), dtype);
    made.unsafeGetTensorImpl()->set_storage_offset(offset);
    made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
    return made;
  }
};

inline PyObject* tuple_of(c10::IntArrayRef numbers) {
  PyObject* made = checked(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  for (size_t i = 0; i < numbers.size(); ++i) {
    PyTuple_SET_ITEM(made, i, PyLong_FromLongLong(numbers[i]));
  }
  return leaf(made);
}

inline PyObject* torch_size;  // the class torch.Size

// A Python `Ref`.
inline PyObject* new_ref(PyObject* value, const Geometry& geometry) {
  PyObject* ref = allocate(layout.ref);
  Owned sizes(tuple_of(geometry.size));
  slot(ref, layout.ref_value) = Py_NewRef(value);
  slot(ref, layout.ref_dtype) = Py_NewRef(reinterpret_cast<PyObject*>(
      torch::getTHPDtype(c10::typeMetaToScalarType(geometry.dtype))));
  slot(ref, layout.ref_size) = leaf(PyObject_CallOneArg(torch_size, sizes.get()));
  slot(ref, layout.ref_stride) = tuple_of(geometry.stride);
  slot(ref, layout.ref_offset) = PyLong_FromLongLong(geometry.offset);
  slot(ref, layout.ref_blank) = Py_NewRef(Py_None);
  return ref;
}

inline void numbers_of(PyObject* tuple, c10::SmallVector<int64_t, 5>& into) {
  Py_ssize_t count = PyTuple_GET_SIZE(tuple);
  for (Py_ssize_t i = 0; i < count; ++i) into.push_back(integer(PyTuple_GET_ITEM(tuple, i)));
}

inline Geometry geometry_of(PyObject* ref) {
  Geometry found;
  numbers_of(slot(ref, layout.ref_size), found.size);
  numbers_of(slot(ref, layout.ref_stride), found.stride);
  found.offset = integer(slot(ref, layout.ref_offset));
  found.dtype = c10::scalarTypeToTypeMeta(
      reinterpret_cast<THPDtype*>(slot(ref, layout.ref_dtype))->scalar_type);
  return found;
}

// ---------------------------------------------------------------------- values

inline bool holds(PyObject* value) { return !is_none(slot(value, layout.value_held)); }

inline const at::Tensor& held_by(PyObject* value) {
  return THPVariable_Unpack(slot(value, layout.value_held));
}

// As `Value.intact`.
inline bool intact(PyObject* value) {
  const at::Tensor& held = held_by(value);
  return held._version() == integer(slot(value, layout.value_version)) &&
      static_cast<int64_t>(held.storage().nbytes()) >= integer(slot(value, layout.value_nbytes));
}

// As `in_memory`: null if it is not.
inline const at::Tensor* in_memory(PyObject* value) {
  if (!holds(value)) return nullptr;
  if (intact(value)) return &held_by(value);
  if (!is_none(slot(value, layout.value_op))) put_new(value, layout.value_held, Py_None);
  return nullptr;
}

// As `Value.pending`.
inline bool pending(PyObject* value) {
  PyObject* saves = slot(value, layout.value_saves);
  if (is_none(saves)) return false;
  for (Py_ssize_t i = PyList_GET_SIZE(saves); i-- > 0;) {
    if (Owned(target_of(PyList_GET_ITEM(saves, i))).get() != nullptr) return true;
  }
  return false;
}

inline PyObject* new_value(PyObject* op, int64_t nbytes, PyObject* region, int64_t number) {
  const Layout& l = layout;
  PyObject* value = allocate(l.value);
  slot(value, l.value_op) = Py_NewRef(op);
  slot(value, l.value_nbytes) = PyLong_FromLongLong(nbytes);
  slot(value, l.value_held) = Py_NewRef(Py_None);
  slot(value, l.value_keep) = Py_NewRef(Py_False);
  slot(value, l.value_read) = Py_NewRef(Py_False);
  slot(value, l.value_saves) = Py_NewRef(Py_None);
  slot(value, l.value_region) = Py_NewRef(region);
  slot(value, l.value_scope) = Py_NewRef(Py_None);
  slot(value, l.value_number) = PyLong_FromLongLong(number);
  slot(value, l.value_retain_from) = PyLong_FromLong(0);
  return value;
}

}  // namespace lowtide

// Values and handles: what `Value` and `Handle` of `lowtide/tape/values.py` are to the Python recorder.
//
// Problem: a step makes several records for each operation, and as Python objects they cost more to
// make, read and collect than small kernels take. Invariant: the attributes and methods are those of the
// Python classes, so that the rules are written once, in Python, for both; Python's garbage collector
// does not track them, since it cannot see what refers to them: autograd and one another.
// Rejected: the Python classes with their slots read by offset, which take 4 KiB per operation.
#pragma once

#include "geometry.h"

#include <c10/core/Stream.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <vector>

namespace lowtide {

// Equal streams are one object, which is never freed: a step has few, and all its records refer to one.
// Needs the GIL.
inline const c10::Stream* the_stream(const c10::Stream& stream) {
  static auto* known = new std::vector<std::unique_ptr<const c10::Stream>>();
  for (const auto& each : *known) {
    if (*each == stream) return each.get();
  }
  known->push_back(std::make_unique<const c10::Stream>(stream));
  return known->back().get();
}

// ---------------------------------------------------------------------- weak links

// What weak links to a record share: the last bytes of its memory, which is freed only when the record is
// gone and no link is left.
struct Cell {
  PyObject* target;  // null: the record is gone
  uint32_t users, size;

  void* memory() { return reinterpret_cast<char*>(this + 1) - size; }
};

// A weak link to a record. Made and released with the GIL.
class Weak {
 public:
  Weak() = default;
  explicit Weak(Cell* cell) : cell_(cell) { ++cell_->users; }
  Weak(const Weak& other) : cell_(other.cell_) {
    if (cell_ != nullptr) ++cell_->users;
  }
  Weak(Weak&& other) noexcept : cell_(std::exchange(other.cell_, nullptr)) {}
  Weak& operator=(Weak other) noexcept {
    std::swap(cell_, other.cell_);
    return *this;
  }
  ~Weak() {
    if (cell_ != nullptr && --cell_->users == 0 && cell_->target == nullptr) {
      PyObject_Free(cell_->memory());
    }
  }
  PyObject* get() const { return cell_ == nullptr ? nullptr : cell_->target; }  // borrowed

 private:
  Cell* cell_ = nullptr;
};

// What every record begins with.
struct Record {
  PyObject_HEAD
  PyObject* weak_list = nullptr;  // Python's weak references to it
};

// Whether records of this type have weak links (`Weak`), and so a `Cell`.
template <class T>
inline constexpr bool is_linked = true;

template <class T>
inline constexpr int record_size = sizeof(T) + (is_linked<T> ? sizeof(Cell) : 0);

inline Cell* cell_of(PyObject* object) {
  return reinterpret_cast<Cell*>(reinterpret_cast<char*>(object) + Py_TYPE(object)->tp_basicsize) - 1;
}

inline Weak weak_to(PyObject* object) { return Weak(cell_of(object)); }

inline int64_t records_alive = 0;  // the garbage collector does not know them

template <class T, class... Arguments>
T* new_record(PyTypeObject* type, Arguments&&... arguments) {
  T* made = PyObject_New(T, type);
  if (made == nullptr) throw py::error_already_set();
  PyObject head = made->ob_base;
  new (made) T(std::forward<Arguments>(arguments)...);
  made->ob_base = head;
  if constexpr (is_linked<T>) new (cell_of(object_of(made))) Cell{object_of(made), 0, record_size<T>};
  ++records_alive;
  return made;
}

// The first step of freeing a record. It counts as a user of its own cell from here on, as freeing what it
// refers to may release the last link to it.
template <class T>
void leave(PyObject* object) {
  if constexpr (is_linked<T>) {
    ++cell_of(object)->users;
    cell_of(object)->target = nullptr;
  }
  if (as<Record>(object)->weak_list != nullptr) PyObject_ClearWeakRefs(object);
}

template <class T>
void free_record(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  Cell* cell = is_linked<T> ? cell_of(object) : nullptr;
  as<T>(object)->~T();  // nothing may be read of it any more
  --records_alive;
  bool asked_for = cell != nullptr && --cell->users != 0;
  if (!asked_for) PyObject_Free(object);
  Py_DECREF(type);
}

// ---------------------------------------------------------------------- values

struct Handle;

struct Value : Record {
  PyObject* op = nullptr;
  PyObject* region = nullptr;
  PyObject* scope = nullptr;
  PyObject* wholes = nullptr;
  at::Tensor held;
  Geometry whole;  // of the first tensor that was recorded for it, which most refs share
  Handle* handles = nullptr;  // those that autograd still has, as a linked list
  const c10::Stream* home = nullptr;  // the stream of `held`, if `op` does not say
  int64_t nbytes = 0, number = -1, retain_from = 0, version = 0;
  bool keep = false, read = false, saved = false;
};

inline PyTypeObject *value_type, *handle_type;

inline Value* value_of(PyObject* object) {
  if (!Py_IS_TYPE(object, value_type)) {
    throw py::type_error("lowtide: a record of the other recorder; please report this");
  }
  return as<Value>(object);
}

// `_version`, without its call through the hooks of autograd.
inline int64_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

inline Value* new_value(PyObject* op, int64_t nbytes, PyObject* region, int64_t number) {
  Value* value = new_record<Value>(value_type);
  value->op = is_none(op) ? nullptr : Py_NewRef(op);
  value->nbytes = nbytes;
  value->region = Py_NewRef(region);
  value->number = number;
  return value;
}

inline const c10::Stream* stream_it_ran_on(PyObject* op);  // in `operation.h`

// As `Value.settle`.
inline void settle(Value* value) {
  if (value->op != nullptr) value->home = stream_it_ran_on(value->op);
  value->read = true;
  give_up(std::exchange(value->op, nullptr));
}

// Whether nothing was written through the pieces of a value's storage, of which a flat buffer has as many as
// parameters, or through the wrappers around it; as `versions` of `lowtide/tape/values.py`.
inline bool wholes_intact(const Value* value) {
  auto storage = reinterpret_cast<int64_t>(value->held.storage().unsafeGetStorageImpl());
  if (integer(PyTuple_GET_ITEM(value->wholes, 0)) != storage) return true;  // a copy
  PyObject* known = PyTuple_GET_ITEM(value->wholes, 1);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(known); ++i) {
    PyObject* kept = PyList_GET_ITEM(known, i);
    int64_t then = integer(slot(kept, layout.kept_version));
    if (then >= 0 && version_of(THPVariable_Unpack(slot(kept, layout.kept_tensor))) != then) return false;
  }
  return true;
}

// As `Value.intact`.
inline bool intact(const Value* value) {
  if (version_of(value->held) != value->version) return false;
  if (value->wholes != nullptr && !wholes_intact(value)) return false;
  return static_cast<int64_t>(value->held.storage().nbytes()) >= value->nbytes;
}

// As `in_memory` of `lowtide/replay.py`; null if it is not.
inline const at::Tensor* in_memory(Value* value) {
  if (!value->held.defined()) return nullptr;
  if (intact(value)) return &value->held;
  if (value->op != nullptr) value->held.reset();
  return nullptr;
}

// ---------------------------------------------------------------------- handles

struct Handle : Record {
  Value* value = nullptr;  // owned
  Geometry geometry;
  PyObject* region = nullptr;
  PyObject* tape = nullptr;
  PyObject* counter = nullptr;  // a `Counter`, if it is not the one that is known of the storage
  int64_t sequence = 0;
  int64_t asked_in = -1;  // the last backward that retains its graph and has asked for it
  bool told = false;  // whether every request is reported to the decisions
  Handle *before = nullptr, *after = nullptr;  // others of the same value
};

inline void link(Handle* handle, Value* value) {
  Py_INCREF(object_of(value));
  handle->value = value;
  handle->before = nullptr;
  handle->after = value->handles;
  if (handle->after != nullptr) handle->after->before = handle;
  value->handles = handle;
  value->saved = true;
}

// Detach a handle from its value; returns the value, whose reference the caller has to release.
inline Value* unlink(Handle* handle) {
  Value* value = std::exchange(handle->value, nullptr);
  (handle->before != nullptr ? handle->before->after : value->handles) = handle->after;
  if (handle->after != nullptr) handle->after->before = handle->before;
  return value;
}

// As `Value.hand_over`; `chosen` may tell which handles, else all.
template <class Chosen>
void hand_over(Value* from, Value* next, Chosen chosen) {
  Owned kept(Py_NewRef(object_of(from)));
  c10::SmallVector<Handle*, 4> moved;
  for (Handle* handle = from->handles; handle != nullptr; handle = handle->after) {
    if (chosen(handle)) moved.push_back(handle);
  }
  while (!moved.empty()) {  // the oldest first, which keeps their order
    Py_DECREF(object_of(unlink(moved.back())));
    link(moved.back(), next);
    moved.pop_back();
  }
  from->saved = from->handles != nullptr;
  next->saved = true;
}

inline Handle* new_handle(
    Value* value, Geometry geometry, PyObject* region, PyObject* tape, int64_t sequence, bool told) {
  Handle* handle = new_record<Handle>(handle_type);
  handle->geometry = std::move(geometry);
  handle->region = Py_NewRef(region);
  handle->tape = Py_NewRef(tape);
  handle->sequence = sequence;
  handle->told = told;
  link(handle, value);
  return handle;
}

// The geometry of a tensor over a value's storage: the value's own object, if it is equal.
inline Geometry geometry_in(Value* value, const at::Tensor& tensor) {
  if (!value->whole.defined()) value->whole = Geometry(tensor);
  return value->whole.fits(tensor) ? value->whole : Geometry(tensor);
}

}  // namespace lowtide

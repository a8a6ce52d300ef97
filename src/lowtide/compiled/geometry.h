// How a tensor lies in its storage, and how it is made again from that.
//
// Problem: the geometry of each tensor that an operation reads or autograd saves is recorded, and mostly
// it is that of a tensor which another operation made. Invariant: a geometry never changes once made, so
// that records may share it; its users are counted under the GIL. Rejected: a copy for each tensor, which
// takes more memory than the rest of a record.
#pragma once

#include "objects.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/as_strided.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <typeinfo>

namespace lowtide {

class Geometry {
 public:
  Geometry() = default;
  explicit Geometry(const at::Tensor& tensor)
      : Geometry(tensor.sizes(), tensor.strides(), tensor.storage_offset(), tensor.dtype()) {}
  Geometry(c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset, caffe2::TypeMeta dtype) {
    void* room = PythonMemory<char>().allocate(sizeof(Shared) + 2 * size.size() * sizeof(int64_t));
    shared_ = new (room) Shared{1, static_cast<uint32_t>(size.size()), dtype, offset};
    std::copy(size.begin(), size.end(), shared_->numbers());
    std::copy(stride.begin(), stride.end(), shared_->numbers() + size.size());
  }
  Geometry(const Geometry& other) : shared_(other.shared_) {
    if (shared_ != nullptr) ++shared_->users;
  }
  Geometry(Geometry&& other) noexcept : shared_(std::exchange(other.shared_, nullptr)) {}
  Geometry& operator=(Geometry other) noexcept {
    std::swap(shared_, other.shared_);
    return *this;
  }
  ~Geometry() {
    if (shared_ != nullptr && --shared_->users == 0) PyObject_Free(shared_);
  }

  bool defined() const { return shared_ != nullptr; }
  c10::IntArrayRef size() const { return {shared_->numbers(), shared_->dimensions}; }
  c10::IntArrayRef stride() const {
    return {shared_->numbers() + shared_->dimensions, shared_->dimensions};
  }
  int64_t offset() const { return shared_->offset; }
  caffe2::TypeMeta dtype() const { return shared_->dtype; }

  bool fits(const at::Tensor& base) const {
    return base.dtype() == dtype() && base.storage_offset() == offset() && base.sizes() == size() &&
        base.strides() == stride();
  }

  // This view of a tensor over the same storage. Runs below autograd.
  at::Tensor of(const at::Tensor& base) const {
    if (fits(base)) return base;
    if (typeid(*base.unsafeGetTensorImpl()) != typeid(c10::TensorImpl) && base.dtype() == dtype()) {
      return at::as_strided(base, size(), stride(), offset());  // not a plain TensorImpl
    }
    size_t need =
        at::detail::computeStorageNbytes(size(), stride(), dtype().itemsize(), offset());
    TORCH_CHECK(need <= base.storage().nbytes(), "lowtide: a replayed tensor has ",
                base.storage().nbytes(), " bytes where ", need, " were recorded; please report this");
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), dtype());
    made.unsafeGetTensorImpl()->set_storage_offset(offset());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(size(), stride());
    return made;
  }

 private:
  struct Shared {
    uint32_t users, dimensions;
    caffe2::TypeMeta dtype;
    int64_t offset;
    int64_t* numbers() { return reinterpret_cast<int64_t*>(this + 1); }
  };
  Shared* shared_ = nullptr;
};

inline PyObject* torch_size;  // the class torch.Size

// A Python `Ref`; `value` null: blank memory.
inline PyObject* new_ref(PyObject* value, const Geometry& geometry) {
  const Layout& l = layout;
  Owned made(checked(l.ref->tp_alloc(l.ref, 0)));
  PyObject* ref = made.get();
  Owned sizes = tuple_of(geometry.size());
  slot(ref, l.ref_value) = Py_NewRef(or_none(value));
  slot(ref, l.ref_dtype) =
      Py_NewRef(object_of(torch::getTHPDtype(c10::typeMetaToScalarType(geometry.dtype()))));
  slot(ref, l.ref_size) = checked(PyObject_CallOneArg(torch_size, sizes.get()));
  slot(ref, l.ref_stride) = tuple_of(geometry.stride()).release();
  slot(ref, l.ref_offset) = checked(PyLong_FromLongLong(geometry.offset()));
  slot(ref, l.ref_blank) = Py_NewRef(Py_None);
  return made.release();
}

inline Geometry geometry_of(PyObject* ref) {
  using Few = c10::SmallVector<int64_t, 5>;
  return Geometry(
      numbers_in<Few>(slot(ref, layout.ref_size)), numbers_in<Few>(slot(ref, layout.ref_stride)),
      integer(slot(ref, layout.ref_offset)),
      c10::scalarTypeToTypeMeta(as<THPDtype>(slot(ref, layout.ref_dtype))->scalar_type));
}

// Whether a view is the whole of a storage, each element once; as `covers` of `tape/pieces.py`.
inline bool covers(const Geometry& geometry, int64_t nbytes) {
  c10::SmallVector<std::pair<int64_t, int64_t>, 5> dims;
  for (size_t i = 0; i < geometry.size().size(); ++i) {
    if (geometry.size()[i] != 1) dims.emplace_back(geometry.stride()[i], geometry.size()[i]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t count = 1;
  for (auto [stride, size] : dims) {
    if (stride != count) return false;
    count *= size;
  }
  return geometry.offset() == 0 &&
      count * static_cast<int64_t>(geometry.dtype().itemsize()) == nbytes;
}

}  // namespace lowtide

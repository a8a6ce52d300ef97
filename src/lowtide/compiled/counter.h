// A tensor's version counter, without its memory: `Counter` of `lowtide/_compat/tensors.py`.
//
// Problem: only the counter that it moves tells whether a write through `.data` changes what autograd
// has saved unnoticed. Invariant: answers as the Python class does. Rejected: keeping an alias, which
// would keep the memory.
#pragma once

#include "objects.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>

namespace lowtide {

struct Counter {
  PyObject_HEAD
  c10::VariableVersion version;
  const void* memory;  // the storage of the tensor that has it, which may be gone
  uint32_t then;       // its number when this was made
};

inline PyTypeObject* counter_type;

inline PyObject* new_counter(const at::Tensor& tensor) {
  auto* made = PyObject_New(Counter, counter_type);
  if (made == nullptr) throw py::error_already_set();
  new (&made->version) c10::VariableVersion(tensor.unsafeGetTensorImpl()->version_counter());
  made->memory = tensor.storage().unsafeGetStorageImpl();
  made->then = made->version.enabled() ? made->version.current_version() : 0;
  return object_of(made);
}

inline void delete_counter(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<Counter*>(self)->version.~VariableVersion();
  PyObject_Free(self);
  Py_DECREF(type);
}

inline const c10::VariableVersion& counter_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter();
}

// Whether two version counters are one. What torch shows of a counter is its number; the object is all
// that a `VariableVersion` consists of.
inline bool same_counter(const c10::VariableVersion& one, const c10::VariableVersion& other) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*), "is more than a pointer to a counter");
  return one.enabled() && std::memcmp(&one, &other, sizeof(one)) == 0;
}

inline bool same_counter(const at::Tensor& one, const at::Tensor& other) {
  return same_counter(counter_of(one), counter_of(other));
}

inline PyObject* counter_shares(PyObject* self, PyObject* wrapped) {
  HANDLE_TH_ERRORS
  const at::Tensor& tensor = THPVariable_Unpack(wrapped);
  return PyBool_FromLong(same_counter(reinterpret_cast<Counter*>(self)->version, counter_of(tensor)));
  END_HANDLE_TH_ERRORS
}

inline bool moved_over(const Counter* counter, const at::Tensor& held) {
  const c10::VariableVersion& now = counter->version;
  return now.enabled() && now.current_version() != counter->then &&
      held.storage().unsafeGetStorageImpl() == counter->memory;
}

inline PyObject* counter_moved_over(PyObject* self, PyObject* wrapped) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(moved_over(reinterpret_cast<Counter*>(self), THPVariable_Unpack(wrapped)));
  END_HANDLE_TH_ERRORS
}

inline PyMethodDef counter_methods[] = {
    {"shares", counter_shares, METH_O, nullptr},
    {"moved_over", counter_moved_over, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

inline PyType_Slot counter_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(delete_counter)},
    {Py_tp_methods, counter_methods},
    {0, nullptr}};

inline PyType_Spec counter_spec = {
    "lowtide.compiled.Counter", sizeof(Counter), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, counter_slots};

}  // namespace lowtide

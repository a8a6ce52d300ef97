// Python's lock around operations.
//
// Problem: autograd gives the lock up before each operator, a record needs it, and the kernel below does
// not; taking it and giving it up costs a thousand instructions, as much as a small kernel. Invariant: it is
// held for less than another thread has to wait for it in any Python program, and by nothing that waits.
// Rejected: a lock of our own; what a record consists of are Python objects.
#pragma once

#include <Python.h>

#include <ATen/core/stack.h>

#include <algorithm>

namespace lowtide {

inline bool holds_the_gil(PyThreadState* thread) {
#if PY_VERSION_HEX >= 0x030D0000
  return PyThreadState_GetUnchecked() == thread;
#else
  return _PyThreadState_UncheckedGet() == thread;
#endif
}

// The lock until the end of the scope. `PyGILState_Ensure` and its counterpart look the thread up twice, and
// count; they are needed where Python does not know the thread yet.
class Gil {
 public:
  Gil() : thread_(PyGILState_GetThisThreadState()) {
    if (thread_ == nullptr) {
      ensured_ = PyGILState_Ensure();
    } else if (!(held_ = holds_the_gil(thread_))) {
      PyEval_RestoreThread(thread_);
    }
  }
  Gil(const Gil&) = delete;
  ~Gil() {
    if (thread_ == nullptr) {
      PyGILState_Release(ensured_);
    } else if (!held_) {
      PyEval_SaveThread();
    }
  }

 private:
  PyThreadState* thread_;
  PyGILState_STATE ensured_{};
  bool held_ = false;
};

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

constexpr int64_t SHORT = 4096;  // elements: kernels start threads of their own from 32,768 on

// Whether a call takes so short that it may keep the lock: it reads little, all of it on the CPU, where
// nothing waits for another thread. To be asked of calls whose tensors are all ordinary.
inline bool is_short(c10::ArrayRef<c10::IValue> values) {
  int64_t elements = 0;
  auto is_little = [&](const c10::IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined()) return true;
    const c10::TensorImpl* impl = value.toTensor().unsafeGetTensorImpl();
    return impl->is_cpu() && (elements += impl->numel()) <= SHORT;
  };
  for (const c10::IValue& value : values) {
    if (value.isDevice() && !value.toDevice().is_cpu()) return false;
    if (value.isList()) {
      auto items = value.toListRef();
      if (!std::all_of(items.begin(), items.end(), is_little)) return false;
    } else if (!is_little(value)) {
      return false;
    }
  }
  return elements > 0;
}

// Whether a call made so much of little that the next one of its operator has to give the lock up.
inline bool made_much(c10::ArrayRef<c10::IValue> results) {
  return std::any_of(results.begin(), results.end(), [](const c10::IValue& result) {
    bool tensor = result.isTensor() && result.toTensor().defined();
    return tensor && result.toTensor().unsafeGetTensorImpl()->numel() > 16 * SHORT;
  });
}

}  // namespace lowtide

// What the compiled recorder knows at every operation: itself, the operator, the global switches.
//
// Problem: each of these is a Python object somewhere, and asking for it costs more than small kernels.
// Invariant: `State` is the base of the Python recorder, so that both read and write one set of
// fields; facts of an operator are read once a thread; the switches are compared as numbers and
// become Python's tuple only when they change. Rejected: a second copy of any of it.
#pragma once

#include "table.h"
#include "operation.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <limits>

namespace lowtide {

// No kernel of torch's is registered to this key on any operator, no tensor has it; it stands below autograd
// and Python modes and above the kernels. It is on while a thread records.
constexpr auto KEY = c10::DispatchKey::Fake;

// Base class of the Python recorder that this file speeds up: the fields that both touch.
struct State {
  PyObject_HEAD
  PyObject* region;
  PyObject* table;  // a `Table`
  PyObject* live;  // a `Box`
  PyObject* forget;
  PyObject* read;
  PyObject* before;
  PyObject* tape;
  PyObject* decisions;
  PyObject* script;   // the plan to follow, or none
  PyObject* made;     // where to note what was made while it is followed: a `WeakList`
  PyObject* handles;  // and what autograd got
  PyObject* sizes;    // none, or the plan is that of a larger step: a list for the bytes that are made
  PyObject* counts;     // the one device whose values have bytes, or none: all
  PyObject* settle;     // to be called with the first device of an accelerator that is met, or none
  PyObject* next_step;  // to be called before autograd saves anything more, or none
  long long sequence, numbers, group;
  long long limit;  // bytes that may be alive while the script is followed, -1: any
  char lazy_bits, paused, asks, timed;
  State* outer;  // the recording that this one stands inside of, on the same thread
};

inline thread_local State* current = nullptr;

inline PyTypeObject* state_type;

// Whether it is open, and no backward runs in it or has ended what it records.
inline bool records_forward(PyObject* recorder) {
  if (is_none(recorder) || !PyObject_TypeCheck(recorder, state_type)) return false;
  auto* state = as<State>(recorder);
  return !state->paused && is_none(state->next_step);
}

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

inline void run_below(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, KEY), stack);
}

// ---------------------------------------------------------------------- global switches

// `_compat.switches.flushes_denormals`: a flag of the processor, one for each thread.
inline bool flushes_denormals() {
  static const volatile double smallest_normal = std::numeric_limits<double>::min();
  return smallest_normal * 0.5 == 0.0;
}

// That flag as an operation found it, and back.
class RestoredFlushing {
 public:
  explicit RestoredFlushing(bool recorded) : before_(flushes_denormals()) {
    changed_ = recorded != before_;
    if (changed_) at::globalContext().setFlushDenormal(recorded);
  }
  ~RestoredFlushing() {
    if (changed_) at::globalContext().setFlushDenormal(before_);
  }

 private:
  bool before_;
  bool changed_;
};

struct Switches {
  bool mkldnn, nnpack, deterministic, cuda, cudnn, benchmark, cudnn_deterministic;
  std::array<at::Float32Precision, 7> precisions;  // those of CUDA only where it is in use
  bool operator==(const Switches&) const = default;
};

inline PyObject *devices_names, *seen_name;  // of `_compat.devices`, and "accelerator_seen"

inline Switches switches_now() {
  using Backend = at::Float32Backend;
  using Op = at::Float32Op;
  auto& context = at::globalContext();
  bool accelerated = PyDict_GetItemWithError(devices_names, seen_name) == Py_True;
  auto of_cuda = [&](Op op) {
    return accelerated ? context.float32Precision(Backend::CUDA, op) : at::Float32Precision{};
  };
  return {context.userEnabledMkldnn(),
          context.userEnabledNNPACK(),
          context.deterministicAlgorithms(),
          accelerated,
          context.userEnabledCuDNN(),
          context.benchmarkCuDNN(),
          context.deterministicCuDNN(),
          {context.float32Precision(Backend::GENERIC, Op::ALL),
           of_cuda(Op::MATMUL),
           of_cuda(Op::CONV),
           of_cuda(Op::RNN),
           context.float32Precision(Backend::MKLDNN, Op::MATMUL),
           context.float32Precision(Backend::MKLDNN, Op::CONV),
           context.float32Precision(Backend::MKLDNN, Op::RNN)}};
}

inline PyObject* ambient_function;  // `_compat.switches.ambient`

// The tuple that Python makes of the switches: one object as long as they stay as they are.
inline PyObject* ambient_now() {
  static thread_local Switches last;
  static thread_local PyObject* tuple = nullptr;
  Switches now = switches_now();
  if (tuple == nullptr || !(now == last)) {
    PyObject* made = checked(PyObject_CallNoArgs(ambient_function));
    if (tuple != nullptr && PyObject_RichCompareBool(made, tuple, Py_EQ) == 1) {
      Py_DECREF(made);
    } else {
      Py_XDECREF(tuple);
      tuple = made;
    }
    last = now;
  }
  return tuple;
}

}  // namespace lowtide

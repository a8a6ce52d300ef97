// What the compiled recorder needs at every operation: itself, the operator, the global switches.
//
// Problem: each of these is a Python object somewhere, and reading it costs more than small kernels.
// Invariant: `State` is the base class of the compiled recorder's Python class, so that C++ and Python
// read and write one set of fields; an operator's facts are read once per thread; the switches are
// compared as numbers, and Python's tuple is made anew only when they change. Rejected: a second copy of
// any of it.
#pragma once

#include "gil.h"
#include "operation_types.h"
#include "table.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <limits>

namespace lowtide {

// Base class of the compiled recorder's Python class: the fields that both sides use.
struct State {
  PyObject_HEAD
  PyObject* region;
  PyObject* table;  // a `Table`
  PyObject* live;  // a `Box`
  PyObject* forget;
  PyObject* read;    // of `tape/sharded.py`, as the next
  PyObject* newest;
  PyObject* before;
  PyObject* tape;
  PyObject* decisions;
  PyObject* script;   // the plan to follow, or none
  PyObject* headroom;  // a `Headroom` if there is none and nobody watches, or none
  PyObject* made;     // a `WeakList` for the values that are made while it is followed
  PyObject* handles;  // and one for the handles that autograd gets
  PyObject* sizes;    // if the plan is that of a larger step: a list for the bytes made, else none
  PyObject* counts;     // the one device whose bytes count; none: all do
  PyObject* settle;     // to be called with the first accelerator device that is met, or none
  PyObject* next_step;  // to be called before autograd saves anything more, or none
  PyObject* calls;      // `Calls` to note the step's in, or to compare them with while idle; or none
  long long sequence, numbers, group, gathering;
  long long limit;  // bytes that may be live while the script is followed; -1: any number
  char lazy_bits, paused, asks, timed;
  State* outer;  // the recording around this one on the same thread
};

inline thread_local State* current = nullptr;

inline PyTypeObject* state_type;

// Whether a recorder is open and no backward runs inside it or has ended its step.
inline bool records_forward(PyObject* recorder) {
  if (is_none(recorder) || !PyObject_TypeCheck(recorder, state_type)) return false;
  auto* state = as<State>(recorder);
  return !state->paused && is_none(state->next_step);
}

inline void run_below(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, KEY), stack);
}

// ---------------------------------------------------------------------- global switches

// `_compat.switches.flushes_denormals`: a processor flag, which each thread has.
inline bool flushes_denormals() {
  static const volatile double smallest_normal = std::numeric_limits<double>::min();
  return smallest_normal * 0.5 == 0.0;
}

// That flag as it was when an operation was recorded, until the end of the scope.
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
  bool mkldnn, mkldnn_deterministic, nnpack, half_sums, filled, deterministic;
  bool cuda, cudnn, benchmark, cudnn_deterministic;
  // Those of CUDA only where it is in use.
  std::array<int, 8> libraries;
  std::array<at::Float32Precision, 7> precisions;
  bool operator==(const Switches&) const = default;
};

inline PyObject *devices_names, *seen_name;  // of `_compat.devices`, and "accelerator_seen"

// torch 2.13 and later.
template <typename Context>
int depthwise_kernel(const Context& context) {
  if constexpr (requires { context.cudnnDepthwiseKernel(); }) {
    return static_cast<int>(context.cudnnDepthwiseKernel());
  } else {
    return 0;
  }
}

inline Switches switches_now() {
  using Backend = at::Float32Backend;
  using Op = at::Float32Op;
  auto& context = at::globalContext();
  bool accelerated = PyDict_GetItemWithError(devices_names, seen_name) == Py_True;
  auto of_cuda = [&](Op op) {
    return accelerated ? context.float32Precision(Backend::CUDA, op) : at::Float32Precision{};
  };
  std::array<int, 8> libraries{};
  if (accelerated) {
    libraries = {static_cast<int>(context.allowFP16ReductionCuBLAS()),
                 static_cast<int>(context.allowBF16ReductionCuBLAS()),
                 static_cast<int>(context.allowFP16AccumulationCuBLAS()),
                 static_cast<int>(context.blasPreferredBackend()),
                 static_cast<int>(context.linalgPreferredBackend()),
                 static_cast<int>(context.immediateMiopen()),
                 static_cast<int>(context.getROCmFAPreferredBackend()),
                 depthwise_kernel(context)};
  }
  return {context.userEnabledMkldnn(),
          context.deterministicMkldnn(),
          context.userEnabledNNPACK(),
          context.allowFP16ReductionCPU(),
          context.deterministicFillUninitializedMemory(),
          context.deterministicAlgorithms(),
          accelerated,
          context.userEnabledCuDNN(),
          context.benchmarkCuDNN(),
          context.deterministicCuDNN(),
          libraries,
          {context.float32Precision(Backend::GENERIC, Op::ALL),
           of_cuda(Op::MATMUL),
           of_cuda(Op::CONV),
           of_cuda(Op::RNN),
           context.float32Precision(Backend::MKLDNN, Op::MATMUL),
           context.float32Precision(Backend::MKLDNN, Op::CONV),
           context.float32Precision(Backend::MKLDNN, Op::RNN)}};
}

inline PyObject* ambient_function;  // `_compat.switches.ambient`

// The tuple that Python makes of the switches: the same object as long as they do not change.
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

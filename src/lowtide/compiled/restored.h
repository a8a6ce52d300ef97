// Restoring the state of the thread and the process that an operation was recorded under.
//
// Problem: a replay runs wherever and whenever autograd asks, and kernels depend on the state around
// them. Invariant: what is set for one operation is undone after it, even if it throws. Rejected: one
// object for all of it, which would read state that most operations do not depend on.
#pragma once

#include "state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>

#include <optional>

namespace lowtide {

// As `_compat.below_autograd`.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard above;
  at::impl::TorchFunctionDisabledState before;

  static c10::DispatchKeySet keys() {
    using c10::DispatchKey;
    return c10::autocast_dispatch_keyset |
        c10::DispatchKeySet({DispatchKey::Python, DispatchKey::PythonDispatcher,
            DispatchKey::PythonTLSSnapshot, DispatchKey::FuncTorchDynamicLayerFrontMode,
            DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::FuncTorchBatchedDecomposition,
            DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchVmapMode,
            DispatchKey::FuncTorchGradWrapper, DispatchKey::VmapMode, KEY});
  }
  BelowAutograd() : above(keys()), before(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(
        at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~BelowAutograd() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before); }
};

struct RestoredGradMode {
  bool before = c10::GradMode::is_enabled();
  ~RestoredGradMode() { c10::GradMode::set_enabled(before); }
};

// An operation's number of threads, until the end of the scope: where threads divide a tensor decides bits.
class RestoredThreads {
 public:
  explicit RestoredThreads(int recorded) : before_(at::get_num_threads()) {
    changed_ = recorded != before_;
    if (changed_) at::set_num_threads(recorded);
  }
  ~RestoredThreads() {
    if (changed_) at::set_num_threads(before_);
  }

 private:
  int before_;
  bool changed_;
};

// Holds a Python lock; waiting for it releases the GIL.
struct Locked {
  PyObject* lock;
  explicit Locked(PyObject* l) : lock(l) {
    static PyObject* name = interned("acquire");
    Owned done(checked(PyObject_CallMethodNoArgs(lock, name)));
  }
  ~Locked() {
    static PyObject* name = interned("release");
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    Owned done(PyObject_CallMethodNoArgs(lock, name));
    PyErr_Restore(type, error, trace);
  }
};

inline PyObject* draws_lock;  // `lowtide.tape.generators.lock`

// Put one CPU generator, whose lock is held, into the state of another, without the tensor that torch's own
// way goes through.
inline void copy_generator(const at::Generator& from, const at::Generator& to) {
  auto* source = from.get<at::CPUGeneratorImpl>();
  auto* target = to.get<at::CPUGeneratorImpl>();
  target->set_engine(source->engine());
  target->set_next_float_normal_sample(source->next_float_normal_sample());
  target->set_next_double_normal_sample(source->next_double_normal_sample());
}

// The CPU generator in a recorded state, until the end of the scope (rule 3). No other replay draws meanwhile.
class RestoredGenerator {
 public:
  explicit RestoredGenerator(const at::Generator& drawn) {
    if (!drawn.defined()) return;
    locked_.emplace(draws_lock);
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(generator.mutex());
    before_ = generator.clone();
    copy_generator(drawn, generator);
  }
  ~RestoredGenerator() {
    if (!before_.defined()) return;
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(generator.mutex());
    copy_generator(before_, generator);
  }

 private:
  std::optional<Locked> locked_;  // released last
  at::Generator before_;
};

}  // namespace lowtide

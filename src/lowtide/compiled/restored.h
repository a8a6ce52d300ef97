// Restoring the state of the thread and the process that an operation was recorded under.
//
// Problem: a replay runs wherever and whenever autograd asks, and kernels depend on the state around
// them. Invariant: what is set for one operation is undone after it, even if it throws. Rejected: one
// object for all of it, which would read state that most operations do not depend on.
#pragma once

#include "draws.h"

#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace lowtide {

// As `_compat.without_inference_mode`.
struct WithoutInferenceMode {
  std::optional<c10::InferenceMode> off;
  WithoutInferenceMode() {
    if (c10::InferenceMode::is_enabled()) off.emplace(false);
  }
};

// As `_compat.below_autograd`, in no inference mode.
struct BelowAutograd {
  WithoutInferenceMode versions;  // first: it sets the keys that the others exclude
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

}  // namespace lowtide

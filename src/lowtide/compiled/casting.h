// What autocast does inside of an operation: `lowtide/_compat/casting.py`, which has the rule, without
// Python.
//
// Problem: in a step under autocast nearly every operation has it on inside. Invariant: equal states are
// one object, which is never freed; its tuple is the one that Python itself would find. Rejected: asking
// Python at each operation, which costs more than recording it.
#pragma once

#include "objects.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

namespace lowtide {

struct Casting {
  std::vector<std::pair<c10::DeviceType, at::ScalarType>> kinds;
  PyObject* tuple;  // the same, as Python has it
};

inline PyObject* casting_function;  // `_compat.casting.casting_now`

// Whether operators that a kernel calls now may be cast, for any device.
inline bool casts_inside() {
  auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  return !(c10::autocast_dispatch_keyset - excluded).empty();
}

// The present state; null: nothing is cast. Needs the GIL.
inline const Casting* casting_now() {
  if (!casts_inside()) return nullptr;
  static auto* known = new std::vector<const Casting*>();
  auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  std::vector<std::pair<c10::DeviceType, at::ScalarType>> kinds;
  for (c10::DeviceType kind : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    if (!at::autocast::is_autocast_enabled(kind)) continue;
    if (excluded.has(at::autocast::get_autocast_dispatch_key_from_device_type(kind))) continue;
    kinds.emplace_back(kind, at::autocast::get_autocast_dtype(kind));
  }
  if (kinds.empty()) return nullptr;
  for (const Casting* each : *known) {
    if (each->kinds == kinds) return each;
  }
  known->push_back(new Casting{std::move(kinds), checked(PyObject_CallNoArgs(casting_function))});
  return known->back();
}

// Autocast as it was when an operation was recorded, until the end of the scope. Entered below autocast.
class RestoredCasting {
 public:
  explicit RestoredCasting(const Casting* recorded) : recorded_(recorded) {
    if (recorded_ == nullptr) return;
    keys_ = c10::impl::tls_local_dispatch_key_set();
    cached_ = at::autocast::is_autocast_cache_enabled();
    at::autocast::set_autocast_cache_enabled(false);
    for (auto [kind, dtype] : recorded_->kinds) {
      before_.emplace_back(at::autocast::is_autocast_enabled(kind), at::autocast::get_autocast_dtype(kind));
      at::autocast::set_autocast_enabled(kind, true);
      at::autocast::set_autocast_dtype(kind, dtype);
    }
  }
  RestoredCasting(const RestoredCasting&) = delete;
  ~RestoredCasting() {
    if (recorded_ == nullptr) return;
    for (size_t i = 0; i < before_.size(); ++i) {
      c10::DeviceType kind = recorded_->kinds[i].first;
      at::autocast::set_autocast_enabled(kind, before_[i].first);
      at::autocast::set_autocast_dtype(kind, before_[i].second);
    }
    at::autocast::set_autocast_cache_enabled(cached_);
    c10::impl::_force_tls_local_dispatch_key_set(keys_);
  }

 private:
  const Casting* recorded_;
  c10::impl::LocalDispatchKeySet keys_{c10::impl::PODLocalDispatchKeySet{}};
  bool cached_ = false;
  std::vector<std::pair<bool, at::ScalarType>> before_;
};

}  // namespace lowtide

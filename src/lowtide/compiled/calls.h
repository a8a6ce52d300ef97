// The calls of a step as digests: what an idle recorder compares instead of recording.
//
// Problem: where a step fits with everything kept and with room to spare, its records serve nothing.
// Invariant: an idle recorder runs a call without a record only if the call, and each before it, is the
// one that the recorded step of the same plan made: the operator, and of its tensors shapes, strides,
// dtypes, devices, `requires_grad` and which of the step's nodes made them. Numbers with a fraction are not
// compared: they change from step to step, and if a size depends on one, the next reader of it shows that.
// Rejected: looking at the first calls only, after which a step may still become another.
#pragma once

#include "state.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

namespace lowtide {

// To Python: `Calls()`, with `idle`, `at`, `unusual`, `same_as(other)` and `begin(spare)`.
struct Calls {
  PyObject_HEAD
  std::vector<uint64_t> digests;
  long long at;      // how many were compared
  char idle;         // compare, instead of noting
  char unusual;      // something was met that digests do not show
  bool backward;     // one has run since this step began
  uint64_t first;    // the number of autograd's next node when the step began
  long long spare;   // bytes that calls after the last one may still make without a record
};

inline PyTypeObject* calls_type;

inline Calls* calls_of(const State* state) {
  return state->calls != nullptr && Py_IS_TYPE(state->calls, calls_type) ? as<Calls>(state->calls) : nullptr;
}

inline Calls* idle_calls(const State* state) {
  Calls* calls = calls_of(state);
  return calls != nullptr && calls->idle ? calls : nullptr;
}

// ---------------------------------------------------------------------- digests

struct Digest {
  uint64_t number = 0x9E3779B97F4A7C15u;
  bool known = true;  // all of the call could be looked at without Python
  uint64_t first;     // the number of autograd's first node in this step

  explicit Digest(uint64_t first) : first(first) {}

  void add(uint64_t part) {
    number = (number ^ part) * 0xD6E8FEB86659FD93u;
    number ^= number >> 32;
  }

  // Which of the step's nodes has made a tensor: of the same calls on other results, autograd may save more.
  uint64_t maker(const c10::TensorImpl* impl) const {
    auto* meta = static_cast<torch::autograd::AutogradMeta*>(impl->autograd_meta());
    if (meta == nullptr || meta->grad_fn_ == nullptr) return 0;
    uint64_t number = meta->grad_fn_->sequence_nr();
    return number < first ? 1 : 2 + number - first;
  }

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return add(1);
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    auto keys = impl->key_set();
    add(keys.raw_repr());
    add((static_cast<uint64_t>(c10::typeMetaToScalarType(impl->dtype())) << 16) +
        (static_cast<uint64_t>(static_cast<uint8_t>(impl->device().index())) << 8) + impl->requires_grad());
    add(maker(impl));
    if (keys.has(c10::DispatchKey::Python) || impl->has_symbolic_sizes_strides() || tensor.is_nested()) {
      known = false;
      return;
    }
    for (int64_t size : impl->sizes()) add(static_cast<uint64_t>(size));
    if (!keys.has(c10::DispatchKey::Dense)) return;
    for (int64_t stride : impl->strides()) add(static_cast<uint64_t>(stride));
  }

  void add(const c10::IValue& value) {
    if (value.isTensor()) return add(value.toTensor());
    if (value.isInt()) return add(static_cast<uint64_t>(value.toInt()) ^ 7);
    if (value.isBool()) return add(value.toBool() ? 3 : 5);
    if (value.isList()) {
      auto items = value.toListRef();
      add(items.size());
      for (const c10::IValue& item : items) add(item);
      return;
    }
    add(11);
  }
};

inline Digest digest_of(uint64_t first, const c10::OperatorHandle& op, const Stack& stack) {
  Digest digest(first);
  digest.add(reinterpret_cast<uint64_t>(&op.schema()));
  digest.add(c10::GradMode::is_enabled());
  for (size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i) digest.add(stack[i]);
  return digest;
}

// Whether autograd may build on a call: no optimizer's, and no metric's.
inline bool has_gradient(const c10::OperatorHandle& op, const Stack& stack) {
  if (!c10::GradMode::is_enabled()) return false;
  auto wants = [](const c10::IValue& value) {
    return value.isTensor() && value.toTensor().defined() && value.toTensor().requires_grad();
  };
  for (size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i) {
    if (wants(stack[i])) return true;
    if (!stack[i].isList()) continue;
    auto items = stack[i].toListRef();
    if (std::any_of(items.begin(), items.end(), wants)) return true;
  }
  return false;
}

// ---------------------------------------------------------------------- as the recorder meets calls

inline bool in_backward() { return torch::autograd::get_current_graph_task_id() >= 0; }

// Whether a call belongs to the forward. A backward with a graph of its own does.
inline bool in_forward() { return !in_backward() || c10::GradMode::is_enabled(); }

// Note a call of a step that is recorded.
inline void note(Calls* calls, const State* state, const c10::OperatorHandle& op, const Stack& stack) {
  if (state->paused || !is_none(state->next_step) || !in_forward()) return;
  Digest digest = digest_of(calls->first, op, stack);
  calls->digests.push_back(digest.number);
  if (!digest.known) calls->unusual = 1;
}

// Whether a call after the last one, such as a metric's, takes little. Elsewhere, room is made for it.
inline bool fits(Calls* calls, const c10::OperatorHandle& op, const Stack& stack) {
  // Sparse tensors do not say how many bytes they have; what they consist of is read by other calls.
  auto bytes = [](const c10::IValue& value) {
    bool known = value.isTensor() && value.toTensor().defined() && value.toTensor().has_storage();
    return known ? static_cast<long long>(value.toTensor().nbytes()) : 0;
  };
  for (size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i) {
    calls->spare -= bytes(stack[i]);
    if (!stack[i].isList()) continue;
    for (const c10::IValue& item : stack[i].toListRef()) calls->spare -= bytes(item);
  }
  return calls->spare >= 0;
}

// Whether an idle recorder may let a call pass: it is the next one, or the forward is over.
inline bool passes(Calls* calls, const c10::OperatorHandle& op, const Stack& stack) {
  if (!in_forward()) return calls->backward = true;
  auto at = static_cast<size_t>(calls->at);
  if (calls->backward) return in_backward() || !has_gradient(op, stack);
  if (at == calls->digests.size()) return !has_gradient(op, stack) && fits(calls, op, stack);
  Digest digest = digest_of(calls->first, op, stack);
  if (!digest.known || digest.number != calls->digests[at]) return false;
  ++calls->at;
  return true;
}

// `Recorder.wake` of `lowtide/compiled/recorder.py`: from here on, the step is recorded.
inline void wake(State* state) {
  static PyObject* name = interned("wake");
  Owned done(checked(PyObject_CallMethodNoArgs(object_of(state), name)));
}

// ---------------------------------------------------------------------- as Python sees it

inline PyObject* new_calls(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* made = type->tp_alloc(type, 0);
  if (made != nullptr) new (&as<Calls>(made)->digests) std::vector<uint64_t>();
  if (made != nullptr) as<Calls>(made)->first = at::sequence_number::peek();
  return made;
}

inline void delete_calls(PyObject* self) {
  as<Calls>(self)->digests.~vector();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyObject* calls_same_as(PyObject* self, PyObject* other) {
  if (!Py_IS_TYPE(other, calls_type)) Py_RETURN_FALSE;
  return PyBool_FromLong(as<Calls>(self)->digests == as<Calls>(other)->digests);
}

// Compare the calls of the step that begins with these. `spare`: see there.
inline PyObject* calls_begin(PyObject* self, PyObject* spare) {
  auto* calls = as<Calls>(self);
  calls->spare = PyLong_AsLongLong(spare);
  if (calls->spare == -1 && PyErr_Occurred()) return nullptr;
  calls->first = at::sequence_number::peek();
  calls->at = 0;
  calls->idle = 1;
  calls->backward = false;
  Py_RETURN_NONE;
}

inline Py_ssize_t calls_length(PyObject* self) {
  return static_cast<Py_ssize_t>(as<Calls>(self)->digests.size());
}

inline PyMethodDef calls_methods[] = {
    {"same_as", calls_same_as, METH_O, nullptr},
    {"begin", calls_begin, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

inline PyMemberDef calls_members[] = {
    {"at", T_LONGLONG, offsetof(Calls, at), READONLY, nullptr},
    {"idle", T_BOOL, offsetof(Calls, idle), READONLY, nullptr},
    {"unusual", T_BOOL, offsetof(Calls, unusual), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

inline PyType_Slot calls_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(new_calls)},
    {Py_tp_dealloc, reinterpret_cast<void*>(delete_calls)},
    {Py_sq_length, reinterpret_cast<void*>(calls_length)},
    {Py_tp_methods, calls_methods},
    {Py_tp_members, calls_members},
    {0, nullptr}};

inline PyType_Spec calls_spec = {
    "lowtide.compiled.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT, calls_slots};

}  // namespace lowtide

// The saved-tensor hooks: what `Recorder.pack` and `unpack` of `lowtide/replay.py` do.
//
// Problem: autograd calls both for every saved tensor. Invariant: the handles have the attributes of the
// Python class, and what is not handled here is left to the Python hooks, on the same records. Rejected:
// a second implementation of the rare cases, which would have to give the same answers.
#pragma once

#include "replay.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <chrono>
#include <cstring>
#include <typeinfo>

namespace lowtide {

inline PyObject *python_unpack, *python_free_passed;
inline PyObject *keep_from_leaves_function, *listeners, *out_of_memory_error;

// ---------------------------------------------------------------------- pack

inline PyObject* call_python_pack(State* state, const at::Tensor& tensor) {
  static PyObject* name = interned("pack_slowly");
  c10::impl::ExcludeDispatchKeyGuard guard(KEY);
  Owned wrapped(checked(THPVariable_Wrap(tensor)));
  return checked(PyObject_CallMethodOneArg(object_of(state), name, wrapped.get()));
}

// Whether `make_fx` traces on this thread.
inline bool is_traced_by_fx() {
  return c10::impl::TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY).has_value();
}

inline PyObject* pack_tensor(State* state, const at::Tensor& tensor) {
  if (is_traced_by_fx()) return call_python_pack(state, tensor);
  bool after_failure = state->paused && torch::autograd::get_current_graph_task_id() < 0;
  if (current == nullptr || !is_ordinary(tensor) || state->lazy_bits ||
      !is_none(state->next_step) || after_failure) {  // first: on another thread
    return call_python_pack(state, tensor);
  }
  int64_t key = key_number(tensor);
  Owned owner;
  Entry* entry = find_entry(state->table, key);
  if (entry == nullptr) {
    owner = external(state, tensor, key, false);
    entry = find_entry(state->table, key);
  } else if (!is_current(entry, tensor) || is_given_out(entry, tensor)) {
    return call_python_pack(state, tensor);
  } else if (!is_external_now(entry, tensor)) {
    return call_python_pack(state, tensor);
  } else if (Value* found = value_in(entry); found != nullptr) {
    owner = Owned(Py_NewRef(object_of(found)));
  } else {
    return call_python_pack(state, tensor);
  }
  auto* value = as<Value>(owner.get());
  if (may_be_cut_off(state, value)) return call_python_pack(state, tensor);
  bool external = value->op == nullptr;
  if (!external && is_constant(value->op)) {  // a foreign kernel may fill it
    give_up(std::exchange(value->op, nullptr));
    external = true;
  }
  if (external && value->held.defined() && !same_counter(value->held, tensor)) {
    return call_python_pack(state, tensor);  // see `Known._know_counters`
  }
  if (!external) {
    if (value->scope == nullptr || depth_of(state->region) < depth_of(value->scope)) {
      Py_XDECREF(std::exchange(value->scope, Py_NewRef(state->region)));
    }
  }
  if (!value->held.defined()) {
    if (external || value->keep || shall_hold(state, value)) hold(entry, value, tensor);
  }
  if (!external && !value->held.defined() && entry->counter == nullptr) {
    entry->counter = new_counter(tensor);  // while it is held, its alias shows the counter
  }
  Owned handle(object_of(
      new_handle(value, geometry_in(value, tensor), state->region, state->tape, state->sequence,
                 state->asks)));
  bool shown = !value->held.defined() || same_counter(value->held, tensor);
  if (!shown || has_other_counter(entry, tensor)) {
    as<Handle>(handle.get())->counter = new_counter(tensor);
  }
  packed(state, handle.get(), value);
  return handle.release();
}

// ---------------------------------------------------------------------- unpack

inline void tell(PyObject* decisions, PyObject* name, PyObject* what) {
  PyObject* arguments[] = {decisions, what};
  Owned done(checked(PyObject_VectorcallMethod(name, arguments, 2, nullptr)));
}

// As `_all_stays_held` of `lowtide/replay.py`.
struct AllStaysHeld {
  PyObject* recorder;
  explicit AllStaysHeld(PyObject* r) : recorder(is_none(r) ? nullptr : Py_NewRef(r)) { set(Py_True); }
  AllStaysHeld(const AllStaysHeld&) = delete;
  ~AllStaysHeld() {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    set(Py_False);
    PyErr_Restore(type, error, trace);
    Py_XDECREF(recorder);
  }

 private:
  void set(PyObject* on) const {
    static PyObject* name = interned("replaying");
    if (recorder != nullptr && PyObject_SetAttr(recorder, name, on) < 0) PyErr_Clear();
  }
};

// The device has no memory for a replay: whether some was freed, as in `recorder.h`.
inline bool make_room(PyObject* decisions, int attempt) {
  static PyObject* name = interned("replay_out_of_memory");
  Owned number(checked(PyLong_FromLong(attempt)));
  PyObject* arguments[] = {decisions, number.get()};
  Owned answer(checked(PyObject_VectorcallMethod(name, arguments, 2, nullptr)));
  return answer.get() == Py_True;
}

// Replay what makes a value; report it to the decisions and the listeners.
inline at::Tensor replayed(
    Value* value, PyObject* handle, PyObject* decisions, const Box* events, bool told) {
  static PyObject* name = interned("replayed");
  auto began = std::chrono::steady_clock::now();
  std::optional<Replay> replay(std::in_place, value, handle, decisions, events, !told);
  at::Tensor base;
  for (int attempt = 0;; ++attempt) {
    std::exception_ptr failed;
    Owned of_python;
    try {
      base = replay->run();
      break;
    } catch (const c10::OutOfMemoryError&) {
      failed = std::current_exception();
    } catch (py::error_already_set& error) {
      if (!error.matches(out_of_memory_error)) throw;
      of_python = Owned(Py_NewRef(error.value().ptr()));
    }
    replay.emplace(value, handle, decisions, events, !told);  // frees what it has made so far
    if (failed && !make_room(decisions, attempt)) std::rethrow_exception(failed);
    if (of_python.get() == nullptr) continue;
    PyException_SetTraceback(of_python.get(), Py_None);  // its frames hold tensors
    if (make_room(decisions, attempt)) continue;
    PyErr_SetObject(out_of_memory_error, of_python.get());
    throw py::error_already_set();
  }
  std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
  if (!told && PyList_GET_SIZE(listeners) == 0) return base;
  Owned operations = replay->operations();
  if (told) {
    Owned spent(PyFloat_FromDouble(seconds.count()));
    PyObject* arguments[] = {decisions, operations.get(), spent.get()};
    Owned done(checked(PyObject_VectorcallMethod(name, arguments, 3, nullptr)));
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(listeners); ++i) {
    Owned done(checked(PyObject_CallOneArg(PyList_GET_ITEM(listeners, i), operations.get())));
  }
  return base;
}

// Whether a node is one of Python's, whose class torch does not export. A node unpacks all that it has saved
// one after the other, so the last class is mostly the next one. Needs the GIL.
inline bool is_python_node(const torch::autograd::Node& node) {
  static const std::type_info* last = nullptr;
  static bool answer = false;
  const std::type_info& type = typeid(node);
  if (&type != last) {
    answer = std::strstr(type.name(), "PyNode") != nullptr;
    last = &type;
  }
  return answer;
}

// Whether a custom backward runs that may return `tensor` as the first gradient of a leaf, as it is.
inline bool may_be_a_gradient(const at::Tensor& tensor) {
  if (c10::GradMode::is_enabled()) return false;
  auto node = torch::autograd::get_current_node();
  auto* running = node.get();
  if (running == nullptr || !is_python_node(*running)) return false;
  for (const torch::autograd::Edge& edge : node->next_edges()) {
    auto* following = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
    if (following == nullptr || following->variable.grad().defined()) continue;
    if (following->variable.sizes() == tensor.sizes()) return true;
  }
  return false;
}

// As `keep_from_leaves` of `lowtide/_compat/leafgrads.py`, which has the reason.
inline void keep_from_leaves(const at::Tensor& tensor) {
  if (!may_be_a_gradient(tensor)) return;
  Owned wrapped(checked(THPVariable_Wrap(tensor)));
  Owned done(checked(PyObject_CallOneArg(keep_from_leaves_function, wrapped.get())));
}

// The tensor that autograd has saved, over the memory of `base`. A custom backward may write what it is
// given: a view shows that to the value it is of.
inline at::Tensor as_saved(const Handle* handle, const at::Tensor& base) {
  at::Tensor tensor = base;
  if (!handle->geometry.fits(base)) {
    BelowAutograd below;
    tensor = handle->geometry.of(base);
    tensor.unsafeGetTensorImpl()->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
  }
  keep_from_leaves(tensor);
  return tensor;
}

// What was saved through a part of a storage with a counter of its own may have been written through it
// while nothing recorded: then what is held is not its content any more.
inline void look_at_counter(Handle* handle) {
  Value* value = handle->value;
  if (handle->counter == nullptr || !Py_IS_TYPE(handle->counter, counter_type)) return;
  if (!value->held.defined()) return;
  if (!moved_over(as<Counter>(handle->counter), value->held)) return;
  if (value->op == nullptr) lost(value, Owned(new_ref(object_of(value), handle->geometry)).get());
  value->held.reset();
}

// As `free_once_asked` of `lowtide/tape/retained.py`. Under the tape's lock, as a replay on another thread
// may be about to read the value.
inline void free_once_asked(Handle* handle) {
  int64_t backward = torch::autograd::get_current_graph_task_id();
  if (handle->told || backward < 0 || !torch::autograd::get_current_graph_task_keep_graph()) return;
  if (slot(handle->tape, layout.tape_recorder) != Py_None) return;
  Locked locked(slot(handle->tape, layout.tape_lock));
  handle->asked_in = backward;
  if (slot(handle->tape, layout.tape_passing) != Py_None) {  // regions are nested
    Owned done(checked(PyObject_CallOneArg(python_free_passed, object_of(handle))));
    return;
  }
  Value* value = handle->value;
  if (value->op == nullptr || value->keep || value->scope != value->region) return;
  for (const Handle* other = value->handles; other != nullptr; other = other->after) {
    if (other->asked_in != backward) return;
  }
  value->held.reset();
}

inline at::Tensor unpack_handle(Handle* handle) {
  static PyObject *requested = interned("requested"), *answered = interned("answered"),
                  *adopt = interned("adopt");
  PyObject* tape = handle->tape;
  // In a planned backward without an observer, requests are only counted.
  PyObject* counted = slot(tape, layout.tape_events);
  Box* events = Py_IS_TYPE(counted, box_type) ? as<Box>(counted) : nullptr;
  // A differentiable backward inside the forward (a gradient penalty) does not belong to it.
  bool inside = at::GradMode::is_enabled() && slot(tape, layout.tape_recorder) != Py_None;
  if (inside) events = nullptr;
  if (events != nullptr) events->number += handle->value->number >= 0;
  bool told = handle->told && events == nullptr;
  if (!told) {
    look_at_counter(handle);
    if (const at::Tensor* held = in_memory(handle->value)) {
      at::Tensor found = *held;
      order_after_its_stream(handle->value, found);
      free_once_asked(handle);
      return as_saved(handle, found);
    }
  }
  Locked locked(slot(tape, layout.tape_lock));
  Owned decisions(Py_NewRef(slot(tape, layout.tape_decisions)));
  if (told) tell(decisions.get(), requested, object_of(handle));
  if (told) look_at_counter(handle);
  Owned owner(Py_NewRef(object_of(handle->value)));
  auto* value = as<Value>(owner.get());
  const at::Tensor* held = in_memory(value);
  at::Tensor base;
  if (held != nullptr) {
    base = *held;
  } else {
    if (value->op == nullptr) lost(value, Owned(new_ref(owner.get(), handle->geometry)).get());
    {
      AllStaysHeld held_meanwhile(slot(tape, layout.tape_recorder));
      base = replayed(value, object_of(handle), decisions.get(), events, handle->told);
    }
    Owned recorder(Py_NewRef(slot(tape, layout.tape_recorder)));
    if (recorder.get() != Py_None) {
      Owned wrapped(checked(THPVariable_Wrap(base)));
      PyObject* arguments[] = {recorder.get(), owner.get(), wrapped.get()};
      Owned done(checked(PyObject_VectorcallMethod(adopt, arguments, 3, nullptr)));
    }
  }
  order_after_its_stream(value, base);
  if (told) {
    Owned given(checked(THPVariable_Wrap(base)));
    PyObject* arguments[] = {decisions.get(), owner.get(), given.get()};
    Owned done(checked(PyObject_VectorcallMethod(answered, arguments, 3, nullptr)));
  }
  free_once_asked(handle);
  return as_saved(handle, base);
}

inline PyObject* unpack(PyObject*, PyObject* packed) {
  HANDLE_TH_ERRORS
  if (!Py_IS_TYPE(packed, handle_type)) return PyObject_CallOneArg(python_unpack, packed);
  return THPVariable_Wrap(unpack_handle(as<Handle>(packed)));
  END_HANDLE_TH_ERRORS
}

}  // namespace lowtide

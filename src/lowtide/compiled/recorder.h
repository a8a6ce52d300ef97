// The recorder's hot path: what `Recorder._run_recorded` does, without Python.
//
// Problem: a dispatch mode costs 5 to 15 microseconds per operation before it does anything.
// Invariant: a boxed fallback just below autograd sees every operation of a recording thread, except some
// views, runs it exactly once, and leaves the same records as the Python recorder; anything unusual
// (unknown tensors, parts of uninitialized memory, policies that look at arguments) is handed to that
// recorder, which works on the same table. Rejected: a recorder entirely in C++, whose rare paths would be
// written and tested twice.
#pragma once

#include "headroom.h"
#include "streams.h"
#include "writes.h"

#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>

namespace lowtide {

// As `read_unrecorded` of `lowtide/tape/streams.py`.
inline void read_unrecorded(State* state, const Stack& stack, size_t count) {
  auto read = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !has_streams(tensor.device()) || !is_ordinary(tensor)) return;
    Entry* entry = find_entry(state->table, key_number(tensor));
    Value* value = entry == nullptr ? nullptr : value_in(entry);
    const c10::Stream* stream = value == nullptr ? nullptr : made_on(value);
    c10::Stream current = current_stream(tensor.device());
    if (stream && *stream != current) protect(tensor, current);
  };
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (stack[i].isTensor()) read(stack[i].toTensor());
    if (!stack[i].isList()) continue;
    for (const c10::IValue& item : stack[i].toListRef()) {
      if (item.isTensor()) read(item.toTensor());
    }
  }
}

// The device has no memory for a call: whether some was freed, so that it may be tried again.
inline bool make_room(
    State* state, const Fact& fact, const c10::OperatorHandle& op, const c10::IValue* values,
    int attempt) {
  static PyObject* name = interned("out_of_memory");
  auto [args, kwargs] = python_arguments(op.schema(), values);
  py::tuple positional(args);
  Owned func(Py_NewRef(torch::detail::getTorchApiFunction(op).ptr()));
  Owned number(checked(PyLong_FromLong(attempt)));
  PyObject* arguments[] = {state->decisions, fact.facts,   func.get(),
                           positional.ptr(), kwargs.ptr(), number.get()};
  Owned answer(checked(PyObject_VectorcallMethod(name, arguments, 6, nullptr)));
  return answer.get() == Py_True;
}

// As `Recorder._run_recorded`; false if it has not run the call, which the Python recorder then has to.
inline bool run_recorded(
    State* state, const Fact& fact, const c10::OperatorHandle& op, c10::DispatchKeySet keys,
    Stack* stack) {
  size_t count = op.schema().arguments().size();
  const c10::IValue* values = stack->data() + stack->size() - count;
  bool statistics = trains(fact, values);
  if (statistics && may_read_moved(fact, values, count)) return false;
  Writing written;
  auto* made = new_record<Operation>(operation_type, op, &fact);
  Owned owner(object_of(made));
  if (!find_written(state, fact, op.schema(), fact.writes, values, written, false)) return false;
  bool again = statistics || may_be_made(fact, written);
  if (!again && fact.makes && !written.empty()) return false;  // see `Encoding._moves_state`
  if (again) {
    if (!encode(state, made, fact, values, count, statistics)) return false;
    again = statistics || can_be_made(fact, made, written);
  }
  if (statistics) {
    c10::SmallVector<int, 2> places;
    for (int place : {fact.mean, fact.variance}) {
      if (!contains(fact.writes, place)) places.push_back(place);
    }
    if (!find_written(state, fact, op.schema(), places, values, written, true)) return false;
  }
  if (fact.chunks && !know_counter(state, values[0])) return false;
  if (fact.random && again && !snapshot(fact, *stack, count, made->own_rare().drawn)) return false;
  size_t digest = 0;
  bool allocates = fact.makes || written.empty();
  if (following(state) && allocates && again && !has_room(state, fact, made, digest)) {
    static PyObject* name = interned("before");
    auto [args, kwargs] = python_arguments(op.schema(), values);
    Owned func(Py_NewRef(torch::detail::getTorchApiFunction(op).ptr()));
    Owned look(checked(PyObject_GetAttr(object_of(state), name)));
    py::tuple positional(args);
    PyObject* arguments[] = {fact.facts, func.get(), positional.ptr(), kwargs.ptr()};
    Owned done(checked(PyObject_Vectorcall(look.get(), arguments, 4, nullptr)));
    if (following(state) && digest != 0) {
      reinterpret_cast<Script*>(state->script)->looked_at[state->sequence] = digest;
    }
  }
  uint64_t cost = 0;
  if (const Headroom* room = headroom_of(state); room != nullptr && again) {
    std::optional<CallCost> known = cost_of(op, *stack, cost);
    bool fits = known && as<Box>(state->live)->number + known->need <= room->limit;
    if (allocates && !fits) look_at_room(state, fact, op, values, known);
  }
  if (again) {
    made->sequence = state->sequence;
    made->grad_mode = c10::GradMode::is_enabled();
    made->default_dtype = c10::get_default_dtype_as_scalartype();
    made->threads = at::get_num_threads();
    made->flushes = flushes_denormals();
    made->casting = casting_now();
    if (fact.ambient) made->ambient = Py_NewRef(ambient_now());
    if (auto stream = stream_of(*stack, count)) put_on(made, fact, *stream, *stack, count);
  } else if (stream_of(*stack, count)) {
    read_unrecorded(state, *stack, count);
  }
  for (const Written& each : written) overwriting(each.entry(), each.hidden);
  size_t below = stack->size() - count;
  bool keeps_gil = again && fact.brief && is_short(c10::ArrayRef<c10::IValue>(*stack).slice(below));
  // The arguments: for decisions that look at them if the step leaves its plan, and to try again.
  c10::SmallVector<c10::IValue, 8> before;
  if (state->asks && again) before.append(stack->end() - static_cast<long>(count), stack->end());
  // A failed call leaves no trace except what it has written or drawn: see `lowtide/tape/retry.py`.
  bool undone = !fact.random || (again && made->rare().drawn.elsewhere());
  bool retried = state->asks && again && written.empty() && undone && made->stream != nullptr;
  for (int attempt = 0;; ++attempt) {
    std::exception_ptr failed;
    try {
      bool python = keys.has(c10::DispatchKey::Python);  // a mode or a wrapper below, which may draw itself
      std::optional<WithoutGil> released;
      if (!keeps_gil || python) released.emplace();
      std::optional<DrawsFromCopy> draw;
      if (fact.random && again && !python && takes_a_copy(&fact, made->rare().drawn)) {
        draw.emplace(made->own_rare().drawn);
        run_below(given(fact, op, *stack, below, draw->own()), keys, stack);
      } else {
        run_below(op, keys, stack);
      }
      break;
    } catch (const c10::OutOfMemoryError&) {
      failed = std::current_exception();
    } catch (...) {  // it may have written a part already, which cannot be replayed
      Made none;
      for (Written& each : written) rewritten(state, nullptr, each, none);
      throw;
    }
    if (retried && make_room(state, fact, op, before.data(), attempt)) {
      if (fact.random) put_back(made->own_rare().drawn);
      stack->resize(below);
      stack->insert(stack->end(), before.begin(), before.end());
      continue;
    }
    Made none;
    for (Written& each : written) rewritten(state, nullptr, each, none);
    std::rethrow_exception(failed);
  }
  if (keeps_gil && made_much(c10::ArrayRef<c10::IValue>(*stack).slice(below))) fact.brief = false;
  if (again) ++state->sequence;  // only now: a call that raises is not an operation of the step
  PyObject* policy = slot(state->region, layout.region_policy);
  bool told = again && (state->asks || !is_none(policy));
  Made results;
  Operation* maker = again ? made : nullptr;
  all_rewritten(state, maker, written, results);
  add_outputs(state, maker, *stack, op.schema().returns().size(), results, &fact);
  if (Headroom* room = headroom_of(state); room != nullptr) {
    Owned kept(Py_NewRef(state->headroom));  // the step may go on watched from here
    if (told) count_call(state, room, fact, op, made, results, before.data(), count, cost);
    if (c10::GradMode::is_enabled()) room->gradients.last = at::sequence_number::peek();
    return true;
  }
  if (!told || (following(state) && follow(state, fact, made, results))) return true;
  static PyObject* name = interned("produced");
  py::tuple args;
  py::dict kwargs;
  if (state->asks) std::tie(args, kwargs) = python_arguments(op.schema(), before.data());
  Owned list(checked(PyList_New(0)));
  for (Value* value : results) {
    if (PyList_Append(list.get(), object_of(value)) < 0) throw py::error_already_set();
  }
  PyObject* arguments[] = {state->decisions, owner.get(), list.get(), state->region,
                           args.ptr(),       kwargs.ptr()};
  Owned done(checked(PyObject_VectorcallMethod(name, arguments, 6, nullptr)));
  return true;
}

// Hand the call to the Python recorder, which runs it.
inline void run_python(State* state, const c10::OperatorHandle& op, Stack* stack) {
  static PyObject* name = interned("run");
  const auto& schema = op.schema();
  size_t count = schema.arguments().size();
  py::handle func = torch::detail::getTorchApiFunction(op);
  py::object result;
  {
    auto [args, kwargs] = python_arguments(schema, stack->data() + stack->size() - count);
    torch::jit::drop(*stack, count);
    py::tuple positional(args);
    PyObject* arguments[] = {
        object_of(state), func.ptr(), positional.ptr(), kwargs.ptr()};
    result = py::reinterpret_steal<py::object>(
        checked(PyObject_VectorcallMethod(name, arguments, 4, nullptr)));
  }
  const auto& returns = schema.returns();
  if (returns.size() == 1) {
    torch::jit::push(*stack, torch::jit::toIValue(result, returns[0].type()));
  } else if (returns.size() > 1) {
    auto items = py::cast<py::sequence>(result);
    for (size_t i = 0; i < returns.size(); ++i) {
      torch::jit::push(*stack, torch::jit::toIValue(items[i], returns[i].type()));
    }
  }
}

// Whether the region has a selective-checkpoint policy of torch's, which looks at a call's arguments.
inline bool asks_for_arguments(PyObject* region) {
  PyObject* policy = slot(region, layout.region_policy);
  static PyObject* name = interned("select");
  return !is_none(policy) && PyObject_HasAttr(policy, name);
}

// Run a call that is never replayed; what it makes counts as memory, without an operation.
inline void run_unrecorded(
    State* state, const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  {
    WithoutGil released;
    run_below(op, keys, stack);
  }
  Made none;
  add_outputs(state, nullptr, *stack, op.schema().returns().size(), none);
}

// Whether a tensor may have a watched storage; true if that is not easy to tell.
inline bool may_be_watched(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_ordinary(tensor)) return true;
  return watched->storages.find(key_number(tensor)) != watched->storages.end();
}

// Whether a call may write a watched storage; true if that is not easy to tell.
inline bool may_write_watched(const Fact& fact, const c10::OperatorHandle& op, const Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const c10::IValue* values = stack.data() + stack.size() - arguments.size();
  for (int place : fact.writes) {
    if (place < 0 || arguments[place].kwarg_only() || !values[place].isTensor()) return true;
    if (may_be_watched(values[place].toTensor())) return true;
  }
  for (int place : {fact.mean, fact.variance}) {
    if (place < 0 || values[place].isNone()) continue;
    if (!values[place].isTensor() || may_be_watched(values[place].toTensor())) return true;
  }
  return false;
}

// Whether a call of an idle recorder may write what another tape still reads, and has to announce that.
inline bool may_overwrite(const Fact* fact, const c10::OperatorHandle& op, const Stack& stack) {
  if (fact != nullptr && fact->writes.empty() && fact->mean < 0 && !fact->opaque) return false;
  if (watched->storages.empty()) return false;
  Gil gil;
  return fact == nullptr || fact->opaque || may_write_watched(*fact, op, stack);
}

// Run a call after a backward that ended inside the recording; false if it needs a closer look in Python.
inline bool run_between(
    State* state, const Fact& fact, const c10::OperatorHandle& op, c10::DispatchKeySet keys,
    Stack* stack) {
  if (fact.opaque || fact.mean >= 0 || may_write_watched(fact, op, *stack)) return false;
  if (fact.writes.empty()) {
    run_unrecorded(state, op, keys, stack);
  } else {
    WithoutGil released;
    run_below(op, keys, stack);
  }
  return true;
}

inline void look_for_freed(State* state) {
  if (is_none(state->newest) || !is_freed(state->newest)) return;
  static PyObject* name = interned("_look_for_freed");
  Owned done(checked(PyObject_CallMethodNoArgs(object_of(state), name)));
}

inline PyObject* trials_module;  // `lowtide.tape.trials`

// Whether cuDNN tries kernels out, or was seen to do so before; Python looks closer (`tape/trials.py`).
inline bool may_have_tried_out(const c10::OperatorHandle& op, const Stack& stack) {
  const c10::IValue& first = stack[stack.size() - op.schema().arguments().size()];
  if (first.isTensor() && first.toTensor().is_cpu()) return false;
  if (at::globalContext().benchmarkCuDNN()) return true;
  static PyObject* name = interned("seen");
  Owned seen(checked(PyObject_GetAttr(trials_module, name)));
  return seen.get() == Py_True;
}

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  State* state = current;
  c10::impl::ExcludeDispatchKeyGuard guard(KEY);  // do not record the operators that kernels call
  if (state == nullptr) return run_below(op, keys, stack);
  const Fact* fact = fact_of(op);
  if (fact == nullptr) {
    Gil gil;
    fact = learn(op);
  }
  bool aside = fact != nullptr && (fact->view || (state->paused && fact->mean < 0));
  // A backward that writes what a replay may still read: autograd may not notice that.
  if (aside && state->paused && !fact->writes.empty()) {
    Gil gil;  // other threads add to what is watched
    aside = !may_write_watched(*fact, op, *stack);
  }
  if (aside) {
    // Must not wrap the result in a Python tensor: its caller may be about to give it another class.
    if (!is_none(state->newest)) {
      Gil gil;
      look_for_freed(state);
    }
    if (fact->lazy_bits) state->lazy_bits = 1;
    run_below(op, keys, stack);
    if (state->paused && !fact->view && fact->writes.empty()) {  // only its bytes are counted
      Gil gil;
      Made none;
      add_outputs(state, nullptr, *stack, op.schema().returns().size(), none);
    }
    return;
  }
  if (Calls* calls = calls_of(state); calls != nullptr && !calls->idle) {
    note(calls, state, op, *stack);
  } else if (calls != nullptr) {
    if (!may_overwrite(fact, op, *stack) && passes(calls, op, *stack)) return run_below(op, keys, stack);
    Gil gil;
    wake(state);
  }
  Gil gil;
  if (!is_none(state->next_step)) {
    if (fact == nullptr || !run_between(state, *fact, op, keys, stack)) run_python(state, op, stack);
    return;
  }
  look_for_freed(state);
  bool tried_out = fact != nullptr && fact->tried_out && may_have_tried_out(op, *stack);
  bool ordinary = fact != nullptr && !fact->opaque && !fact->fills_saved && !tried_out && !state->paused &&
      !state->lazy_bits && !state->timed && state->gathering == 0 &&
      (is_none(state->before) || following(state) || alone(state)) && !c10::InferenceMode::is_enabled() &&
      !asks_for_arguments(state->region);
  if (ordinary && run_recorded(state, *fact, op, keys, stack)) return;
  run_python(state, op, stack);
}

}  // namespace lowtide

// Following a plan: what `StepDecisions.produced` and `saved` do as long as all goes as planned.
//
// Problem: a planned step is compared with its plan at every operation. Invariant: an operation counts as
// the planned one only if its name, the values that it reads and the bytes that it and its backward make
// are those of the plan (or, in the plan of a larger step, no more bytes); everything else is left to
// Python. Rejected: trusting the order of operations.
#pragma once

#include "storages.h"

#include <c10/util/hash.h>

#include <unordered_set>

namespace lowtide {

// What a plan expects of a step, operation by operation, and what it wants kept.
struct Script {
  PyObject_HEAD
  PyObject* names;  // a tuple of operator names
  std::vector<std::vector<int64_t>> sizes;  // for each operation, bytes of the values it makes
  std::vector<std::vector<int64_t>> reads;  // numbers of the values that it reads
  std::vector<int64_t> wanted;              // bytes of the gradients of what it reads
  std::vector<int64_t> needs;               // bytes that it allocates
  std::vector<int64_t> choices;             // what to do with each value, see `Prepared`
  std::unordered_set<int64_t> by_size;      // operations that may take another kernel on smaller sizes
  std::vector<size_t> looked_at;            // digest of a call that Python has checked for room, or 0
};

inline PyTypeObject* script_type;

inline bool following(State* state) { return !is_none(state->script); }

// Whether the step has no plan, holds all, and its memory is added up, see `Headroom`.
inline bool alone(State* state) { return !is_none(state->headroom); }

// A digest of what the size of a result depends on: the shapes and numbers that a call is given.
inline size_t digest_of(const Operation* op) {
  size_t digest = 1;
  auto add = [&](size_t part) { digest = c10::hash_combine(digest, part); };
  for (const Input& input : op->inputs) {
    for (int64_t size : input.geometry.size()) add(static_cast<size_t>(size));
    add(static_cast<size_t>(input.argument) + (input.geometry.dtype().itemsize() << 8));
  }
  for (const c10::IValue& value : op->arguments) {
    if (value.isInt()) {
      add(static_cast<size_t>(value.toInt()));
    } else if (value.isBool()) {
      add(value.toBool() ? 3 : 5);
    } else if (value.isDouble()) {
      add(std::hash<double>()(value.toDouble()));
    } else if (value.isIntList()) {
      for (int64_t each : value.toIntVector()) add(static_cast<size_t>(each));
    } else if (value.isDoubleList()) {
      for (double each : value.toDoubleVector()) add(std::hash<double>()(each));
    }
    add(7);
  }
  return digest == 0 ? 1 : digest;
}

// Whether the call is the planned one, as far as can be told before it runs, and has room: plenty, or
// enough for a call that Python has checked before.
inline bool has_room(State* state, const Fact& fact, const Operation* op, size_t& digest) {
  auto* script = reinterpret_cast<Script*>(state->script);
  auto index = static_cast<size_t>(state->sequence);
  if (state->limit < 0) return true;
  if (index >= script->sizes.size() || fact.name != PyTuple_GET_ITEM(script->names, state->sequence)) {
    return false;
  }
  int64_t room = state->limit - as<Box>(state->live)->number;
  if (2 * script->needs[index] <= room) return true;
  digest = digest_of(op);
  return script->looked_at[index] == digest && script->needs[index] <= room;
}

inline void append_number(PyObject* list, int64_t number) {
  Owned object(checked(PyLong_FromLongLong(number)));
  if (PyList_Append(list, object.get()) < 0) throw py::error_already_set();
}

// `StepDecisions.produced` for an operation that is the planned one; false if Python has to decide.
inline bool follow(State* state, const Fact& fact, const Operation* op, const Made& made) {
  auto* script = reinterpret_cast<Script*>(state->script);
  auto index = static_cast<size_t>(op->sequence);
  if (index >= script->sizes.size() || fact.name != PyTuple_GET_ITEM(script->names, op->sequence)) {
    return false;
  }
  const auto &sizes = script->sizes[index], &reads = script->reads[index];
  if (made.size() != sizes.size()) return false;
  size_t read = 0;
  for (const Input& input : op->inputs) {
    if (input.scratch()) continue;
    int64_t number = input.value == nullptr ? -1 : input.value->number;
    if (read >= reads.size() || reads[read++] != number) return false;
  }
  if (read != reads.size()) return false;
  bool covered = !is_none(state->sizes);
  for (size_t i = 0; i < made.size(); ++i) {
    bool as_planned = covered ? made[i]->nbytes <= sizes[i] : made[i]->nbytes == sizes[i];
    if (!as_planned || script->choices.at(made[i]->number) < -1) return false;
  }
  bool wants_as_planned = covered ? op->wanted <= script->wanted[index] : op->wanted == script->wanted[index];
  if (!wants_as_planned) return false;
  if (covered && script->by_size.count(op->sequence) != 0) return false;
  for (Value* value : made) {
    int64_t choice = script->choices[value->number];
    if (choice > 0) value->retain_from = choice;
    add_weak(state->made, object_of(value));
    if (covered) append_number(state->sizes, value->nbytes);
  }
  if (covered) append_number(state->sizes, op->wanted);
  return true;
}

// Whether to hold a value that autograd is saving: `Decisions.saved`.
inline bool shall_hold(State* state, Value* value) {
  if (following(state)) {
    const auto& choices = reinterpret_cast<Script*>(state->script)->choices;
    auto number = static_cast<size_t>(value->number);  // not in the plan: it is about to be left
    return number >= choices.size() || choices[number] < 0;
  }
  if (alone(state)) return true;
  if (!state->asks) return false;
  static PyObject* name = interned("saved");
  PyObject* arguments[] = {state->decisions, object_of(value), state->region};
  Owned answer(checked(PyObject_VectorcallMethod(name, arguments, 3, nullptr)));
  return answer.get() == Py_True;
}

// `Decisions.packed`.
inline void packed(State* state, PyObject* handle, Value* value) {
  if (following(state) || alone(state)) return add_weak(state->handles, handle);
  if (!state->asks) return;
  static PyObject* name = interned("packed");
  PyObject* arguments[] = {state->decisions, handle, object_of(value)};
  Owned done(checked(PyObject_VectorcallMethod(name, arguments, 3, nullptr)));
}

}  // namespace lowtide

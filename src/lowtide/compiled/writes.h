// Operations that write their arguments: which storages they write, and whether that can be replayed.
//
// Problem: every layer has writes: in-place dropout and activations, running statistics. Invariant: as in
// `Recorder._written`, `_can_be_made` and `_write_refs`; what needs a closer look (out=, lists, the same
// storage twice) is left to them. Rejected: recording writes in Python only, which takes more than half
// of the time for a convolutional network's records.
#pragma once

#include "script.h"

namespace lowtide {

// Whether an operation is a factory of constant memory.
inline bool is_constant(PyObject* op) {
  if (is_compiled_operation(op)) return as<Operation>(op)->fact->constant;
  static PyObject* name = interned("constant");
  Owned constant(checked(PyObject_GetAttr(slot(op, layout.operation_facts), name)));
  return constant.get() == Py_True;
}

// A storage that a call is about to write, and through which argument.
struct Written {
  Owned owner;
  int place;
  at::Tensor tensor;
  int input = -1;       // its position among the inputs, if the new content can be replayed
  bool out = false;     // given as `out=`
  bool hidden = false;  // running statistics, written without a new version
  bool elsewhere = false;  // the counter that is known of the storage does not move
  bool unnoticed = false;  // nor do those of what autograd has saved of it

  Entry* entry() const { return as<Entry>(owner.get()); }
};

using Writing = c10::SmallVector<Written, 2>;  // all that a call is about to write

inline PyObject* overwriting_function;  // `watch.overwriting`

// Do what `overwriting` of Python does, if nothing has to be copied or left to autograd: what holds the
// storage is gone, is read by autograd alone, or can be replayed. False where Python has to look.
inline bool dropped(const c10::SmallVector<Watched::Holder, 1>& holders, bool hidden) {
  c10::SmallVector<Value*, 2> made;
  for (const Watched::Holder& holder : holders) {
    if (holder.reference != nullptr) return false;  // the value is one of the Python recorder's
    auto* value = as<Value>(holder.record.get());
    if (value == nullptr || !value->held.defined() || (value->op == nullptr && !value->read)) continue;
    if (value->op == nullptr || (hidden && value->saved)) return false;
    made.push_back(value);
  }
  for (Value* value : made) value->held.reset();
  return true;
}

// As `Known._overwriting`. Running statistics are watched since the step before has saved them.
inline void overwriting(Entry* entry, bool hidden) {
  auto found = watched->storages.find(entry->key);
  if (found == watched->storages.end()) return;
  keep_counter(entry);
  if (dropped(found->second, hidden)) {
    watched->storages.erase(found);
    return;
  }
  Owned number(checked(PyLong_FromLongLong(entry->key)));
  PyObject* arguments[] = {number.get(), hidden ? Py_True : Py_False};
  Owned done(checked(PyObject_Vectorcall(overwriting_function, arguments, 2, nullptr)));
}

// What was not given is None or an undefined tensor.
inline bool trains(const Fact& fact, const c10::IValue* values) {
  return fact.mean >= 0 && values[fact.mean].isTensor() && values[fact.mean].toTensor().defined() &&
      (fact.always_trains || values[fact.training].toBool());
}

// Whether a call that moves running statistics has another argument in their memory: a closer look, by
// `reads_moved` of Python, tells whether it is what moves.
inline bool may_read_moved(const Fact& fact, const c10::IValue* values, size_t count) {
  auto key = [&](int place) {
    const c10::IValue& value = values[place];
    bool known = value.isTensor() && value.toTensor().defined() && value.toTensor().has_storage();
    return known ? key_number(value.toTensor()) : 0;
  };
  int64_t mean = key(fact.mean), variance = key(fact.variance);
  for (int place = 0; place < static_cast<int>(count); ++place) {
    if (place == fact.mean || place == fact.variance) continue;
    int64_t read = key(place);
    if (read != 0 && (read == mean || read == variance)) return true;
  }
  return false;
}

// What autograd still has of what is in a storage, borrowed, or null; as `Writes._saved`.
inline Value* saved_in(const Entry* entry) {
  Value* value = value_in(entry);
  return value != nullptr && value->handles != nullptr ? value : nullptr;
}

// As `_unnoticing` of Python: how many of the handles a write is not shown to, and of how many.
inline std::pair<int, int> unnoticing(const Value* saved, const at::Tensor& tensor, bool elsewhere) {
  int unnoticed = 0, all = 0;
  for (const Handle* handle = saved->handles; handle != nullptr; handle = handle->after, ++all) {
    bool apart = handle->counter == nullptr
        ? elsewhere
        : !same_counter(as<Counter>(handle->counter)->version, counter_of(tensor));
    unnoticed += apart;
  }
  return {unnoticed, all};
}

// Note whether a storage is about to be written unnoticed by what autograd has saved of it; true if Python
// has to see to that: to what is unnoticed of an external, for a part of it, or by what is held
// (`Writes._hide`); and to statistics, unless they are held, which is left to autograd
// (`_leave_to_autograd`).
inline bool note_unnoticed(const Value* saved, Written& written, bool statistic) {
  if (saved == nullptr) return false;
  if (statistic) return !saved->held.defined();
  auto [unnoticed, all] = unnoticing(saved, written.tensor, written.elsewhere);
  written.unnoticed = unnoticed > 0;
  if (unnoticed == 0) return false;
  bool shown = saved->held.defined() && same_counter(saved->held, written.tensor);
  return unnoticed < all || saved->op == nullptr || shown;
}

// As `Recorder._written` and `_behind`; false where Python has to look closer. `statistics`: the places are
// those of running statistics, which are written without a new version.
inline bool find_written(
    State* state, const Fact& fact, const c10::FunctionSchema& schema, c10::ArrayRef<int> places,
    const c10::IValue* values, Writing& written, bool statistics) {
  for (int place : places) {
    if (place < 0) return false;
    if (values[place].isNone()) continue;
    if (!values[place].isTensor()) return false;
    const at::Tensor& tensor = values[place].toTensor();
    if (!tensor.defined()) continue;
    if (!is_ordinary(tensor)) return false;
    bool out = schema.arguments()[place].kwarg_only();
    if (out && (tensor.numel() == 0 || tensor.requires_grad())) return false;
    Entry* entry = enter_written(state, tensor);
    if (entry == nullptr) return false;
    for (const Written& other : written) {
      if (other.entry() == entry) return false;
    }
    Written found{Owned(Py_NewRef(object_of(entry))), place, tensor, -1, out, statistics};
    found.elsewhere = !statistics && has_other_counter(entry, tensor);
    if (note_unnoticed(saved_in(entry), found, statistics)) return false;
    // A part of uninitialized memory: see `Pieces`.
    if ((out || entry->unwritten()) &&
        !(contains(fact.fills, place) && covers(Geometry(tensor), entry->nbytes))) {
      return false;
    }
    written.push_back(std::move(found));
  }
  return true;
}

inline void make_blank(Input& input, int64_t nbytes, c10::Device device) {
  give_up(object_of(std::exchange(input.value, nullptr)));
  input.fresh = nbytes;
  input.device = device;
}

// As `Recorder._can_be_made`: false if the write cannot be replayed, whatever the inputs are.
inline bool may_be_made(const Fact& fact, const Writing& written) {
  if (fact.blank || (fact.constant && !c10::GradMode::is_enabled())) return false;
  for (const Written& each : written) {
    const Value* value = value_in(each.entry());
    if (contains(fact.fills, each.place)) {  // as `Writes._fills_anew`
      bool outside = value != nullptr && value->op == nullptr && each.entry()->counted == 0;
      if (outside && value->read && each.tensor.requires_grad()) return false;
      bool unmade = value != nullptr && value->op == nullptr;
      if (unmade && !covers(Geometry(each.tensor), each.entry()->nbytes)) return false;
      continue;
    }
    if (value == nullptr || value->op == nullptr) return false;
  }
  return true;
}

// As `Recorder._write_refs`: whether the write can be replayed; finds the inputs that are written.
inline bool can_be_made(const Fact& fact, Operation* op, Writing& written) {
  for (Written& each : written) {
    int found = -1, count = 0;
    for (size_t i = 0; i < op->inputs.size(); ++i) {
      if (op->inputs[i].argument == each.place && op->inputs[i].item < 0) {
        found = static_cast<int>(i);
      }
    }
    if (found < 0) return false;
    each.input = found;
    const Value* value = op->inputs[found].value;
    if (value == nullptr) continue;  // see `fills_blank`
    for (const Input& input : op->inputs) count += input.value == value;
    int64_t nbytes = each.entry()->nbytes;
    PyObject* made_by = value->op;
    if (contains(fact.fills, each.place) && count == 1 &&
        covers(op->inputs[found].geometry, nbytes)) {
      make_blank(op->inputs[found], nbytes, each.tensor.device());
    } else if (made_by == nullptr) {
      return false;
    } else if (!fact.placing && is_constant(made_by)) {
      return false;
    }
  }
  return true;
}

// As `Known._rewritten`: a storage has new content.
inline void rewritten(State* state, Operation* op, Written& each, Made& made) {
  Entry* entry = each.entry();
  auto nbytes = static_cast<int64_t>(each.tensor.storage().nbytes());
  if (nbytes != entry->nbytes) {
    if (entry->counted != 0) {
      as<Box>(state->live)->number += nbytes - entry->counted;
      entry->counted = nbytes;
    }
    entry->nbytes = nbytes;
  }
  // An out= that was resized is not: see `Writes._through`. Others may have been given another shape
  // (`transpose_`), which a replay gives them too.
  bool made_again = op != nullptr && each.input >= 0 &&
      (!each.out || op->inputs[each.input].geometry.size() == each.tensor.sizes());
  bool here = !made_again || is_here(state, each.tensor.device(), false);
  entry->blank = Geometry();  // parts are written in Python
  Py_CLEAR(entry->pieces);
  Value* value = new_value(made_again ? object_of(op) : nullptr, here ? entry->nbytes : 0, state->region,
                           made_again ? state->numbers++ : -1);
  Owned owner(object_of(value));
  if (made_again) {
    op->own_rare().writes.push_back({static_cast<size_t>(each.input), weak_to(owner.get())});
    made.push_back(value);
  }
  if (!each.hidden) {  // no counter moves
    ++entry->version;
    entry->loose = true;
  }
  put_value(entry, value);
}

// As `Writes._follow_live`: after a write that autograd did not notice, what it saved of `old` is the new
// content.
inline void follow_live(State* state, Value* old, const Written& each) {
  if (old == nullptr || !each.unnoticed || old->held.defined()) return;  // a held alias shows the new content
  Entry* entry = each.entry();
  Owned owner(Py_NewRef(object_of(value_in(entry))));
  auto* now = as<Value>(owner.get());
  std::vector<Owned> handles;
  for (Handle* handle = old->handles; handle != nullptr; handle = handle->after) {
    handles.emplace_back(Py_NewRef(object_of(handle)));
  }
  hand_over(old, now, [](Handle*) { return true; });
  Py_XDECREF(std::exchange(now->scope, Py_NewRef(old->scope != nullptr ? old->scope : now->region)));
  if (now->op == nullptr || now->keep || shall_hold(state, now)) {
    auto apart = each.tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false);
    hold(entry, now, at::Tensor(std::move(apart)));  // the write has yet to move the tensor's own counter
  }
  if (!state->asks) return;
  for (auto at = handles.rbegin(); at != handles.rend(); ++at) packed(state, at->get(), now);
}

// The storages that a call has written have new content.
inline void all_rewritten(State* state, Operation* op, Writing& written, Made& made) {
  for (Written& each : written) {
    Entry* entry = each.entry();
    Value* saved = saved_in(entry);
    Owned kept(saved == nullptr ? nullptr : Py_NewRef(object_of(saved)));
    auto [version, loose] = std::make_pair(entry->version, entry->loose);
    rewritten(state, op, each, made);
    if (each.elsewhere) std::tie(entry->version, entry->loose) = std::make_pair(version, loose);
    follow_live(state, saved, each);
  }
}

}  // namespace lowtide

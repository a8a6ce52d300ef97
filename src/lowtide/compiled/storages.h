// Which value is in which storage: what `tape/known.py` does, without Python.
//
// Problem: every argument is looked up, every result entered. Invariant: table, entries and values are
// those that the Python recorder's rare paths work on; cases that need a closer look (another region, an
// unseen write) are left to them. Rejected: a second table that the rare paths do not know.
#pragma once

#include "counter.h"
#include "state.h"

namespace lowtide {

using Made = c10::SmallVector<Value*, 2>;  // what a call has made, borrowed from the table

// ---------------------------------------------------------------------- inputs

inline int64_t key_number(const at::Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.storage().unsafeGetStorageImpl());
}

inline bool is_ordinary(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return tensor.layout() == c10::kStrided && tensor.has_storage() && !impl->is_inference() &&
      !impl->key_set().has(c10::DispatchKey::Python) && !tensor.is_neg() && !tensor.is_conj() &&
      !tensor.is_quantized() && !tensor.is_nested() &&
      !impl->has_symbolic_sizes_strides();
}

// Whether something unseen may write what was made here, as `Known._given_out` says.
inline bool is_given_out(const Entry* entry, const at::Tensor& tensor) {
  if (tensor.storage().unsafeGetStorageImpl()->resizable()) return false;
  const Value* value = value_in(entry);
  return value != nullptr && value->op != nullptr;
}

// As `Known._other_counter`.
inline bool has_other_counter(const Entry* entry, const at::Tensor& tensor) {
  if (entry->counter != nullptr && Py_IS_TYPE(entry->counter, counter_type)) {
    return !same_counter(as<Counter>(entry->counter)->version, counter_of(tensor));
  }
  const Value* value = value_in(entry);
  if (value == nullptr || !value->held.defined() || key_number(value->held) != entry->key) return false;
  return !same_counter(value->held, tensor);
}

// Whether all writes to a storage were seen, as far as a tensor over it shows. The last one may have moved no
// counter, as `Known.entry_of` says.
inline bool is_current(Entry* entry, const at::Tensor& tensor) {
  int64_t version = version_of(tensor);
  if (entry->version == version || has_other_counter(entry, tensor)) return true;
  if (!entry->loose || version != entry->version - 1) return false;
  entry->version = version;
  entry->loose = false;
  return true;
}

inline Watched* watched;  // the table of `lowtide/tape/watch.py`

// As `Known._hold`.
inline void hold(Entry* entry, Value* value, const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  Owned kept(Py_NewRef(object_of(value)));
  value->held = at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
  value->version = version_of(value->held);
  if (value->keep && (entry->counted != 0 || value->nbytes == 0)) settle(value);
  entry->weak = weak_to(kept.get());
  put_value(entry, nullptr);
  watch(watched, entry->key, kept.get());
}

// As `Known._unwritten`; false if the record has written parts, at which Python has to look.
inline bool is_external_now(Entry* entry, const at::Tensor& tensor) {
  if (!entry->blank.defined()) return !entry->unwritten();
  if (tensor.numel() == 0) return false;
  entry->blank = Geometry();
  return true;
}

// Whether what made a value may have read parameters that FSDP2 has freed since, see `tape/sharded.py`.
inline bool may_be_cut_off(const State* state, const Value* value) {
  if (state->group == 0 || value->op == nullptr) return false;
  return !is_compiled_operation(value->op) || as<Operation>(value->op)->sequence < state->group;
}

// As `is_freed` of `lowtide/tape/sharded.py`.
inline bool is_freed(PyObject* entry) {
  Owned storage(target_of(entry));
  if (storage.get() == nullptr) return false;
  return static_cast<int64_t>(THPStorage_Unpack(storage.get()).nbytes()) < entry_of(entry)->nbytes;
}

// As `Sharded._may_be_freed`.
inline void note_read(State* state, Entry* entry) {
  if (is_none(state->read)) return;
  Owned key(checked(PyLong_FromLongLong(entry->key)));
  if (PyDict_SetItem(state->read, key.get(), object_of(entry)) < 0) throw py::error_already_set();
  Py_XSETREF(state->newest, Py_NewRef(object_of(entry)));
}

// The value in a storage, if it can be read without a closer look; else null.
inline Owned readable(State* state, Entry* entry, const at::Tensor& tensor) {
  if (!is_current(entry, tensor) || entry->given_out) return Owned();
  Value* value = value_in(entry);
  if (value == nullptr || !is_external_now(entry, tensor) || may_be_cut_off(state, value)) return Owned();
  Owned owner(Py_NewRef(object_of(value)));
  bool held = value->held.defined();
  if (value->op == nullptr) {
    // A tensor over it may have a version counter of its own, see `Known._know_counters`.
    if (held && !same_counter(value->held, tensor)) return Owned();
    value->read = true;
    if (!held) hold(entry, value, tensor);
    note_read(state, entry);
  } else if ((value->keep && !held) || value->region != state->region || is_given_out(entry, tensor)) {
    return Owned();
  } else if (entry->counted == 0) {
    note_read(state, entry);
  }
  return owner;
}

// As `Known._overwriting`.
inline void keep_counter(Entry* entry) {
  const Value* value = value_in(entry);
  if (entry->counter != nullptr || value == nullptr || !value->held.defined()) return;
  if (key_number(value->held) == entry->key) entry->counter = new_counter(value->held);
}

// As `Known._is_here`.
inline bool is_here(State* state, c10::Device device, bool made) {
  if (device.is_meta()) return !state->asks;
  bool open = state->settle != nullptr && !is_none(state->settle);
  if (open && made && !device.is_cpu()) {
    static PyObject* name = interned("_is_here");
    Owned wrapped(checked(THPDevice_New(device)));
    PyObject* arguments[] = {object_of(state), wrapped.get(), Py_True};
    Owned here(checked(PyObject_VectorcallMethod(name, arguments, 3, nullptr)));
    return here.get() == Py_True;
  }
  return state->counts == nullptr || is_none(state->counts) ||
      as<THPDevice>(state->counts)->device == device;
}

// As `Known._enter`: add an entry for a storage that is not in the table; it and its value are borrowed.
inline std::pair<Entry*, Value*> enter(
    State* state, Operation* op, const at::Tensor& tensor, int64_t key, bool counted) {
  Owned owned = new_entry(tensor, state->forget);
  auto* entry = as<Entry>(owned.get());
  auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
  bool here = is_here(state, tensor.device(), op != nullptr);
  Value* value = new_value(object_of(op), here || op == nullptr ? bytes : 0, state->region,
                           op == nullptr ? -1 : state->numbers);
  entry->value = value;
  entry->key = key;
  entry->version = version_of(tensor);
  entry->nbytes = bytes;
  entry->counted = counted && here ? bytes : 0;
  put_entry(state->table, key, std::move(owned));
  if (op != nullptr) ++state->numbers;
  as<Box>(state->live)->number += entry->counted;
  return {entry, value};
}

// Enter a storage that this recording has not made and meets for the first time; its value, owned.
inline Owned external(State* state, const at::Tensor& tensor, int64_t key, bool read) {
  auto [entry, value] = enter(state, nullptr, tensor, key, false);
  Owned kept(Py_NewRef(object_of(value)));
  value->read = value->read || read;
  hold(entry, value, tensor);
  if (read) note_read(state, entry);
  return kept;
}

// Add an input; false if the tape cannot represent it, so that the operation cannot be replayed.
inline bool add_input(State* state, Operation* op, const at::Tensor& tensor, size_t place, int item) {
  if (!is_ordinary(tensor)) return false;
  int64_t key = key_number(tensor);
  Owned value;
  Entry* entry = find_entry(state->table, key);
  if (entry == nullptr) {
    value = external(state, tensor, key, true);
  } else {
    value = readable(state, entry, tensor);
  }
  if (value.get() == nullptr) {
    static PyObject* name = interned("_reference");
    Owned wrapped(THPVariable_Wrap(tensor));
    Owned ref(checked(PyObject_CallMethodOneArg(object_of(state), name, wrapped.get())));
    if (ref.get() == Py_None) return false;
    value = Owned(Py_NewRef(object_of(value_of(slot(ref.get(), layout.ref_value)))));
  }
  auto* read = as<Value>(value.release());
  op->inputs.push_back(Input{read, geometry_in(read, tensor), static_cast<int32_t>(item),
                             static_cast<int16_t>(place)});
  return true;
}

// The entry of a storage that is about to be written, borrowed; null if it had an unseen write.
inline Entry* enter_written(State* state, const at::Tensor& tensor) {
  int64_t key = key_number(tensor);
  Entry* entry = find_entry(state->table, key);
  if (entry == nullptr) return enter(state, nullptr, tensor, key, false).first;
  return is_current(entry, tensor) && !is_given_out(entry, tensor) ? entry : nullptr;
}

// As `Known._know_counter`; false if that needs a closer look.
inline bool know_counter(State* state, const c10::IValue& split) {
  if (!split.isTensor() || !is_ordinary(split.toTensor())) return false;
  Entry* entry = find_entry(state->table, key_number(split.toTensor()));
  if (entry == nullptr || !is_current(entry, split.toTensor())) return false;
  if (entry->counter == nullptr) entry->counter = new_counter(split.toTensor());
  return true;
}

// Bytes of a tensor of the usual layout; 0 for others, and where a trace has a symbol for its size.
inline int64_t dense_bytes(const at::Tensor& tensor) {
  bool dense = tensor.layout() == c10::kStrided && !tensor.is_nested() &&
      !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  return dense ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

// As `_compat.wanted_bytes`.
inline int64_t wanted_bytes(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return 0;
  return std::max(dense_bytes(tensor), tensor.is_view() ? dense_bytes(at::Tensor(tensor._base())) : 0);
}

// Running statistics that the call moves become scratch memory; those that it only reads are read from a
// copy, as they move without a new version (see `Recorder._freeze`). False if that needs a closer look.
inline bool add_statistic(
    State* state, Operation* op, const at::Tensor& tensor, size_t place, bool moves) {
  if (!is_ordinary(tensor) || enter_written(state, tensor) == nullptr) return false;
  if (moves) {
    op->inputs.push_back(Input{nullptr, Geometry(tensor), -1, static_cast<int16_t>(place), tensor.device(),
                               ~static_cast<int64_t>(tensor.storage().nbytes())});
    return true;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor copied = tensor.clone();
  auto nbytes = static_cast<int64_t>(copied.storage().nbytes());
  Value* value = new_value(nullptr, nbytes, state->region, -1);  // the record owns it
  value->held = copied;
  value->version = version_of(copied);
  op->inputs.push_back(Input{value, geometry_in(value, copied), -1, static_cast<int16_t>(place)});
  return true;
}

// Whether a call overwrites all of an argument whose memory was never written, and reads it nowhere else.
inline bool fills_blank(State* state, const Fact& fact, const c10::IValue* values, size_t count, size_t at) {
  if (!contains(fact.fills, static_cast<int>(at))) return false;
  int64_t key = key_number(values[at].toTensor());
  const Entry* entry = find_entry(state->table, key);
  if (entry == nullptr || !entry->blank.defined()) return false;
  for (size_t place = 0; place < count; ++place) {
    if (place == at) continue;
    if (values[place].isTensorList() || values[place].isOptionalTensorList()) return false;
    if (!values[place].isTensor() || !values[place].toTensor().defined()) continue;
    const at::Tensor& other = values[place].toTensor();
    if (!other.has_storage() || key_number(other) == key) return false;
  }
  return covers(Geometry(values[at].toTensor()), entry->nbytes);
}

// Copy the arguments into the record, tensors as inputs; false if the tape cannot represent one.
// `moves`: whether the call moves the running statistics that it is given.
inline bool encode(
    State* state, Operation* op, const Fact& fact, const c10::IValue* values, size_t count, bool moves) {
  op->arguments.reserve(count);
  for (size_t place = 0; place < count; ++place) {
    const c10::IValue& value = values[place];
    if (is_number(value)) {
      op->own_rare().numbers.push_back(static_cast<int32_t>(place));
      op->arguments.emplace_back(number_of(value));
    } else if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      int at = static_cast<int>(place);
      op->wanted += wanted_bytes(tensor);
      if (tensor.defined() && fact.mean >= 0 && (at == fact.mean || at == fact.variance)) {
        if (!add_statistic(state, op, tensor, place, moves)) return false;
      } else if (tensor.defined() && fills_blank(state, fact, values, count, place)) {
        op->inputs.push_back(Input{nullptr, Geometry(tensor), -1, static_cast<int16_t>(place), tensor.device(),
                                   static_cast<int64_t>(tensor.storage().nbytes())});
      } else if (tensor.defined() && !add_input(state, op, tensor, place, -1)) {
        return false;
      }
      op->arguments.emplace_back();
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      auto items = value.toListRef();
      op->inputs.reserve(op->inputs.size() + items.size());
      for (size_t item = 0; item < items.size(); ++item) {
        if (!items[item].isTensor() || !items[item].toTensor().defined()) continue;
        const at::Tensor& tensor = items[item].toTensor();
        op->wanted += wanted_bytes(tensor);
        if (!add_input(state, op, tensor, place, static_cast<int>(item))) return false;
      }
      op->own_rare().lists.push_back({static_cast<int32_t>(place), static_cast<int32_t>(items.size()),
                                      value.isOptionalTensorList()});
      op->arguments.emplace_back();
    } else if (value.isGenericDict() || value.isTuple() || value.isObject() || value.isStorage()) {
      return false;
    } else if (value.isIntList()) {
      op->arguments.push_back(shared_list(fact, value));
    } else {
      op->arguments.push_back(value);
    }
  }
  return true;
}

// ---------------------------------------------------------------------- outputs

inline void add_output(
    State* state, Operation* op, const c10::IValue& result, int32_t place, Made& made, const Fact* fact) {
  if (!result.isTensor() || !result.toTensor().defined()) return;
  const at::Tensor& tensor = result.toTensor();
  if (tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python) ||
      tensor.unsafeGetTensorImpl()->is_inference() || !tensor.has_storage() ||
      tensor.layout() != c10::kStrided || tensor.is_nested() ||
      tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return;
  }
  int64_t key = key_number(tensor);
  if (find_entry(state->table, key) != nullptr) return;  // an alias
  auto [entry, value] = enter(state, op, tensor, key, true);
  if (op == nullptr) {
    // As `Recorder._know_blank`.
    if (fact != nullptr && (fact->blank || fact->constant) && tensor.numel() > 0 &&
        tensor.is_non_overlapping_and_dense() && tensor.nbytes() == tensor.storage().nbytes()) {
      entry->blank = Geometry(tensor);
      entry->constant = fact->constant;
    }
    return;
  }
  value->whole = Geometry(tensor);
  op->outputs.push_back({place, weak_to(object_of(value))});
  made.push_back(value);
}

inline void add_outputs(
    State* state, Operation* op, const Stack& stack, size_t count, Made& made, const Fact* fact = nullptr) {
  int32_t place = 0;
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (stack[i].isList()) {
      for (const c10::IValue& item : stack[i].toListRef()) {
        add_output(state, op, item, place++, made, fact);
      }
    } else {
      add_output(state, op, stack[i], place++, made, fact);
    }
  }
}

}  // namespace lowtide

// Which value is in which storage: what `tape/known.py` does, without Python.
//
// Problem: every argument is looked up, every result entered. Invariant: table, entries and values are
// those of the Python recorder; what cannot be told at a glance (another region, a write that nobody
// saw) is asked of it. Rejected: a table of our own, which two recorders would have to keep alike.
#pragma once

#include "counter.h"
#include "state.h"

namespace lowtide {

// ---------------------------------------------------------------------- inputs

inline Owned key_of(const at::Tensor& tensor) {
  return Owned(PyLong_FromVoidPtr(tensor.storage().unsafeGetStorageImpl()));
}

inline bool is_ordinary(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return tensor.layout() == c10::kStrided && tensor.has_storage() && !impl->is_inference() &&
      !impl->key_set().has(c10::DispatchKey::Python) && !tensor.is_neg() && !tensor.is_conj() &&
      !tensor.is_quantized() && !tensor.is_nested() &&
      !impl->has_symbolic_sizes_strides();
}

// The value in a storage if it can be read without further ado, as a new reference, else null.
inline Owned readable(State* state, PyObject* entry, const at::Tensor& tensor) {
  const Layout& l = layout;
  if (integer(slot(entry, l.entry_version)) != tensor._version()) return {};
  PyObject* value = slot(entry, l.entry_value);
  Owned found;
  if (!is_none(value)) {
    found = Owned(Py_NewRef(value));
  } else if (!is_none(slot(entry, l.entry_weak))) {
    found = Owned(target_of(slot(entry, l.entry_weak)));
  }
  value = found.get();
  if (value == nullptr) return {};
  bool held = holds(value);
  if (is_none(slot(value, l.value_op))) {
    if (!held) return {};
    put_new(value, l.value_read, Py_True);
  } else if (
      (slot(value, l.value_keep) == Py_True && !held) ||
      slot(value, l.value_region) != state->region) {
    return {};
  }
  return found;
}

inline PyObject *watch_function, *watched;  // `watch.watch`, `watch._watched`

// As `Known._hold`.
inline void hold(PyObject* entry, PyObject* value, const at::Tensor& tensor) {
  const Layout& l = layout;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  at::Tensor alias(impl->shallow_copy_and_detach(impl->version_counter(), false));
  put(value, l.value_version, PyLong_FromLongLong(alias._version()));
  put(value, l.value_held, checked(THPVariable_Wrap(std::move(alias))));
  if (slot(value, l.value_keep) == Py_True) {  // `Value.settle`
    put_new(value, l.value_op, Py_None);
    put_new(value, l.value_read, Py_True);
  }
  put(entry, l.entry_weak, weak_to(value));
  put_new(entry, l.entry_value, Py_None);
  PyObject* key = slot(entry, l.entry_key);
  PyObject* found = PyDict_GetItemWithError(watched, key);
  if (found != nullptr && PyList_GET_SIZE(found) <= 8) {  // `watch`, where there is nothing to sweep
    if (PyList_Append(found, slot(entry, l.entry_weak)) < 0) throw py::error_already_set();
    return;
  }
  if (found == nullptr && PyDict_Size(watched) % 128 != 0) {  // it looks now and then
    Owned list(leaf(PyList_New(1)));
    PyList_SET_ITEM(list.get(), 0, Py_NewRef(slot(entry, l.entry_weak)));
    if (PyDict_SetItem(watched, key, list.get()) < 0) throw py::error_already_set();
    return;
  }
  PyObject* arguments[] = {key, value};
  Owned done(checked(PyObject_Vectorcall(watch_function, arguments, 2, nullptr)));
}

// As `Known._enter`: an entry for a storage that is not in the table, and its value.
inline std::pair<Owned, Owned> enter(
    State* state, PyObject* op, const at::Tensor& tensor, Owned key, bool counted) {
  const Layout& l = layout;
  Owned storage(checked(THPStorage_Wrap(tensor.storage())));
  PyObject* arguments[] = {storage.get(), state->forget};
  Owned entry(checked(PyObject_Vectorcall(
      reinterpret_cast<PyObject*>(l.entry), arguments, 2, nullptr)));
  auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
  PyObject* e = entry.get();
  bool external = is_none(op);
  Owned value(new_value(op, bytes, state->region, external ? -1 : state->numbers));
  slot(e, l.entry_version) = PyLong_FromLongLong(tensor._version());
  slot(e, l.entry_loose) = Py_NewRef(Py_False);
  slot(e, l.entry_weak) = Py_NewRef(Py_None);
  slot(e, l.entry_counter) = Py_NewRef(Py_None);
  slot(e, l.entry_nbytes) = PyLong_FromLongLong(bytes);
  slot(e, l.entry_counted) = PyLong_FromLongLong(counted ? bytes : 0);
  slot(e, l.entry_value) = Py_NewRef(value.get());
  if (PyDict_SetItem(state->table, key.get(), e) < 0) throw py::error_already_set();
  slot(e, l.entry_key) = key.release();
  if (!external) ++state->numbers;
  if (counted) {
    int64_t live = integer(PyList_GET_ITEM(state->live, 0)) + bytes;
    if (PyList_SetItem(state->live, 0, PyLong_FromLongLong(live)) < 0) {
      throw py::error_already_set();
    }
  }
  return {std::move(entry), std::move(value)};
}

// Something that this recording has not made and meets for the first time.
inline Owned external(State* state, const at::Tensor& tensor, Owned key, bool read) {
  auto [entry, value] = enter(state, Py_None, tensor, std::move(key), false);
  if (read) put_new(value.get(), layout.value_read, Py_True);
  hold(entry.get(), value.get(), tensor);
  return std::move(value);
}

// Add an input; false if it cannot be named, so that the operation cannot be replayed.
inline bool add_input(State* state, Operation* op, const at::Tensor& tensor, size_t place, int item) {
  if (!is_ordinary(tensor)) return false;
  Owned key = key_of(tensor);
  PyObject* entry = PyDict_GetItemWithError(state->table, key.get());
  Owned value;
  if (entry == nullptr) {
    value = external(state, tensor, std::move(key), true);
  } else {
    value = readable(state, entry, tensor);
  }
  if (value.get() == nullptr) {
    static PyObject* name = interned("_reference");
    Owned wrapped(THPVariable_Wrap(tensor));
    Owned ref(checked(PyObject_CallMethodOneArg(
        reinterpret_cast<PyObject*>(state), name, wrapped.get())));
    if (ref.get() == Py_None) return false;
    value = Owned(Py_NewRef(slot(ref.get(), layout.ref_value)));
  }
  op->inputs.push_back(Input{value.release(), static_cast<int32_t>(place),
                             static_cast<int32_t>(item), Geometry(tensor)});
  return true;
}

// An entry for a storage that is only written; false where it was written unseen.
inline bool enter_external(State* state, const at::Tensor& tensor) {
  Owned key = key_of(tensor);
  PyObject* entry = PyDict_GetItemWithError(state->table, key.get());
  if (entry != nullptr) {
    return integer(slot(entry, layout.entry_version)) == tensor._version();
  }
  enter(state, Py_None, tensor, std::move(key), false);
  return true;
}

// Copy the arguments into the record, each tensor by name; false if one cannot be named.
// Running statistics that the call updates (`statistics`) become scratch memory.
inline bool encode(
    State* state, Operation* op, const c10::IValue* values, size_t count, const Fact* statistics) {
  op->arguments.reserve(count);
  for (size_t place = 0; place < count; ++place) {
    const c10::IValue& value = values[place];
    if (is_number(value)) {
      op->numbers.push_back(static_cast<int32_t>(place));
      op->arguments.emplace_back(value.toTensor().item());
    } else if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      int at = static_cast<int>(place);
      if (statistics != nullptr && (at == statistics->mean || at == statistics->variance)) {
        if (!is_ordinary(tensor) || !enter_external(state, tensor)) return false;
        op->inputs.push_back(Input{nullptr, static_cast<int32_t>(place), -1, Geometry(tensor), true,
                                   static_cast<int64_t>(tensor.storage().nbytes()),
                                   tensor.device()});
      } else if (tensor.defined() && !add_input(state, op, tensor, place, -1)) {
        return false;
      }
      op->arguments.emplace_back();
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      auto items = value.toListRef();
      for (size_t item = 0; item < items.size(); ++item) {
        if (items[item].isTensor() && items[item].toTensor().defined() &&
            !add_input(state, op, items[item].toTensor(), place, static_cast<int>(item))) {
          return false;
        }
      }
      op->lists.push_back({static_cast<int32_t>(place), static_cast<int32_t>(items.size()),
                           value.isOptionalTensorList()});
      op->arguments.emplace_back();
    } else if (value.isGenericDict() || value.isTuple() || value.isObject() || value.isStorage()) {
      return false;
    } else {
      op->arguments.push_back(value);
    }
  }
  return true;
}

// ---------------------------------------------------------------------- outputs

inline void add_output(
    State* state, Operation* op, const c10::IValue& result, int64_t place, PyObject* made) {
  if (!result.isTensor() || !result.toTensor().defined()) return;
  const at::Tensor& tensor = result.toTensor();
  if (tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python) ||
      tensor.unsafeGetTensorImpl()->is_inference() || !tensor.has_storage() ||
      tensor.layout() != c10::kStrided || tensor.is_nested()) {
    return;
  }
  Owned key = key_of(tensor);
  if (PyDict_GetItemWithError(state->table, key.get()) != nullptr) return;  // an alias
  PyObject* maker = op == nullptr ? Py_None : reinterpret_cast<PyObject*>(op);
  auto [entry, value] = enter(state, maker, tensor, std::move(key), true);
  if (op == nullptr) return;
  Owned weak(weak_to(value.get()));
  Owned pair(leaf(PyTuple_New(2)));
  PyTuple_SET_ITEM(pair.get(), 0, PyLong_FromLongLong(place));
  PyTuple_SET_ITEM(pair.get(), 1, weak.release());
  if (PyList_Append(op->outputs, pair.get()) < 0) throw py::error_already_set();
  if (made != nullptr && PyList_Append(made, value.get()) < 0) throw py::error_already_set();
}

inline void add_outputs(State* state, Operation* op, const Stack& stack, size_t count, PyObject* made) {
  int64_t place = 0;
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (stack[i].isList()) {
      for (const c10::IValue& item : stack[i].toListRef()) {
        add_output(state, op, item, place++, made);
      }
    } else {
      add_output(state, op, stack[i], place++, made);
    }
  }
}

}  // namespace lowtide

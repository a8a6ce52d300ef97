// The Python types of entries, and of the lists and numbers around them.
//
// Problem and invariant: as in `record_types.h`.
#pragma once

#include "table.h"

namespace lowtide {

// ---------------------------------------------------------------------- Box

inline PyObject* box_new(PyTypeObject* type, PyObject* args, PyObject*) {
  long long number;
  if (!PyArg_ParseTuple(args, "L", &number)) return nullptr;
  PyObject* made = type->tp_alloc(type, 0);
  if (made != nullptr) as<Box>(made)->number = number;
  return made;
}

inline void box_delete(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

inline Py_ssize_t box_length(PyObject*) { return 1; }

inline bool is_first(Py_ssize_t place) {
  if (place != 0) PyErr_SetString(PyExc_IndexError, "a box has one item");
  return place == 0;
}

inline PyObject* box_item(PyObject* self, Py_ssize_t place) {
  return is_first(place) ? PyLong_FromLongLong(as<Box>(self)->number) : nullptr;
}

inline int box_set_item(PyObject* self, Py_ssize_t place, PyObject* to) {
  if (!is_first(place)) return -1;
  return leave_error_to([&] { as<Box>(self)->number = integer(to); });
}

inline PyType_Slot box_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(box_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(box_delete)},
    {Py_sq_length, reinterpret_cast<void*>(box_length)},
    {Py_sq_item, reinterpret_cast<void*>(box_item)},
    {Py_sq_ass_item, reinterpret_cast<void*>(box_set_item)},
    {0, nullptr}};

inline PyType_Spec box_spec = {
    "lowtide.compiled.Box", sizeof(Box), 0, Py_TPFLAGS_DEFAULT, box_slots};

// ---------------------------------------------------------------------- Entry

inline PyObject* entry_value(PyObject* self, void*) {
  return Py_NewRef(or_none(object_of(as<Entry>(self)->value)));
}

inline int entry_set_value(PyObject* self, PyObject* to, void*) {
  return leave_error_to([&] { put_value(as<Entry>(self), is_none(to) ? nullptr : value_of(to)); });
}

// A weak reference or None, as in Python.
inline PyObject* entry_weak(PyObject* self, void*) {
  const Weak& weak = as<Entry>(self)->weak;
  if (weak.get() == nullptr) Py_RETURN_NONE;
  return PyWeakref_NewRef(weak.get(), nullptr);
}

inline int entry_set_weak(PyObject* self, PyObject* to, void*) {
  return leave_error_to([&] {
    Owned target(is_none(to) ? nullptr : target_of(to));
    as<Entry>(self)->weak = target.get() == nullptr ? Weak() : weak_to(object_of(value_of(target.get())));
  });
}

inline PyObject* pieces_type;  // of `lowtide/tape/pieces.py`

// Made when it is first asked for: most of such memory is overwritten at once.
inline PyObject* entry_pieces(PyObject* self, void*) {
  return leave_error([&]() -> PyObject* {
    auto* entry = as<Entry>(self);
    if (entry->blank.defined()) {
      Geometry blank = std::exchange(entry->blank, Geometry());
      py::tuple size(py::cast(blank.size().vec())), stride(py::cast(blank.stride().vec()));
      Owned itemsize(checked(PyLong_FromSize_t(blank.dtype().itemsize())));
      PyObject* arguments[] = {size.ptr(), stride.ptr(), itemsize.get()};
      entry->pieces = checked(PyObject_Vectorcall(pieces_type, arguments, 3, nullptr));
    }
    return Py_NewRef(or_none(entry->pieces));
  });
}

inline int entry_set_pieces(PyObject* self, PyObject* to, void*) {
  auto* entry = as<Entry>(self);
  entry->blank = Geometry();
  Py_XDECREF(std::exchange(entry->pieces, is_none(to) ? nullptr : Py_NewRef(to)));
  return 0;
}

inline void entry_delete(PyObject* self) {
  auto* entry = as<Entry>(self);
  PyTypeObject* type = Py_TYPE(self);
  Value* value = std::exchange(entry->value, nullptr);
  PyObject* counter = std::exchange(entry->counter, nullptr);
  PyObject* pieces = std::exchange(entry->pieces, nullptr);
  entry->blank = Geometry();
  entry->weak.~Weak();
  _PyWeakref_RefType.tp_dealloc(self);  // frees it
  Py_DECREF(type);
  give_up(object_of(value));
  Py_XDECREF(counter);
  Py_XDECREF(pieces);
}

inline PyGetSetDef entry_getset[] = {
    {"key", get_number<Entry, &Entry::key>, set_number<Entry, &Entry::key>},
    {"version", get_number<Entry, &Entry::version>, set_number<Entry, &Entry::version>},
    {"nbytes", get_number<Entry, &Entry::nbytes>, set_number<Entry, &Entry::nbytes>},
    {"counted", get_number<Entry, &Entry::counted>, set_number<Entry, &Entry::counted>},
    {"value", entry_value, entry_set_value},
    {"weak", entry_weak, entry_set_weak},
    {"counter", get_object<Entry, &Entry::counter>, set_object<Entry, &Entry::counter>},
    {"pieces", entry_pieces, entry_set_pieces},
    {"loose", get_flag<Entry, &Entry::loose>, set_flag<Entry, &Entry::loose>},
    {"given_out", get_flag<Entry, &Entry::given_out>, set_flag<Entry, &Entry::given_out>},
    {"constant", get_flag<Entry, &Entry::constant>, set_flag<Entry, &Entry::constant>},
    {}};

inline PyType_Slot entry_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(entry_delete)},
    {Py_tp_getset, entry_getset},
    {0, nullptr}};

inline PyType_Spec entry_spec = {
    "lowtide.compiled.Entry", sizeof(Entry), 0, Py_TPFLAGS_DEFAULT, entry_slots};

// ---------------------------------------------------------------------- Forget

// Forget(table, live)
inline PyObject* forget_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *table, *live;
  if (!PyArg_ParseTuple(args, "O!O!", table_type, &table, box_type, &live)) return nullptr;
  PyObject* made = type->tp_alloc(type, 0);
  if (made == nullptr) return nullptr;
  as<Forget>(made)->table = Py_NewRef(table);
  as<Forget>(made)->live = as<Box>(Py_NewRef(live));
  return made;
}

inline PyObject* forget_call(PyObject* self, PyObject* args, PyObject*) {
  return leave_error([&]() -> PyObject* {
    auto* forget = as<Forget>(self);
    Owned owner(Py_NewRef(PyTuple_GET_ITEM(args, 0)));
    Entry* entry = entry_of(owner.get());
    if (remove_entry(forget->table, entry)) forget->live->number -= entry->counted;
    return Py_NewRef(Py_None);
  });
}

inline int forget_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(as<Forget>(self)->table);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

inline int forget_clear(PyObject* self) {
  Py_CLEAR(as<Forget>(self)->table);
  return 0;
}

inline void forget_delete(PyObject* self) {
  PyObject_GC_UnTrack(self);
  forget_clear(self);
  Py_XDECREF(object_of(as<Forget>(self)->live));
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyType_Slot forget_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(forget_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(forget_delete)},
    {Py_tp_call, reinterpret_cast<void*>(forget_call)},
    {Py_tp_traverse, reinterpret_cast<void*>(forget_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(forget_clear)},
    {0, nullptr}};

inline PyType_Spec forget_spec = {
    "lowtide.compiled.Forget", sizeof(Forget), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    forget_slots};

// ---------------------------------------------------------------------- WeakList

inline PyObject* weak_list_new(PyTypeObject* type, PyObject* args, PyObject*) {
  if (!PyArg_ParseTuple(args, "")) return nullptr;
  PyObject* made = type->tp_alloc(type, 0);
  if (made != nullptr) new (&as<WeakList>(made)->links) std::vector<Weak>();
  return made;
}

inline void weak_list_delete(PyObject* self) {
  as<WeakList>(self)->links.~vector();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyObject* weak_list_append(PyObject* self, PyObject* record) {
  if (!Py_IS_TYPE(record, value_type) && !Py_IS_TYPE(record, handle_type)) {
    PyErr_SetString(PyExc_TypeError, "lowtide: a record of the other recorder; please report this");
    return nullptr;
  }
  add_weak(self, record);
  Py_RETURN_NONE;
}

inline PyObject* weak_list_alive(PyObject* self, PyObject*) {
  Owned list(PyList_New(0));
  for (const Weak& link : as<WeakList>(self)->links) {
    if (link.get() == nullptr) continue;
    if (list.get() == nullptr || PyList_Append(list.get(), link.get()) < 0) return nullptr;
  }
  return list.release();
}

inline PyObject* weak_list_any(PyObject* self, PyObject*) {
  for (const Weak& link : as<WeakList>(self)->links) {
    if (link.get() != nullptr) Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
}

inline PyObject* weak_list_beyond(PyObject* self, PyObject* planned) {
  if (!PyAnySet_Check(planned)) {
    PyErr_SetString(PyExc_TypeError, "lowtide: a set of numbers was expected; please report this");
    return nullptr;
  }
  for (const Weak& link : as<WeakList>(self)->links) {
    if (link.get() == nullptr) continue;
    const Value* value = as<Handle>(link.get())->value;
    if (value->number < 0) continue;
    Owned number(PyLong_FromLongLong(value->number));
    int found = number.get() == nullptr ? -1 : PySet_Contains(planned, number.get());
    if (found < 0) return nullptr;
    if (found == 0) Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
}

inline PyObject* weak_list_numbered(PyObject* self, PyObject*) {
  Py_ssize_t count = 0;
  for (const Weak& link : as<WeakList>(self)->links) {
    if (link.get() != nullptr && as<Handle>(link.get())->value->number >= 0) ++count;
  }
  return PyLong_FromSsize_t(count);
}

inline PyObject* weak_list_settle(PyObject* self, PyObject*) {
  return leave_error([&] {
    std::vector<Weak> links = as<WeakList>(self)->links;  // a copy: settling may free records
    for (const Weak& link : links) {
      if (link.get() == nullptr) continue;
      Owned kept(Py_NewRef(link.get()));
      auto* value = as<Value>(kept.get());
      if (value->held.defined() && value->op != nullptr) settle(value);
    }
    return Py_NewRef(Py_None);
  });
}

inline PyObject* weak_list_clear(PyObject* self, PyObject*) {
  as<WeakList>(self)->links.clear();
  Py_RETURN_NONE;
}

inline PyMethodDef weak_list_methods[] = {
    {"append", weak_list_append, METH_O, nullptr},
    {"alive", weak_list_alive, METH_NOARGS, nullptr},
    {"any", weak_list_any, METH_NOARGS, nullptr},
    {"beyond", weak_list_beyond, METH_O, nullptr},
    {"numbered", weak_list_numbered, METH_NOARGS, nullptr},
    {"settle", weak_list_settle, METH_NOARGS, nullptr},
    {"clear", weak_list_clear, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

inline PyType_Slot weak_list_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(weak_list_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(weak_list_delete)},
    {Py_tp_methods, weak_list_methods},
    {0, nullptr}};

inline PyType_Spec weak_list_spec = {
    "lowtide.compiled.WeakList", sizeof(WeakList), 0, Py_TPFLAGS_DEFAULT, weak_list_slots};

// ---------------------------------------------------------------------- Watched

inline PyObject* watched_new(PyTypeObject* type, PyObject* args, PyObject*) {
  if (!PyArg_ParseTuple(args, "")) return nullptr;
  PyObject* made = type->tp_alloc(type, 0);
  if (made == nullptr) return nullptr;
  new (&as<Watched>(made)->storages) decltype(Watched::storages)();
  return made;
}

inline PyObject* watched_add(PyObject* self, PyObject* args) {
  long long key;
  PyObject* value;
  if (!PyArg_ParseTuple(args, "LO", &key, &value)) return nullptr;
  return leave_error([&] {
    watch(as<Watched>(self), key, value);
    return Py_NewRef(Py_None);
  });
}

// Stop watching a storage; returns the values that hold it.
inline PyObject* watched_pop(PyObject* self, PyObject* key) {
  return leave_error([&] {
    auto& storages = as<Watched>(self)->storages;
    Owned list(checked(PyList_New(0)));
    auto found = storages.find(integer(key));
    if (found == storages.end()) return list.release();
    auto holders = std::move(found->second);
    storages.erase(found);
    for (const Watched::Holder& holder : holders) {
      Owned value = held_through(holder);
      Py_XDECREF(holder.reference);
      if (value.get() != nullptr && PyList_Append(list.get(), value.get()) < 0) {
        throw py::error_already_set();
      }
    }
    return list.release();
  });
}

// The number of references for each storage, dead ones not yet swept included.
inline PyObject* watched_counts(PyObject* self, PyObject*) {
  Owned list(PyList_New(0));
  for (const auto& [key, holders] : as<Watched>(self)->storages) {
    Owned count(PyLong_FromSize_t(holders.size()));
    if (list.get() == nullptr || PyList_Append(list.get(), count.get()) < 0) return nullptr;
  }
  return list.release();
}

inline PyObject* watched_sweep(PyObject* self, PyObject*) {
  return leave_error([&] {
    sweep(as<Watched>(self));
    return Py_NewRef(Py_None);
  });
}

inline PyMethodDef watched_methods[] = {
    {"add", watched_add, METH_VARARGS, nullptr},
    {"pop", watched_pop, METH_O, nullptr},
    {"counts", watched_counts, METH_NOARGS, nullptr},
    {"sweep", watched_sweep, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

inline PyType_Slot watched_slots[] = {  // one, for the life of the process
    {Py_tp_new, reinterpret_cast<void*>(watched_new)},
    {Py_tp_methods, watched_methods},
    {0, nullptr}};

inline PyType_Spec watched_spec = {
    "lowtide.compiled.Watched", sizeof(Watched), 0, Py_TPFLAGS_DEFAULT, watched_slots};

}  // namespace lowtide

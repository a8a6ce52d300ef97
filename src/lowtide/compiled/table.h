// The entries of a recording by storage: what a dict is to the recorder in Python.
//
// Problem: every argument and result is looked up, and a Python integer for each lookup costs more than
// the lookup. Invariant: a mapping with the methods that Python's rare paths use, in the order in which
// storages were entered. Rejected: a dict, whose keys are made, hashed and compared as objects.
#pragma once

#include "entries.h"

#include <c10/util/order_preserving_flat_hash_map.h>

namespace lowtide {

using Entries = ska_ordered::order_preserving_flat_hash_map<int64_t, Entry*>;

struct Table {
  PyObject_HEAD
  Entries entries;  // owned
  uint64_t entered;  // how often one was put here
};

// The memory of the table that was cleared last, for the next one, which as a rule is that of the same step
// or region: a table that grows takes longer for that than for all that is looked up in it. Needs the GIL.
// Clearing goes over all of it: what is much more than the last table used is not kept.
inline Entries spare;
constexpr uint64_t MUCH = 16;  // places for each entry that was put

// The entry of a storage, borrowed, or null.
inline Entry* find_entry(PyObject* table, int64_t key) {
  const auto& entries = as<Table>(table)->entries;
  auto found = entries.find(key);
  return found == entries.end() ? nullptr : found->second;
}

inline void put_entry(PyObject* table, int64_t key, Owned entry) {
  Entries& entries = as<Table>(table)->entries;
  if (entries.bucket_count() == 0) std::swap(entries, spare);
  ++as<Table>(table)->entered;
  auto [place, fresh] = entries.emplace(key, nullptr);
  Entry* before = std::exchange(place->second, as<Entry>(entry.release()));
  if (!fresh) Py_DECREF(object_of(before));  // last, as this may run any code
}

// Remove an entry, if it is the one in the table.
inline bool remove_entry(PyObject* table, Entry* entry) {
  auto& entries = as<Table>(table)->entries;
  auto found = entries.find(entry->key);
  if (found == entries.end() || found->second != entry) return false;
  entries.erase(found);
  Py_DECREF(object_of(entry));
  return true;
}

// ---------------------------------------------------------------------- as Python sees it

inline PyObject* table_new(PyTypeObject* type, PyObject* args, PyObject*) {
  if (!PyArg_ParseTuple(args, "")) return nullptr;
  PyObject* made = type->tp_alloc(type, 0);
  if (made != nullptr) new (&as<Table>(made)->entries) Entries();
  return made;
}

inline PyObject* table_clear(PyObject* self, PyObject*) {
  auto entries = std::exchange(as<Table>(self)->entries, {});
  uint64_t entered = std::exchange(as<Table>(self)->entered, 0);
  for (const auto& [key, entry] : entries) Py_DECREF(object_of(entry));
  entries.clear();
  if (entries.bucket_count() != 0 && entries.bucket_count() <= MUCH * entered) spare = std::move(entries);
  Py_RETURN_NONE;
}

inline void table_delete(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Owned done(table_clear(self, nullptr));
  as<Table>(self)->entries.~Entries();
  type->tp_free(self);
  Py_DECREF(type);
}

inline Py_ssize_t table_length(PyObject* self) {
  return static_cast<Py_ssize_t>(as<Table>(self)->entries.size());
}

inline int table_contains(PyObject* self, PyObject* key) {
  int found = 0;
  int failed = leave_error_to([&] { found = find_entry(self, integer(key)) != nullptr; });
  return failed < 0 ? -1 : found;
}

inline PyObject* table_get(PyObject* self, PyObject* key) {
  return leave_error([&] { return Py_NewRef(or_none(object_of(find_entry(self, integer(key))))); });
}

inline int table_set(PyObject* self, PyObject* key, PyObject* to) {
  return leave_error_to([&] {
    if (to == nullptr) throw py::type_error("lowtide: entries leave a table with their storages");
    put_entry(self, integer(key), Owned(Py_NewRef(object_of(entry_of(to)))));
  });
}

template <bool values>
PyObject* table_list(PyObject* self) {
  Owned list(PyList_New(0));
  for (const auto& [key, entry] : as<Table>(self)->entries) {
    Owned item(values ? Py_NewRef(object_of(entry)) : PyLong_FromLongLong(key));
    if (list.get() == nullptr || item.get() == nullptr) return nullptr;
    if (PyList_Append(list.get(), item.get()) < 0) return nullptr;
  }
  return list.release();
}

inline PyObject* table_values(PyObject* self, PyObject*) { return table_list<true>(self); }

inline PyObject* table_iterate(PyObject* self) {
  Owned keys(table_list<false>(self));
  return keys.get() == nullptr ? nullptr : PyObject_GetIter(keys.get());
}

inline PyObject* table_reversed(PyObject* self, PyObject*) {
  Owned keys(table_list<false>(self));
  if (keys.get() == nullptr || PyList_Reverse(keys.get()) < 0) return nullptr;
  return PyObject_GetIter(keys.get());
}

// With the places of its entries, for `sys.getsizeof`.
inline PyObject* table_size(PyObject* self, PyObject*) {
  return PyLong_FromSize_t(sizeof(Table) + as<Table>(self)->entries.bucket_count() * sizeof(Entries::value_type));
}

inline PyMethodDef table_methods[] = {
    {"get", table_get, METH_O, nullptr},
    {"values", table_values, METH_NOARGS, nullptr},
    {"clear", table_clear, METH_NOARGS, nullptr},
    {"__reversed__", table_reversed, METH_NOARGS, nullptr},
    {"__sizeof__", table_size, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

inline PyType_Slot table_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(table_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(table_delete)},
    {Py_tp_methods, table_methods},
    {Py_tp_iter, reinterpret_cast<void*>(table_iterate)},
    {Py_mp_length, reinterpret_cast<void*>(table_length)},
    {Py_mp_ass_subscript, reinterpret_cast<void*>(table_set)},
    {Py_sq_contains, reinterpret_cast<void*>(table_contains)},
    {0, nullptr}};

inline PyType_Spec table_spec = {
    "lowtide.compiled.Table", sizeof(Table), 0, Py_TPFLAGS_DEFAULT, table_slots};

}  // namespace lowtide

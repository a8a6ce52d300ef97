// What is in each live storage: `Entry` of `lowtide/tape/known.py`, and the table's bookkeeping.
//
// Problem: every result of an operator gets an entry, which lives as long as its storage. Invariant: an
// entry is a Python weak reference to the storage, as there, since nothing else reports when torch frees
// a storage; the live bytes are one number that C++ and Python read. Rejected: a table of torch's weak
// storages, which has to be searched for dead ones.
#pragma once

#include "records.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/Storage.h>

namespace lowtide {

// A number that Python reads and writes like the only item of a list.
struct Box {
  PyObject_HEAD
  int64_t number;
};

inline PyTypeObject *box_type, *entry_type, *forget_type, *table_type, *weak_list_type, *watched_type;

struct Entry {
  PyWeakReference base;  // to the storage
  int64_t key, version, nbytes, counted;
  Value* value;  // owned, or null
  Weak weak;
  PyObject* counter;
  PyObject* pieces;  // owned, or null: a `Pieces`, or None
  Geometry blank;    // of uninitialized memory that nothing was done with; `pieces` is then null
  bool loose, given_out;
  bool constant;     // that memory was filled with a constant, which is not recorded

  // Whether it is uninitialized memory that the record has not written in all parts.
  bool unwritten() const { return blank.defined() || (pieces != nullptr && pieces != Py_None); }
};

// Called by an entry whose storage was freed.
struct Forget {
  PyObject_HEAD
  PyObject* table;
  Box* live;
};

inline Entry* entry_of(PyObject* object) {
  if (!Py_IS_TYPE(object, entry_type)) {
    throw py::type_error("lowtide: an entry of the other recorder; please report this");
  }
  return as<Entry>(object);
}

// The value in a storage, borrowed; null if the old value is gone.
inline Value* value_in(const Entry* entry) {
  return entry->value != nullptr ? entry->value : as<Value>(entry->weak.get());
}

inline void put_value(Entry* entry, Value* borrowed) {
  if (borrowed != nullptr) Py_INCREF(object_of(borrowed));
  give_up(object_of(std::exchange(entry->value, borrowed)));
}

// An entry for a storage, not in a table yet.
inline Owned new_entry(const at::Tensor& tensor, PyObject* forget) {
  Owned storage(checked(THPStorage_Wrap(tensor.storage())));
  // Untrack a wrapper made for us: hundreds per step that survive a collection or two would trigger full
  // collections, over all objects of the process.
  if (Py_REFCNT(storage.get()) <= 2) PyObject_GC_UnTrack(storage.get());
  static PyObject* pair = nullptr;  // reused for every entry, as nothing keeps it
  Owned arguments(pair == nullptr ? checked(PyTuple_New(2)) : std::exchange(pair, nullptr));
  PyObject_GC_UnTrack(arguments.get());  // its items are borrowed
  PyTuple_SET_ITEM(arguments.get(), 0, storage.get());
  PyTuple_SET_ITEM(arguments.get(), 1, forget);
  Owned made(entry_type->tp_new(entry_type, arguments.get(), nullptr));
  PyTuple_SET_ITEM(arguments.get(), 0, nullptr);
  PyTuple_SET_ITEM(arguments.get(), 1, nullptr);
  if (pair == nullptr) pair = arguments.release();
  checked(made.get());
  PyObject_GC_UnTrack(made.get());  // it refers only to numbers and records, which are not collected
  return made;
}

// ---------------------------------------------------------------------- links to many records

// Weak references to records, in the order in which they were added; `WeakList` of `lowtide/tape/values.py`.
struct WeakList {
  PyObject_HEAD
  std::vector<Weak> links;
};

inline void add_weak(PyObject* list, PyObject* record) {
  as<WeakList>(list)->links.push_back(weak_to(record));
}

// ---------------------------------------------------------------------- who holds which storage

// Storages and the values that hold an alias of them; `Watched` of `lowtide/tape/watch.py`. It has values
// of both recorders, those of the Python recorder through Python's weak references.
struct Watched {
  PyObject_HEAD
  struct Holder {
    Weak record;
    PyObject* reference;  // owned; null: `record` is used
  };
  ska::flat_hash_map<int64_t, c10::SmallVector<Holder, 1>> storages;
  size_t swept;
};

inline PyObject* target_of(PyObject* reference) {  // a new reference, or null
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference, &found) < 0) throw py::error_already_set();
  return found;
#else
  PyObject* found = PyWeakref_GetObject(reference);
  return found == Py_None ? nullptr : Py_XNewRef(found);
#endif
}

inline Owned held_through(const Watched::Holder& holder) {
  if (holder.reference != nullptr) return Owned(target_of(holder.reference));
  PyObject* found = holder.record.get();
  return Owned(found == nullptr ? nullptr : Py_NewRef(found));
}

inline void forget_gone(c10::SmallVector<Watched::Holder, 1>& holders) {
  auto gone = [](const Watched::Holder& holder) {
    if (held_through(holder).get() != nullptr) return false;
    Py_XDECREF(holder.reference);
    return true;
  };
  holders.erase(std::remove_if(holders.begin(), holders.end(), gone), holders.end());
}

inline void sweep(Watched* watched) {
  for (auto at = watched->storages.begin(); at != watched->storages.end();) {
    forget_gone(at->second);
    at = at->second.empty() ? watched->storages.erase(at) : std::next(at);
  }
  watched->swept = watched->storages.size();
}

inline void watch(Watched* watched, int64_t key, PyObject* value) {
  bool ours = Py_IS_TYPE(value, value_type);
  Watched::Holder holder{
      ours ? weak_to(value) : Weak(), ours ? nullptr : checked(PyWeakref_NewRef(value, nullptr))};
  auto& holders = watched->storages[key];
  if (holders.empty()) {
    holders.push_back(std::move(holder));
    if (watched->storages.size() > 2 * watched->swept + 1000) sweep(watched);
    return;
  }
  holders.push_back(std::move(holder));
  if (holders.size() > 8 && (holders.size() & (holders.size() - 1)) == 0) forget_gone(holders);
}

}  // namespace lowtide

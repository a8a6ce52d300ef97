// The Python type of a plan's script: made once for each plan, of tuples, and read by C++ alone.
//
// Problem: a plan is compared with at every operation, and made in Python. Invariant: nothing of the tuples
// is referred to but the names, which are interned, so that comparing them is comparing pointers. Rejected:
// reading the tuples at each operation.
#pragma once

#include "script.h"

namespace lowtide {

inline std::vector<std::vector<int64_t>> lists_in(PyObject* tuple) {
  std::vector<std::vector<int64_t>> found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    found.push_back(numbers_in(PyTuple_GET_ITEM(tuple, i)));
  }
  return found;
}

inline PyObject* all_interned(PyObject* names) {
  Owned made(checked(PyTuple_New(PyTuple_GET_SIZE(names))));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    PyObject* name = Py_NewRef(PyTuple_GET_ITEM(names, i));
    PyUnicode_InternInPlace(&name);
    PyTuple_SET_ITEM(made.get(), i, name);
  }
  return made.release();
}

// Script(names, sizes, reads, wanted, needs, choices, by_size): tuples with one item per operation;
// `choices` has one per value, and `by_size` lists operations.
inline PyObject* new_script(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *names, *sizes, *reads, *wanted, *needs, *choices, *by_size;
  if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!O!", &PyTuple_Type, &names, &PyTuple_Type, &sizes,
                        &PyTuple_Type, &reads, &PyTuple_Type, &wanted, &PyTuple_Type, &needs,
                        &PyTuple_Type, &choices, &PyTuple_Type, &by_size)) {
    return nullptr;
  }
  Owned owner(checked(type->tp_alloc(type, 0)));
  auto* script = reinterpret_cast<Script*>(owner.get());
  new (&script->sizes) std::vector<std::vector<int64_t>>();
  new (&script->reads) std::vector<std::vector<int64_t>>();
  new (&script->wanted) std::vector<int64_t>();
  new (&script->needs) std::vector<int64_t>();
  new (&script->choices) std::vector<int64_t>();
  new (&script->looked_at) std::vector<size_t>();
  new (&script->by_size) std::unordered_set<int64_t>();
  script->names = all_interned(names);
  script->sizes = lists_in(sizes);
  script->reads = lists_in(reads);
  script->wanted = numbers_in(wanted);
  script->needs = numbers_in(needs);
  script->choices = numbers_in(choices);
  auto indices = numbers_in(by_size);
  script->by_size.insert(indices.begin(), indices.end());
  script->looked_at.resize(script->sizes.size());
  return owner.release();
  END_HANDLE_TH_ERRORS
}

inline void delete_script(PyObject* self) {
  auto* script = reinterpret_cast<Script*>(self);
  Py_XDECREF(script->names);
  script->sizes.~vector();
  script->reads.~vector();
  script->wanted.~vector();
  script->needs.~vector();
  script->choices.~vector();
  script->looked_at.~vector();
  script->by_size.~unordered_set();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyType_Slot script_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(new_script)},
    {Py_tp_dealloc, reinterpret_cast<void*>(delete_script)},
    {0, nullptr}};

inline PyType_Spec script_spec = {
    "lowtide.compiled.Script", sizeof(Script), 0, Py_TPFLAGS_DEFAULT, script_slots};

}  // namespace lowtide

// Python objects in C++: owned references, slots of Python classes, plain attributes.
//
// Problem: every file here handles them. Invariant: inside, a Python exception is thrown as a C++ one; it
// leaves as a Python one. Rejected: pybind11 objects on the hot path, whose checks cost more than the
// work behind them.
#pragma once

#include <Python.h>
#include <structmember.h>

#include <c10/util/SmallVector.h>
#include <torch/csrc/utils/pybind.h>

#include <new>
#include <string>
#include <utility>
#include <vector>

namespace lowtide {

namespace py = pybind11;

// An owned reference, released at the end of the scope.
struct Owned {
  PyObject* object;
  explicit Owned(PyObject* stolen = nullptr) : object(stolen) {}
  Owned(Owned&& other) noexcept : object(other.release()) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object, other.object);
    return *this;
  }
  ~Owned() { Py_XDECREF(object); }
  PyObject* release() { return std::exchange(object, nullptr); }
  PyObject* get() const { return object; }
};

inline PyObject* checked(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return result;
}

inline bool is_none(PyObject* object) { return object == nullptr || object == Py_None; }

inline PyObject* or_none(PyObject* object) { return object == nullptr ? Py_None : object; }

inline int64_t integer(PyObject* object) {
  int64_t found = PyLong_AsLongLong(object);
  if (found == -1 && PyErr_Occurred()) throw py::error_already_set();
  return found;
}

template <class Numbers = std::vector<int64_t>>
Numbers numbers_in(PyObject* tuple) {
  Numbers found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    found.push_back(integer(PyTuple_GET_ITEM(tuple, i)));
  }
  return found;
}

template <class Numbers>
Owned tuple_of(const Numbers& numbers) {
  Owned made(checked(PyTuple_New(static_cast<Py_ssize_t>(numbers.size()))));
  for (size_t i = 0; i < numbers.size(); ++i) {
    PyTuple_SET_ITEM(made.get(), static_cast<Py_ssize_t>(i), checked(PyLong_FromLongLong(numbers[i])));
  }
  return made;
}

inline PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

template <class T>
T* as(PyObject* object) {
  return reinterpret_cast<T*>(object);
}

template <class T>
PyObject* object_of(T* record) {
  return reinterpret_cast<PyObject*>(record);
}

// Run what makes a Python object; if it throws, set the Python error and return null.
template <class Make>
PyObject* leave_error(Make make) {
  try {
    return make();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <class Do>
int leave_error_to(Do act) {
  Owned done(leave_error([&] {
    act();
    return Py_NewRef(Py_None);
  }));
  return done.get() == nullptr ? -1 : 0;
}

// Release a reference to a record. Records refer to one another in chains as long as the step: what one
// that is freed refers to waits for its turn, so that freeing a chain does not recurse.
inline void give_up(PyObject* object) {
  using Waiting = c10::SmallVector<PyObject*, 16>;
  // No destructor: a thread that ends may free records when its thread-locals are gone, such as those of a
  // graph that saved-tensor hooks hold which it has never left.
  static thread_local Waiting* waiting = nullptr;
  if (object == nullptr) return;
  if (Py_REFCNT(object) > 1) return Py_DECREF(object);
  if (waiting != nullptr) return waiting->push_back(object);
  Waiting all;
  waiting = &all;
  Py_DECREF(object);
  while (!all.empty()) Py_DECREF(all.pop_back_val());
  waiting = nullptr;
}

// Python's allocator for small objects, which is faster than malloc for the thousands that a step makes
// and frees. Needs the GIL.
template <class T>
struct PythonMemory {
  using value_type = T;
  PythonMemory() = default;
  template <class Other>
  PythonMemory(const PythonMemory<Other>&) {}
  T* allocate(size_t count) {
    void* room = PyObject_Malloc(count * sizeof(T));
    if (room == nullptr) throw std::bad_alloc();
    return static_cast<T*>(room);
  }
  void deallocate(T* room, size_t) { PyObject_Free(room); }
  bool operator==(const PythonMemory&) const = default;
};

// ---------------------------------------------------------------------- attributes of our types

template <class T, PyObject* T::*member>
PyObject* get_object(PyObject* self, void*) {
  return Py_NewRef(or_none(as<T>(self)->*member));
}

// None is stored as null.
template <class T, PyObject* T::*member>
int set_object(PyObject* self, PyObject* to, void*) {
  give_up(std::exchange(as<T>(self)->*member, is_none(to) ? nullptr : Py_NewRef(to)));
  return 0;
}

template <class T, int64_t T::*member>
PyObject* get_number(PyObject* self, void*) {
  return PyLong_FromLongLong(as<T>(self)->*member);
}

template <class T, int64_t T::*member>
int set_number(PyObject* self, PyObject* to, void*) {
  return leave_error_to([&] { as<T>(self)->*member = integer(to); });
}

template <class T, bool T::*member>
PyObject* get_flag(PyObject* self, void*) {
  return PyBool_FromLong(as<T>(self)->*member);
}

template <class T, bool T::*member>
int set_flag(PyObject* self, PyObject* to, void*) {
  int truth = to == nullptr ? 0 : PyObject_IsTrue(to);
  if (truth < 0) return -1;
  as<T>(self)->*member = truth != 0;
  return 0;
}

// ---------------------------------------------------------------------- slots of Python classes

using Offset = Py_ssize_t;

inline PyObject*& slot(PyObject* object, Offset offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

inline void put_new(PyObject* object, Offset offset, PyObject* borrowed) {
  PyObject* old = std::exchange(slot(object, offset), Py_NewRef(borrowed));
  Py_XDECREF(old);
}

// The tape's classes that stay in Python, and the offsets of their slots.
struct Layout {
  PyTypeObject *ref, *operation, *region, *tape;
  Offset ref_value, ref_dtype, ref_size, ref_stride, ref_offset, ref_blank;
  Offset operation_refs, operation_sequence, operation_facts;
  Offset region_depth, region_parent, region_policy;
  Offset kept_tensor, kept_version;
  Offset tape_lock, tape_decisions, tape_recorder, tape_events, tape_passing;
};

inline Layout layout;

inline Offset offset_of(PyTypeObject* type, const char* name) {
  Owned found(checked(PyObject_GetAttrString(object_of(type), name)));
  if (!Py_IS_TYPE(found.get(), &PyMemberDescr_Type)) {
    throw py::type_error(std::string(type->tp_name) + "." + name + " is not a slot");
  }
  return as<PyMemberDescrObject>(found.get())->d_member->offset;
}

inline PyTypeObject* class_in(const py::module_& module, const char* name) {
  py::object found = module.attr(name);
  return as<PyTypeObject>(found.release().ptr());  // for the life of the process
}

inline void find_layout(const py::module_& values, const py::module_& tape) {
  Layout& l = layout;
  l.ref = class_in(values, "Ref");
  l.operation = class_in(values, "Operation");
  l.region = class_in(values, "Region");
  l.tape = class_in(tape, "Tape");
  l.tape_lock = offset_of(l.tape, "lock");
  l.tape_decisions = offset_of(l.tape, "decisions");
  l.tape_recorder = offset_of(l.tape, "recorder");
  l.tape_events = offset_of(l.tape, "events");
  l.tape_passing = offset_of(l.tape, "passing");
  l.ref_value = offset_of(l.ref, "value");
  l.ref_dtype = offset_of(l.ref, "dtype");
  l.ref_size = offset_of(l.ref, "size");
  l.ref_stride = offset_of(l.ref, "stride");
  l.ref_offset = offset_of(l.ref, "offset");
  l.ref_blank = offset_of(l.ref, "blank");
  l.operation_refs = offset_of(l.operation, "refs");
  l.operation_sequence = offset_of(l.operation, "sequence");
  l.operation_facts = offset_of(l.operation, "facts");
  l.region_depth = offset_of(l.region, "depth");
  l.region_parent = offset_of(l.region, "parent");
  l.region_policy = offset_of(l.region, "policy");
  PyTypeObject* kept = class_in(values, "Kept");
  l.kept_tensor = offset_of(kept, "tensor");
  l.kept_version = offset_of(kept, "version");
}

}  // namespace lowtide

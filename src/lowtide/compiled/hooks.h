// The saved-tensor hooks: what `Recorder.pack` and `unpack` of `lowtide/replay.py` do.
//
// Problem: autograd calls them for every saved tensor, twice. Invariant: a handle is the Python one,
// and both engines can answer for it. Rejected: hooks in C++ only, which torch offers for one stack
// of defaults and not for regions inside one another.
#pragma once

#include "replay.h"

#include <torch/csrc/Exceptions.h>

#include <chrono>

namespace lowtide {

inline PyObject *python_unpack, *listeners;

// ---------------------------------------------------------------------- pack

inline PyObject* call_python_pack(State* state, PyObject* tensor) {
  static PyObject* name = interned("pack_slowly");
  c10::impl::ExcludeDispatchKeyGuard guard(KEY);
  return checked(PyObject_CallMethodOneArg(reinterpret_cast<PyObject*>(state), name, tensor));
}

inline PyObject* pack_tensor(State* state, PyObject* wrapped) {
  const Layout& l = layout;
  const at::Tensor& tensor = THPVariable_Unpack(wrapped);
  if (!is_ordinary(tensor) || state->lazy_bits || state->group != 0) {
    return call_python_pack(state, wrapped);
  }
  Owned key = key_of(tensor);
  PyObject* entry = PyDict_GetItemWithError(state->table, key.get());
  Owned owner;
  if (entry == nullptr) {
    owner = external(state, tensor, std::move(key), false);
  } else if (integer(slot(entry, l.entry_version)) != tensor._version()) {
    return call_python_pack(state, wrapped);
  } else if (!is_none(slot(entry, l.entry_value))) {
    owner = Owned(Py_NewRef(slot(entry, l.entry_value)));
  } else if (!is_none(slot(entry, l.entry_weak))) {
    owner = Owned(target_of(slot(entry, l.entry_weak)));
  }
  PyObject* value = owner.get();
  if (value == nullptr) return call_python_pack(state, wrapped);
  PyObject* op = slot(value, l.value_op);
  bool external = is_none(op);
  if (!external) {
    if (is_constant(op)) {  // a foreign kernel may have filled it
      return call_python_pack(state, wrapped);
    }
    PyObject* scope = slot(value, l.value_scope);
    if (is_none(scope) ||
        integer(slot(state->region, l.region_depth)) < integer(slot(scope, l.region_depth))) {
      put_new(value, l.value_scope, state->region);
    }
  }
  if (!holds(value)) {
    bool keep = external || slot(value, l.value_keep) == Py_True;
    if (!keep && following(state)) {
      keep = plan_holds(state, value);
    } else if (!keep && state->asks) {
      static PyObject* name = interned("saved");
      PyObject* arguments[] = {state->decisions, value, state->region};
      Owned answer(checked(PyObject_VectorcallMethod(name, arguments, 3, nullptr)));
      keep = answer.get() == Py_True;
    }
    if (keep) hold(entry, value, tensor);
  }
  // Where it is held for good, an alias tells; an external always is.
  if (!external && (state->asks || !holds(value)) && is_none(slot(entry, l.entry_counter))) {
    put(entry, l.entry_counter, new_counter(tensor));
  }
  Owned handle(allocate(l.handle));
  slot(handle.get(), l.handle_ref) = new_ref(value, Geometry(tensor));
  slot(handle.get(), l.handle_region) = Py_NewRef(state->region);
  slot(handle.get(), l.handle_tape) = Py_NewRef(state->tape);
  slot(handle.get(), l.handle_sequence) = PyLong_FromLongLong(state->sequence);
  Owned weak(weak_to(handle.get()));
  if (is_none(slot(value, l.value_saves))) {
    put(value, l.value_saves, leaf(PyList_New(0)));
  }
  if (PyList_Append(slot(value, l.value_saves), weak.get()) < 0) throw py::error_already_set();
  if (following(state)) {
    if (PyList_Append(state->handles, weak.get()) < 0) throw py::error_already_set();
  } else if (state->asks) {
    static PyObject* name = interned("packed");
    PyObject* arguments[] = {state->decisions, handle.get(), value};
    Owned done(checked(PyObject_VectorcallMethod(name, arguments, 3, nullptr)));
  }
  return handle.release();
}

// ---------------------------------------------------------------------- unpack

struct Locked {
  PyObject* lock;
  explicit Locked(PyObject* l) : lock(l) {
    static PyObject* name = interned("acquire");
    Owned done(checked(PyObject_CallMethodNoArgs(lock, name)));
  }
  ~Locked() {
    static PyObject* name = interned("release");
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    Owned done(PyObject_CallMethodNoArgs(lock, name));
    PyErr_Restore(type, error, trace);
  }
};

inline void tell(PyObject* decisions, PyObject* name, PyObject* what) {
  PyObject* arguments[] = {decisions, what};
  Owned done(checked(PyObject_VectorcallMethod(name, arguments, 2, nullptr)));
}

inline PyObject* unpack_handle(PyObject* handle) {
  static PyObject *lock_name = interned("lock"), *decisions_name = interned("decisions"),
                  *asks_name = interned("asks"), *requested = interned("requested"),
                  *replayed = interned("replayed"), *answered = interned("answered"),
                  *recorder_name = interned("recorder"), *adopt = interned("adopt");
  const Layout& l = layout;
  PyObject* tape = slot(handle, l.handle_tape);
  Owned lock(checked(PyObject_GetAttr(tape, lock_name)));
  Locked locked(lock.get());
  Owned decisions(checked(PyObject_GetAttr(tape, decisions_name)));
  Owned asks(checked(PyObject_GetAttr(decisions.get(), asks_name)));
  bool told = asks.get() == Py_True;
  if (told) tell(decisions.get(), requested, handle);
  PyObject* ref = slot(handle, l.handle_ref);
  Owned value(Py_NewRef(slot(ref, l.ref_value)));
  const at::Tensor* held = in_memory(value.get());
  at::Tensor base;
  if (held != nullptr) {
    base = *held;
  } else {
    if (is_none(slot(value.get(), l.value_op))) lost(value.get(), ref);
    auto began = std::chrono::steady_clock::now();
    Replay replay(value.get(), handle, decisions.get());
    base = replay.run();
    std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
    bool listened = PyList_GET_SIZE(listeners) > 0;
    if (told || listened) {
      Owned operations = replay.operations();
      if (told) {
        Owned spent(PyFloat_FromDouble(seconds.count()));
        PyObject* arguments[] = {decisions.get(), operations.get(), spent.get()};
        Owned done(checked(PyObject_VectorcallMethod(replayed, arguments, 3, nullptr)));
      }
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(listeners); ++i) {
        Owned done(checked(PyObject_CallOneArg(PyList_GET_ITEM(listeners, i), operations.get())));
      }
    }
    Owned recorder(checked(PyObject_GetAttr(tape, recorder_name)));
    if (recorder.get() != Py_None) {
      Owned wrapped(checked(THPVariable_Wrap(base)));
      PyObject* arguments[] = {recorder.get(), value.get(), wrapped.get()};
      Owned done(checked(PyObject_VectorcallMethod(adopt, arguments, 3, nullptr)));
    }
  }
  if (told) tell(decisions.get(), answered, value.get());
  BelowAutograd below;
  return checked(THPVariable_Wrap(geometry_of(ref).of(base)));
}

inline PyObject* unpack(PyObject*, PyObject* packed) {
  HANDLE_TH_ERRORS
  if (!Py_IS_TYPE(packed, layout.handle)) return PyObject_CallOneArg(python_unpack, packed);
  return unpack_handle(packed);
  END_HANDLE_TH_ERRORS
}

}  // namespace lowtide

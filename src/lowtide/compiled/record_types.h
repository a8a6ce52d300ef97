// The Python types of values and handles.
//
// Problem: rare paths, decisions and tests are in Python and use one interface. Invariant: every attribute
// and method of `Value` and `Handle` in `lowtide/tape/values.py` that other files use is here under its
// name. Rejected: adding them one by one.
#pragma once

#include "records.h"

#include <torch/csrc/utils/pybind.h>

namespace lowtide {

inline PyObject* value_new(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject *op, *region;
  long long nbytes;
  if (!PyArg_ParseTuple(args, "OLO", &op, &nbytes, &region)) return nullptr;
  return leave_error([&] { return object_of(new_value(op, nbytes, region, -1)); });
}

inline void value_delete(PyObject* self) {
  leave<Value>(self);
  auto* value = as<Value>(self);
  PyObject *op = value->op, *region = value->region, *scope = value->scope, *wholes = value->wholes;
  free_record<Value>(self);
  give_up(op);
  Py_XDECREF(region);
  Py_XDECREF(scope);
  Py_XDECREF(wholes);
}

inline PyObject* value_held(PyObject* self, void*) {
  const at::Tensor& held = as<Value>(self)->held;
  return held.defined() ? THPVariable_Wrap(held) : Py_NewRef(Py_None);
}

inline int value_set_held(PyObject* self, PyObject* to, void*) {
  if (!is_none(to) && !THPVariable_Check(to)) {
    PyErr_SetString(PyExc_TypeError, "lowtide: a value holds a tensor, or None");
    return -1;
  }
  at::Tensor old = is_none(to) ? at::Tensor() : THPVariable_Unpack(to);
  std::swap(old, as<Value>(self)->held);
  return 0;
}

inline PyObject* python_stream(const c10::Stream* stream) {
  if (stream == nullptr) Py_RETURN_NONE;
  return leave_error([&] {
    return py::object(py::module_::import("torch").attr("Stream")(
                          py::arg("stream_id") = stream->id(),
                          py::arg("device_index") = stream->device_index(),
                          py::arg("device_type") = static_cast<int64_t>(stream->device_type())))
        .release()
        .ptr();
  });
}

inline const c10::Stream* stream_from(PyObject* stream) {
  if (is_none(stream)) return nullptr;
  return the_stream(py::cast<c10::Stream>(py::handle(stream)));
}

inline PyObject* value_home(PyObject* self, void*) { return python_stream(as<Value>(self)->home); }

inline int value_set_home(PyObject* self, PyObject* to, void*) {
  return leave_error_to([&] { as<Value>(self)->home = stream_from(to); });
}

inline PyObject* value_settle(PyObject* self, PyObject*) {
  return leave_error([&] {
    settle(as<Value>(self));
    return Py_NewRef(Py_None);
  });
}

inline PyObject* value_intact(PyObject* self, PyObject*) {
  return leave_error([&] { return PyBool_FromLong(intact(as<Value>(self))); });
}

inline PyObject* value_pending(PyObject* self, PyObject*) {
  return PyBool_FromLong(as<Value>(self)->handles != nullptr);
}

inline PyObject* value_handles(PyObject* self, PyObject*) {
  Owned list(PyList_New(0));
  for (Handle* handle = as<Value>(self)->handles; handle != nullptr; handle = handle->after) {
    if (list.get() == nullptr || PyList_Append(list.get(), object_of(handle)) < 0) return nullptr;
  }
  if (PyList_Reverse(list.get()) < 0) return nullptr;  // into the order in which they were made
  return list.release();
}

// hand_over(to, handles=None)
inline PyObject* value_hand_over(PyObject* self, PyObject* args) {
  PyObject *to, *handles = Py_None;
  if (!PyArg_ParseTuple(args, "O|O", &to, &handles)) return nullptr;
  return leave_error([&] {
    hand_over(as<Value>(self), value_of(to), [&](Handle* handle) {
      int chosen = is_none(handles) ? 1 : PySequence_Contains(handles, object_of(handle));
      if (chosen < 0) throw py::error_already_set();
      return chosen == 1;
    });
    return Py_NewRef(Py_None);
  });
}

inline PyGetSetDef value_getset[] = {
    {"op", get_object<Value, &Value::op>, set_object<Value, &Value::op>},
    {"region", get_object<Value, &Value::region>, set_object<Value, &Value::region>},
    {"scope", get_object<Value, &Value::scope>, set_object<Value, &Value::scope>},
    {"wholes", get_object<Value, &Value::wholes>, set_object<Value, &Value::wholes>},
    {"held", value_held, value_set_held},
    {"home", value_home, value_set_home},
    {"nbytes", get_number<Value, &Value::nbytes>, set_number<Value, &Value::nbytes>},
    {"number", get_number<Value, &Value::number>, set_number<Value, &Value::number>},
    {"retain_from", get_number<Value, &Value::retain_from>, set_number<Value, &Value::retain_from>},
    {"version", get_number<Value, &Value::version>, set_number<Value, &Value::version>},
    {"keep", get_flag<Value, &Value::keep>, set_flag<Value, &Value::keep>},
    {"read", get_flag<Value, &Value::read>, set_flag<Value, &Value::read>},
    {"saved", get_flag<Value, &Value::saved>, nullptr},
    {}};

inline PyMethodDef value_methods[] = {
    {"settle", value_settle, METH_NOARGS, nullptr},
    {"intact", value_intact, METH_NOARGS, nullptr},
    {"pending", value_pending, METH_NOARGS, nullptr},
    {"handles", value_handles, METH_NOARGS, nullptr},
    {"hand_over", value_hand_over, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

// For all records: Python may have weak references to them.
inline PyMemberDef record_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Record, weak_list), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

inline PyType_Slot value_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(value_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(value_delete)},
    {Py_tp_getset, value_getset},
    {Py_tp_methods, value_methods},
    {Py_tp_members, record_members},
    {0, nullptr}};

inline PyType_Spec value_spec = {
    "lowtide.compiled.Value", record_size<Value>, 0, Py_TPFLAGS_DEFAULT, value_slots};

// ---------------------------------------------------------------------- handles

// Handle(ref, region, tape, sequence)
inline PyObject* handle_new(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject *ref, *region, *tape;
  long long sequence;
  if (!PyArg_ParseTuple(args, "O!OO!L", layout.ref, &ref, &region, layout.tape, &tape,
                        &sequence)) return nullptr;
  return leave_error([&] {
    static PyObject* name = interned("asks");
    Value* value = value_of(slot(ref, layout.ref_value));
    Owned asks(checked(PyObject_GetAttr(slot(tape, layout.tape_decisions), name)));
    bool told = asks.get() == Py_True;
    return object_of(new_handle(value, geometry_of(ref), region, tape, sequence, told));
  });
}

inline bool records_forward(PyObject* recorder);  // in `state.h`

// As `Handle.__del__`, for a graph that dies while the forward runs. Called only for handles for which
// `is_forgotten` is true.
inline void handle_finalize(PyObject* self) {
  static PyObject* name = interned("forgotten");
  Owned recorder(Py_NewRef(slot(as<Handle>(self)->tape, layout.tape_recorder)));
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  if (PyObject* done = PyObject_CallMethodOneArg(recorder.get(), name, self)) {
    Py_DECREF(done);
  } else {
    PyErr_WriteUnraisable(self);
  }
  PyErr_Restore(type, error, trace);
}

inline bool is_forgotten(const Handle* handle) {
  const Value* value = handle->value;
  return value->held.defined() && value->op != nullptr && !value->keep && handle->told &&
      handle->before == nullptr && handle->after == nullptr &&
      records_forward(slot(handle->tape, layout.tape_recorder));
}

inline void handle_delete(PyObject* self) {
  if (is_forgotten(as<Handle>(self)) && PyObject_CallFinalizerFromDealloc(self) < 0) return;
  auto* handle = as<Handle>(self);
  Value* value = unlink(handle);  // first: what is told that it is gone may ask its value for handles
  leave<Handle>(self);
  PyObject *region = handle->region, *tape = handle->tape, *counter = handle->counter;
  free_record<Handle>(self);
  give_up(object_of(value));
  Py_XDECREF(counter);
  Py_XDECREF(region);
  Py_XDECREF(tape);
}

inline PyObject* handle_ref(PyObject* self, void*) {
  auto* handle = as<Handle>(self);
  return leave_error([&] { return new_ref(object_of(handle->value), handle->geometry); });
}

inline PyObject* handle_value(PyObject* self, void*) {
  return Py_NewRef(object_of(as<Handle>(self)->value));
}

inline PyGetSetDef handle_getset[] = {
    {"ref", handle_ref, nullptr},
    {"value", handle_value, nullptr},
    {"region", get_object<Handle, &Handle::region>, nullptr},
    {"tape", get_object<Handle, &Handle::tape>, nullptr},
    {"counter", get_object<Handle, &Handle::counter>, set_object<Handle, &Handle::counter>},
    {"sequence", get_number<Handle, &Handle::sequence>, nullptr},
    {"asked_in", get_number<Handle, &Handle::asked_in>, nullptr},
    {}};

inline PyType_Slot handle_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(handle_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(handle_delete)},
    {Py_tp_finalize, reinterpret_cast<void*>(handle_finalize)},
    {Py_tp_getset, handle_getset},
    {Py_tp_members, record_members},
    {0, nullptr}};

inline PyType_Spec handle_spec = {
    "lowtide.compiled.Handle", record_size<Handle>, 0, Py_TPFLAGS_DEFAULT, handle_slots};

}  // namespace lowtide

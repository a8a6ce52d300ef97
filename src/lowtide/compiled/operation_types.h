// An operation as Python sees it, and arguments of a boxed call as Python has them.
//
// Problem: rare paths, decisions and tests are in Python and use one interface. Invariant: every attribute
// and method of `Operation` in `lowtide/tape/values.py` that other files use is here under its name. Calls
// that the compiled recorder leaves to Python are Python `Operation`s. Rejected: making these when an
// operation is recorded, as hardly any is ever looked at.
#pragma once

#include "operation.h"

#include <ATen/ops/_local_scalar_dense_native.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/jit/python/pybind_utils.h>

namespace lowtide {

// Whether an argument was a Python number in place of a tensor. A fake tensor in place of a number has no
// value.
inline bool is_number(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return false;
  const c10::TensorImpl* tensor = value.toTensor().unsafeGetTensorImpl();
  return tensor->is_wrapped_number() && !tensor->is_python_dispatch();
}

// That number. Not asked of the dispatcher where it is on the CPU: while a kernel runs on fake tensors,
// it would take the number for one of them, which have no value.
inline at::Scalar number_of(const c10::IValue& value) {
  const at::Tensor& tensor = value.toTensor();
  bool here = tensor.has_storage() && tensor.storage().device().is_cpu();
  return here ? at::native::_local_scalar_dense_cpu(tensor) : tensor.item();
}

// An argument as Python has it: a dtype is an integer to the dispatcher, and an object to Python.
inline py::object to_python(const c10::Argument& argument, const c10::IValue& value) {
  if (is_number(value)) return torch::jit::toPyObject(c10::IValue(number_of(value)));
  if (value.isInt() && argument.real_type()->kind() == c10::TypeKind::ScalarTypeType) {
    return py::reinterpret_borrow<py::object>(
        reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<c10::ScalarType>(value.toInt()))));
  }
  if (value.isInt() && argument.real_type()->kind() == c10::TypeKind::OptionalType &&
      argument.real_type()->castRaw<c10::OptionalType>()->getElementType()->kind() ==
          c10::TypeKind::ScalarTypeType) {
    return py::reinterpret_borrow<py::object>(
        reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<c10::ScalarType>(value.toInt()))));
  }
  return torch::jit::toPyObject(value);
}

// Positional and keyword arguments as a dispatch mode gets them: defaults are left out.
inline std::pair<py::list, py::dict> python_arguments(
    const c10::FunctionSchema& schema,
    const c10::IValue* values,
    size_t at_least = 0) {
  const auto& arguments = schema.arguments();
  size_t positional = 0, last = at_least;
  auto is_default = [&](size_t i) {
    const auto& standard = arguments[i].default_value();
    return standard.has_value() && !values[i].isTensor() && *standard == values[i];
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].kwarg_only()) break;
    positional = i + 1;
    if (i >= last && !is_default(i)) last = i + 1;
  }
  last = std::min(last, positional);
  py::list args;
  py::dict kwargs;
  for (size_t i = 0; i < last; ++i) args.append(to_python(arguments[i], values[i]));
  for (size_t i = positional; i < arguments.size(); ++i) {
    if (!is_default(i)) kwargs[arguments[i].name().c_str()] = to_python(arguments[i], values[i]);
  }
  return {std::move(args), std::move(kwargs)};
}

// One `Ref` for each input. Made once, as Python identifies blank memory by its ref.
inline PyObject* refs_of(Operation* op) {
  if (op->refs != nullptr) return op->refs;
  Owned list(checked(PyList_New(0)));
  for (const Input& input : op->inputs) {
    Owned ref(new_ref(object_of(input.value), input.geometry));
    if (input.value == nullptr) {
      put_new(ref.get(), layout.ref_blank, py::make_tuple(input.blank(), input.device).ptr());
    }
    if (PyList_Append(list.get(), ref.get()) < 0) throw py::error_already_set();
  }
  return op->refs = list.release();
}

inline PyObject* operation_refs(PyObject* self, void*) {
  auto* op = as<Operation>(self);
  return leave_error([&] {
    Owned list(checked(PyList_New(0)));
    for (size_t i = 0; i < op->inputs.size(); ++i) {
      if (op->inputs[i].scratch()) continue;
      PyObject* ref = PyList_GET_ITEM(refs_of(op), static_cast<Py_ssize_t>(i));
      if (PyList_Append(list.get(), ref) < 0) throw py::error_already_set();
    }
    return list.release();
  });
}

// A Python weak reference to a value; a dead one if the value is gone.
inline Owned python_weak(const Weak& value) {
  if (value.get() != nullptr) return Owned(checked(PyWeakref_NewRef(value.get(), nullptr)));
  static PyObject* to_nothing = [] {
    Owned gone(object_of(new_value(nullptr, 0, Py_None, -1)));
    return checked(PyWeakref_NewRef(gone.get(), nullptr));
  }();
  return Owned(Py_NewRef(to_nothing));
}

// Add (of, weak reference to the value) to a list.
inline void append_link(PyObject* list, PyObject* of, const Weak& value) {
  Owned weak = python_weak(value);
  Owned pair(checked(PyTuple_Pack(2, of, weak.get())));
  if (PyList_Append(list, pair.get()) < 0) throw py::error_already_set();
}

// [(position in the flattened result, weak reference to the value made)]
inline PyObject* operation_outputs(PyObject* self, void*) {
  return leave_error([&] {
    Owned list(checked(PyList_New(0)));
    for (const Output& output : as<Operation>(self)->outputs) {
      Owned place(PyLong_FromLong(output.place));
      append_link(list.get(), place.get(), output.value);
    }
    return list.release();
  });
}

// [(ref, weak reference to the value it becomes)]
inline PyObject* operation_writes(PyObject* self, void*) {
  auto* op = as<Operation>(self);
  return leave_error([&] {
    Owned list(checked(PyList_New(0)));
    for (const Write& write : op->rare().writes) {
      PyObject* ref = PyList_GET_ITEM(refs_of(op), static_cast<Py_ssize_t>(write.input));
      append_link(list.get(), ref, write.value);
    }
    return list.release();
  });
}

// [(generator, its state before)]
inline PyObject* operation_draws(PyObject* self, void*) {
  auto* op = as<Operation>(self);
  return leave_error([&] {
    py::list draws;
    if (op->rare().drawn.defined()) draws.append(draw_of(op->rare().drawn));
    return draws.release().ptr();
  });
}

// (args, kwargs) with a `Ref` in place of each tensor, as the Python recorder records them.
inline std::pair<py::list, py::dict> operation_arguments(Operation* op) {
  const auto& arguments = op->op.schema().arguments();
  size_t at_least = 0;
  auto given = [&](int place) {
    if (!arguments[place].kwarg_only()) at_least = std::max(at_least, static_cast<size_t>(place) + 1);
  };
  for (const Input& input : op->inputs) given(input.argument);
  for (const TensorList& list : op->rare().lists) given(list.argument);
  auto [args, kwargs] = python_arguments(op->op.schema(), op->arguments.data(), at_least);
  auto set = [&args = args, &kwargs = kwargs, &arguments](int place, const py::object& value) {
    if (arguments[place].kwarg_only()) {
      kwargs[arguments[place].name().c_str()] = value;
    } else {
      args[place] = value;
    }
  };
  std::vector<py::list> lists;
  for (const TensorList& list : op->rare().lists) {
    lists.emplace_back(list.count);
    for (int item = 0; item < list.count; ++item) lists.back()[item] = py::none();
    set(list.argument, lists.back());
  }
  PyObject* refs = refs_of(op);
  for (size_t n = 0; n < op->inputs.size(); ++n) {
    const Input& input = op->inputs[n];
    auto ref = py::reinterpret_borrow<py::object>(
        PyList_GET_ITEM(refs, static_cast<Py_ssize_t>(n)));
    if (input.item < 0) {
      set(input.argument, ref);
      continue;
    }
    for (size_t i = 0; i < lists.size(); ++i) {
      if (op->rare().lists[i].argument == input.argument) lists[i][input.item] = ref;
    }
  }
  return {std::move(args), std::move(kwargs)};
}

inline PyObject* operation_args(PyObject* self, void*) {
  return leave_error([&] {
    return operation_arguments(as<Operation>(self)).first.release().ptr();
  });
}

inline PyObject* operation_kwargs(PyObject* self, void*) {
  return leave_error([&] {
    return operation_arguments(as<Operation>(self)).second.release().ptr();
  });
}

inline PyObject* operation_ambient(PyObject* self, void*) {
  return Py_NewRef(or_none(as<Operation>(self)->ambient));
}

inline PyObject* operation_default_dtype(PyObject* self, void*) {
  return Py_NewRef(object_of(torch::getTHPDtype(as<Operation>(self)->default_dtype)));
}

inline PyObject* operation_threads(PyObject* self, void*) {
  return PyLong_FromLong(as<Operation>(self)->threads);
}

inline PyObject* operation_stream(PyObject* self, void*) {
  return python_stream(as<Operation>(self)->stream);
}

inline PyObject* operation_casting(PyObject* self, void*) {
  const Casting* casting = as<Operation>(self)->casting;
  return Py_NewRef(casting == nullptr ? Py_None : casting->tuple);
}

inline PyObject* operation_seconds(PyObject*, void*) { return PyFloat_FromDouble(0.0); }

inline PyObject* operation_facts(PyObject* self, void*) {
  return Py_NewRef(as<Operation>(self)->fact->facts);
}

// `Operation.values`: what a replay reads.
inline PyObject* operation_values(PyObject* self, PyObject*) {
  Owned list(PyList_New(0));
  for (const Input& input : as<Operation>(self)->inputs) {
    if (input.value == nullptr) continue;
    if (list.get() == nullptr || PyList_Append(list.get(), object_of(input.value)) < 0) {
      return nullptr;
    }
  }
  return list.release();
}

// `Operation.made`: the values still in use that a replay makes.
inline PyObject* operation_made(PyObject* self, PyObject*) {
  Owned list(PyList_New(0));
  auto add = [&](const Weak& value) {
    return value.get() == nullptr ||
        (list.get() != nullptr && PyList_Append(list.get(), value.get()) == 0);
  };
  auto* op = as<Operation>(self);
  for (const Output& output : op->outputs) {
    if (!add(output.value)) return nullptr;
  }
  for (const Write& write : op->rare().writes) {
    if (!add(write.value)) return nullptr;
  }
  return list.release();
}

inline void operation_delete(PyObject* self) {
  leave<Operation>(self);
  auto* op = as<Operation>(self);
  PyObject *ambient = op->ambient, *refs = op->refs;
  c10::SmallVector<Value*, 4> read;
  for (const Input& input : op->inputs) read.push_back(input.value);
  free_record<Operation>(self);
  for (Value* value : read) give_up(object_of(value));
  Py_XDECREF(refs);
  Py_XDECREF(ambient);
}

inline PyGetSetDef operation_getset[] = {
    {"facts", operation_facts, nullptr},
    {"refs", operation_refs, nullptr},
    {"args", operation_args, nullptr},
    {"kwargs", operation_kwargs, nullptr},
    {"ambient", operation_ambient, nullptr},
    {"casting", operation_casting, nullptr},
    {"default_dtype", operation_default_dtype, nullptr},
    {"threads", operation_threads, nullptr},
    {"stream", operation_stream, nullptr},
    {"outputs", operation_outputs, nullptr},
    {"writes", operation_writes, nullptr},
    {"draws", operation_draws, nullptr},
    {"seconds", operation_seconds, nullptr},
    {"sequence", get_number<Operation, &Operation::sequence>, nullptr},
    {"grad_mode", get_flag<Operation, &Operation::grad_mode>, nullptr},
    {"flushes", get_flag<Operation, &Operation::flushes>, nullptr},
    {}};

inline PyMethodDef operation_methods[] = {
    {"values", operation_values, METH_NOARGS, nullptr},
    {"made", operation_made, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

inline PyType_Slot operation_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(operation_delete)},
    {Py_tp_getset, operation_getset},
    {Py_tp_methods, operation_methods},
    {Py_tp_members, record_members},
    {0, nullptr}};

inline PyType_Spec operation_spec = {
    "lowtide.compiled.Operation",
    record_size<Operation>,
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    operation_slots};

}  // namespace lowtide

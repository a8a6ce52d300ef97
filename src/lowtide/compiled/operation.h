// One operator call as it can be run again, held ready for the dispatcher.
//
// Problem: turning Python arguments into a boxed call costs more than most small kernels. Invariant:
// to Python this is an `Operation` with the same attributes; the arguments stay the dispatcher's own
// values, with nothing in place of each tensor. Only operators that read and make tensors are kept
// this way, or write tensors that they are given: the others are Python `RareOperation`s. Rejected: keeping the tensors
// themselves, which would keep all activations in memory.
#pragma once

#include "objects.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <optional>

namespace lowtide {

using Stack = torch::jit::Stack;

// A tensor among the arguments.
struct Input {
  PyObject* value;  // owned; null: memory that the operation overwrites entirely
  int32_t argument;
  int32_t item;  // place in a list of tensors, or -1
  Geometry geometry;
  bool scratch = false;  // stands in for running statistics, which a replay must not move
  int64_t blank = 0;     // bytes of the fresh memory in place of a value
  c10::Device device = c10::Device(c10::kCPU);
};

// An argument that the operation writes, by its place among the inputs.
struct Write {
  size_t input;
  PyObject* value;  // a weak reference to what it becomes, owned
};

// A list of tensors among the arguments.
struct TensorList {
  int32_t argument;
  int32_t count;
  bool optional;  // its items may be missing
};

struct Operation {
  PyObject_HEAD
  PyObject* weak_list;
  PyObject* facts;
  PyObject* ambient;  // null: does not matter
  PyObject* refs;     // a list, once Python has asked for it
  PyObject* outputs;  // a list of (place, weak reference to a value)
  int64_t sequence;
  bool grad_mode;
  // What follows is constructed in place.
  c10::OperatorHandle op;
  c10::SmallVector<c10::IValue, 8> arguments;
  c10::SmallVector<Input, 3> inputs;
  std::vector<TensorList> lists;
  std::vector<Write> writes;
  c10::SmallVector<int32_t, 2> numbers;  // arguments that were Python numbers in place of a tensor
  at::Generator drawn;  // a copy of the CPU generator as it was before, where the operation draws
  std::optional<c10::Stream> stream;  // of a device that has streams
};

inline PyTypeObject* operation_type;

inline bool is_compiled_operation(PyObject* object) { return Py_IS_TYPE(object, operation_type); }

inline Operation* new_operation(const c10::OperatorHandle& op) {
  auto* made = PyObject_New(Operation, operation_type);
  if (made == nullptr) throw py::error_already_set();
  made->weak_list = made->facts = made->ambient = made->refs = made->outputs = nullptr;
  new (&made->op) c10::OperatorHandle(op);
  new (&made->arguments) c10::SmallVector<c10::IValue, 8>();
  new (&made->inputs) c10::SmallVector<Input, 3>();
  new (&made->lists) std::vector<TensorList>();
  new (&made->writes) std::vector<Write>();
  new (&made->numbers) c10::SmallVector<int32_t, 2>();
  new (&made->drawn) at::Generator();
  new (&made->stream) std::optional<c10::Stream>();
  return made;
}

// Chains of values and operations are long; the values' own deallocator bounds the recursion.
inline void delete_operation(PyObject* self) {
  auto* op = reinterpret_cast<Operation*>(self);
  if (op->weak_list != nullptr) PyObject_ClearWeakRefs(self);
  Py_XDECREF(op->facts);
  Py_XDECREF(op->ambient);
  Py_XDECREF(op->refs);
  Py_XDECREF(op->outputs);
  for (Input& input : op->inputs) Py_XDECREF(input.value);
  for (Write& write : op->writes) Py_XDECREF(write.value);
  op->drawn.~Generator();
  op->numbers.~SmallVector();
  op->writes.~vector();
  op->lists.~vector();
  op->inputs.~SmallVector();
  op->arguments.~SmallVector();
  op->stream.~optional();
  op->op.~OperatorHandle();
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

// ---------------------------------------------------------------------- as Python sees it

// The Python objects that stand for dispatcher arguments, with what it takes for the names that
// Python has for some integers.
inline bool is_number(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
      value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

inline py::object to_python(const c10::Argument& argument, const c10::IValue& value) {
  if (is_number(value)) return torch::jit::toPyObject(c10::IValue(value.toTensor().item()));
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

// Positional and keyword arguments as a dispatch mode is given them: defaults are left out.
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

// One `Ref` for each input. They are made once: Python tells blank memory by the ref's identity.
inline PyObject* refs_of(Operation* op) {
  if (op->refs != nullptr) return op->refs;
  Owned list(checked(PyList_New(0)));
  for (const Input& input : op->inputs) {
    Owned ref(new_ref(input.value == nullptr ? Py_None : input.value, input.geometry));
    if (input.value == nullptr) {
      py::tuple blank = py::make_tuple(input.blank, input.device);
      put(ref.get(), layout.ref_blank, blank.release().ptr());
    }
    if (PyList_Append(list.get(), ref.get()) < 0) throw py::error_already_set();
  }
  return op->refs = list.release();
}

// Run what makes a Python object, and leave its exception to Python.
template <class Make>
PyObject* leave_error(Make make) {
  try {
    return make();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

inline PyObject* operation_refs(PyObject* self, void*) {
  auto* op = reinterpret_cast<Operation*>(self);
  return leave_error([&] {
    Owned list(checked(PyList_New(0)));
    for (size_t i = 0; i < op->inputs.size(); ++i) {
      if (op->inputs[i].scratch) continue;
      PyObject* ref = PyList_GET_ITEM(refs_of(op), static_cast<Py_ssize_t>(i));
      if (PyList_Append(list.get(), ref) < 0) throw py::error_already_set();
    }
    return list.release();
  });
}

// [(ref, weak reference to the value it becomes)]
inline PyObject* operation_writes(PyObject* self, void*) {
  auto* op = reinterpret_cast<Operation*>(self);
  return leave_error([&] {
    Owned list(checked(PyList_New(0)));
    for (const Write& write : op->writes) {
      Owned pair(checked(PyTuple_Pack(2, PyList_GET_ITEM(refs_of(op), write.input), write.value)));
      if (PyList_Append(list.get(), pair.get()) < 0) throw py::error_already_set();
    }
    return list.release();
  });
}

// [(generator, its state before)]
inline PyObject* operation_draws(PyObject* self, void*) {
  auto* op = reinterpret_cast<Operation*>(self);
  return leave_error([&] {
    py::list draws;
    if (op->drawn.defined()) {
      py::object generator = py::module_::import("torch").attr("default_generator");
      draws.append(py::make_tuple(generator, py::cast(op->drawn.get_state())));
    }
    return draws.release().ptr();
  });
}

// (args, kwargs) with a `Ref` in place of each tensor, as the Python recorder writes them.
inline std::pair<py::list, py::dict> operation_arguments(Operation* op) {
  size_t at_least = 0;
  for (const Input& input : op->inputs) {
    at_least = std::max(at_least, static_cast<size_t>(input.argument) + 1);
  }
  for (const TensorList& list : op->lists) {
    at_least = std::max(at_least, static_cast<size_t>(list.argument) + 1);
  }
  auto [args, kwargs] = python_arguments(op->op.schema(), op->arguments.data(), at_least);
  const auto& arguments = op->op.schema().arguments();
  auto set = [&args = args, &kwargs = kwargs, &arguments](int place, const py::object& value) {
    if (arguments[place].kwarg_only()) {
      kwargs[arguments[place].name().c_str()] = value;
    } else {
      args[place] = value;
    }
  };
  std::vector<py::list> lists;
  for (const TensorList& list : op->lists) {
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
      if (op->lists[i].argument == input.argument) lists[i][input.item] = ref;
    }
  }
  return {std::move(args), std::move(kwargs)};
}

inline PyObject* operation_args(PyObject* self, void*) {
  return leave_error([&] {
    return operation_arguments(reinterpret_cast<Operation*>(self)).first.release().ptr();
  });
}

inline PyObject* operation_kwargs(PyObject* self, void*) {
  return leave_error([&] {
    return operation_arguments(reinterpret_cast<Operation*>(self)).second.release().ptr();
  });
}

inline PyObject* operation_ambient(PyObject* self, void*) {
  PyObject* found = reinterpret_cast<Operation*>(self)->ambient;
  return Py_NewRef(found == nullptr ? Py_None : found);
}

inline PyObject* operation_stream(PyObject* self, void*) {
  auto* op = reinterpret_cast<Operation*>(self);
  if (!op->stream) Py_RETURN_NONE;
  return leave_error([&] {
    return py::object(py::module_::import("torch.cuda").attr("Stream")(
                          py::arg("stream_id") = op->stream->id(),
                          py::arg("device_index") = op->stream->device_index(),
                          py::arg("device_type") = static_cast<int64_t>(op->stream->device_type())))
        .release()
        .ptr();
  });
}

inline PyObject* operation_seconds(PyObject*, void*) { return PyFloat_FromDouble(0.0); }

// `Operation.values`: what a replay reads.
inline PyObject* operation_values(PyObject* self, PyObject*) {
  PyObject* list = PyList_New(0);
  for (const Input& input : reinterpret_cast<Operation*>(self)->inputs) {
    if (input.value != nullptr) PyList_Append(list, input.value);
  }
  return list;
}

// `Operation.made`: the values still in use that a replay makes.
inline PyObject* operation_made(PyObject* self, PyObject*) {
  PyObject* list = PyList_New(0);
  PyObject* outputs = reinterpret_cast<Operation*>(self)->outputs;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outputs); ++i) {
    Owned value(target_of(PyTuple_GET_ITEM(PyList_GET_ITEM(outputs, i), 1)));
    if (value.get() != nullptr) PyList_Append(list, value.get());
  }
  for (const Write& write : reinterpret_cast<Operation*>(self)->writes) {
    Owned value(target_of(write.value));
    if (value.get() != nullptr) PyList_Append(list, value.get());
  }
  return list;
}

inline PyGetSetDef operation_getset[] = {
    {"refs", operation_refs, nullptr, nullptr, nullptr},
    {"args", operation_args, nullptr, nullptr, nullptr},
    {"kwargs", operation_kwargs, nullptr, nullptr, nullptr},
    {"ambient", operation_ambient, nullptr, nullptr, nullptr},
    {"stream", operation_stream, nullptr, nullptr, nullptr},
    {"writes", operation_writes, nullptr, nullptr, nullptr},
    {"draws", operation_draws, nullptr, nullptr, nullptr},
    {"seconds", operation_seconds, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

inline PyMethodDef operation_methods[] = {
    {"values", operation_values, METH_NOARGS, nullptr},
    {"made", operation_made, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

inline PyMemberDef operation_members[] = {
    {"facts", T_OBJECT, offsetof(Operation, facts), READONLY, nullptr},
    {"outputs", T_OBJECT, offsetof(Operation, outputs), READONLY, nullptr},
    {"sequence", T_LONGLONG, offsetof(Operation, sequence), READONLY, nullptr},
    {"grad_mode", T_BOOL, offsetof(Operation, grad_mode), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Operation, weak_list), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

inline PyType_Slot operation_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(delete_operation)},
    {Py_tp_getset, operation_getset},
    {Py_tp_methods, operation_methods},
    {Py_tp_members, operation_members},
    {0, nullptr}};

inline PyType_Spec operation_spec = {
    "lowtide.compiled.Operation",
    sizeof(Operation),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    operation_slots};

}  // namespace lowtide

// The compiled part of lowtide: a Python module with the base type of the compiled recorder, and the
// planner's simulator and searches.
//
// Problem: see `recorder.h` and `planning.h`. Invariant: without this module everything works and gives
// the same bits, only slower, and with plans that may cost more; it is built for one version of Python
// and torch and loaded by no other.
// Rejected: pybind11 classes, whose calls cost more than the work behind them.

#include "direct.h"
#include "entry_types.h"
#include "planning.h"
#include "reached.h"
#include "script_types.h"

namespace lowtide {
namespace {

// All that a recorder refers to.
constexpr PyObject* State::*REFERENCES[] = {
    &State::region, &State::table, &State::live, &State::forget, &State::read, &State::newest,
    &State::before, &State::tape, &State::decisions, &State::script, &State::headroom,
    &State::sizes, &State::made, &State::handles, &State::counts, &State::settle, &State::next_step,
    &State::calls};

int traverse(PyObject* self, visitproc visit, void* arg) {
  for (auto field : REFERENCES) Py_VISIT(as<State>(self)->*field);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear(PyObject* self) {
  for (auto field : REFERENCES) Py_CLEAR(as<State>(self)->*field);
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* open(PyObject* self, PyObject*) {
  if (!Py_IS_TYPE(or_none(as<State>(self)->live), box_type) ||
      !Py_IS_TYPE(or_none(as<State>(self)->table), table_type)) {
    PyErr_SetString(PyExc_TypeError, "lowtide: a recorder needs a Table and a Box of live bytes");
    return nullptr;
  }
  auto* state = reinterpret_cast<State*>(self);
  state->outer = current;
  current = state;
  c10::impl::tls_set_dispatch_key_included(KEY, true);
  Py_RETURN_NONE;
}

PyObject* shut(PyObject* self, PyObject*) {
  auto* state = reinterpret_cast<State*>(self);
  if (current != state) Py_RETURN_NONE;  // it was shut before
  current = state->outer;
  state->outer = nullptr;
  if (current == nullptr) c10::impl::tls_set_dispatch_key_included(KEY, false);
  Py_RETURN_NONE;
}

PyObject* pack(PyObject* self, PyObject* tensor) {
  HANDLE_TH_ERRORS
  return pack_tensor(reinterpret_cast<State*>(self), THPVariable_Unpack(tensor));
  END_HANDLE_TH_ERRORS
}

PyMemberDef state_members[] = {
    {"region", T_OBJECT_EX, offsetof(State, region), 0, nullptr},
    {"table", T_OBJECT_EX, offsetof(State, table), 0, nullptr},
    {"live", T_OBJECT_EX, offsetof(State, live), 0, nullptr},
    {"_forget", T_OBJECT_EX, offsetof(State, forget), 0, nullptr},
    {"_read", T_OBJECT, offsetof(State, read), 0, nullptr},
    {"_newest", T_OBJECT, offsetof(State, newest), 0, nullptr},
    {"before", T_OBJECT, offsetof(State, before), 0, nullptr},
    {"tape", T_OBJECT_EX, offsetof(State, tape), 0, nullptr},
    {"decisions", T_OBJECT_EX, offsetof(State, decisions), 0, nullptr},
    {"script", T_OBJECT, offsetof(State, script), 0, nullptr},
    {"headroom", T_OBJECT, offsetof(State, headroom), 0, nullptr},
    {"made", T_OBJECT, offsetof(State, made), 0, nullptr},
    {"handles", T_OBJECT, offsetof(State, handles), 0, nullptr},
    {"sizes", T_OBJECT, offsetof(State, sizes), 0, nullptr},
    {"counts", T_OBJECT, offsetof(State, counts), 0, nullptr},
    {"settle", T_OBJECT, offsetof(State, settle), 0, nullptr},
    {"next_step", T_OBJECT, offsetof(State, next_step), 0, nullptr},
    {"calls", T_OBJECT, offsetof(State, calls), 0, nullptr},
    {"limit", T_LONGLONG, offsetof(State, limit), 0, nullptr},
    {"sequence", T_LONGLONG, offsetof(State, sequence), 0, nullptr},
    {"numbers", T_LONGLONG, offsetof(State, numbers), 0, nullptr},
    {"_group", T_LONGLONG, offsetof(State, group), 0, nullptr},
    {"_gathering", T_LONGLONG, offsetof(State, gathering), 0, nullptr},
    {"_lazy_bits", T_BOOL, offsetof(State, lazy_bits), 0, nullptr},
    {"paused", T_BOOL, offsetof(State, paused), 0, nullptr},
    {"_asks", T_BOOL, offsetof(State, asks), 0, nullptr},
    {"timed", T_BOOL, offsetof(State, timed), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyMethodDef state_methods[] = {
    {"open", open, METH_NOARGS, nullptr},
    {"shut", shut, METH_NOARGS, nullptr},
    {"pack", pack, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot state_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_members, state_members},
    {Py_tp_methods, state_methods},
    {0, nullptr}};

PyType_Spec state_spec = {
    "lowtide.compiled.State",
    sizeof(State),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    state_slots};

// Call `function(*args)` while no recorder sees this thread's operators.
PyObject* aside(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  c10::impl::ExcludeDispatchKeyGuard guard(KEY);
  Owned rest(PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args)));
  return PyObject_CallObject(PyTuple_GET_ITEM(args, 0), rest.get());
  END_HANDLE_TH_ERRORS
}

// The recorder that is open on this thread, or None.
PyObject* current_recorder(PyObject*, PyObject*) {
  return Py_NewRef(current == nullptr ? Py_None : reinterpret_cast<PyObject*>(current));
}

// `states` of `lowtide/tape/leafstates.py`, for a tuple of weak references.
PyObject* leaf_states(PyObject*, PyObject* leaves) {
  HANDLE_TH_ERRORS
  if (!PyTuple_Check(leaves)) throw py::type_error("lowtide: a tuple of weak references is looked at");
  Py_ssize_t count = PyTuple_GET_SIZE(leaves);
  Owned states(checked(PyBytes_FromStringAndSize(nullptr, count)));
  char* state = PyBytes_AS_STRING(states.get());
  for (Py_ssize_t i = 0; i < count; ++i) {
    Owned leaf(target_of(PyTuple_GET_ITEM(leaves, i)));
    if (leaf.get() == nullptr) {
      state[i] = 0;
      continue;
    }
    const at::Tensor& tensor = THPVariable_Unpack(leaf.get());
    bool gradient = tensor.unsafeGetTensorImpl()->grad().defined() && tensor.is_leaf();
    state[i] = static_cast<char>(1 + 2 * tensor.requires_grad() + 4 * gradient);
  }
  return states.release();
  END_HANDLE_TH_ERRORS
}

// The version counter of a tensor: `Counter` of `lowtide/_compat/tensors.py`.
PyObject* counter_of(PyObject*, PyObject* tensor) {
  if (!THPVariable_Check(tensor)) {
    PyErr_SetString(PyExc_TypeError, "lowtide: a tensor has a version counter");
    return nullptr;
  }
  return leave_error([&] { return new_counter(THPVariable_Unpack(tensor)); });
}

PyObject* same_counter_of(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *one, *other;
  if (!PyArg_UnpackTuple(args, "same_counter", 2, 2, &one, &other)) return nullptr;
  return PyBool_FromLong(same_counter(THPVariable_Unpack(one), THPVariable_Unpack(other)));
  END_HANDLE_TH_ERRORS
}

// Whether a tensor's node is up to date: not so for a view whose base was written since.
PyObject* is_current(PyObject*, PyObject* tensor) {
  if (!THPVariable_Check(tensor)) {
    PyErr_SetString(PyExc_TypeError, "lowtide: a tensor has a node");
    return nullptr;
  }
  const at::Tensor& view = THPVariable_Unpack(tensor);
  auto* meta = torch::autograd::impl::get_view_autograd_meta(view);
  bool is_view = meta != nullptr && meta->has_bw_view();
  return PyBool_FromLong(!is_view || meta->get_attr_version() == version_of(view));
}

// How many values, operations and handles are alive: Python's garbage collector does not list them.
PyObject* count_records(PyObject*, PyObject*) { return PyLong_FromLongLong(records_alive); }

// How many tensors autograd has handed to `hooks.h` without a call into Python.
PyObject* count_direct(PyObject*, PyObject*) { return PyLong_FromLongLong(packed_directly); }

// (from, to): both CPU generators.
PyObject* copy_state(PyObject*, PyObject* arguments) {
  return leave_error([&]() -> PyObject* {
    auto pair = py::reinterpret_borrow<py::tuple>(arguments);
    auto from = pair[0].cast<at::Generator>(), to = pair[1].cast<at::Generator>();
    std::lock_guard<std::mutex> lock(to.mutex());
    CpuState::of(on_cpu(from)).put(on_cpu(to));
    Py_RETURN_NONE;
  });
}

PyMethodDef functions[] = {
    {"copy_generator", copy_state, METH_VARARGS, nullptr},
    {"counter_of", counter_of, METH_O, nullptr},
    {"count_direct", count_direct, METH_NOARGS, nullptr},
    {"count_records", count_records, METH_NOARGS, nullptr},
    {"is_current", is_current, METH_O, nullptr},
    {"reached", reached, METH_NOARGS, nullptr},
    {"same_counter", same_counter_of, METH_VARARGS, nullptr},
    {"leaf_states", leaf_states, METH_O, nullptr},
    {"current_recorder", current_recorder, METH_NOARGS, nullptr},
    {"unpack", unpack, METH_O, nullptr},
    {"unpack_through", unpack_through, METH_O, nullptr},
    {"aside", aside, METH_VARARGS, nullptr},
    {"anneal", planner::anneal, METH_VARARGS, nullptr},
    {"minimum_cut", planner::minimum_cut, METH_VARARGS, nullptr},
    {"prices", planner::prices, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_lowtide_core", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

PyObject* forever(const char* module, const char* name) {
  return py::object(py::module_::import(module).attr(name)).release().ptr();
}

// Views for which our key falls through in the dispatcher, so that they are not boxed: a transformer has
// three for each recorded operation. Only views whose kernels call nothing but other views; the fallback
// itself does not record the rest.
constexpr std::array<std::pair<const char*, const char*>, 22> PASSED_BY = {{
    {"aten::view", ""},           {"aten::_unsafe_view", ""},   {"aten::_reshape_alias", ""},
    {"aten::as_strided", ""},     {"aten::transpose", "int"},   {"aten::t", ""},
    {"aten::permute", ""},        {"aten::expand", ""},         {"aten::squeeze", ""},
    {"aten::squeeze", "dim"},     {"aten::squeeze", "dims"},    {"aten::unsqueeze", ""},
    {"aten::slice", "Tensor"},    {"aten::select", "int"},      {"aten::split", "Tensor"},
    {"aten::split_with_sizes", ""}, {"aten::unbind", "int"},    {"aten::diagonal", ""},
    {"aten::unfold", ""},         {"aten::alias", ""},          {"aten::detach", ""},
    {"aten::view", "dtype"},
}};

// For the life of the process. Raises if something else has registered a fallback for the key.
void take_key() {
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto* registrations = new std::vector<c10::RegistrationHandleRAII>();
  registrations->push_back(dispatcher.registerFallback(
      KEY, c10::KernelFunction::makeFromBoxedFunction<&fallback>(), "lowtide"));
  for (auto [name, overload] : PASSED_BY) {
    if (!dispatcher.findSchema({name, overload})) continue;
    registrations->push_back(dispatcher.registerImpl(
        {name, overload}, KEY, c10::KernelFunction::makeFallthrough(), std::nullopt, nullptr, "lowtide"));
  }
}

PyTypeObject* type_of(PyType_Spec& spec, PyObject* bases = nullptr) {
  return as<PyTypeObject>(checked(PyType_FromSpecWithBases(&spec, bases)));
}

// Make the types, and add those that Python uses to the module.
void add_types(PyObject* module) {
  counter_type = type_of(counter_spec);
  operation_type = type_of(operation_spec);
  script_type = type_of(script_spec);
  state_type = type_of(state_spec);
  value_type = type_of(value_spec);
  handle_type = type_of(handle_spec);
  entry_type = type_of(entry_spec, object_of(&_PyWeakref_RefType));
  box_type = type_of(box_spec);
  calls_type = type_of(calls_spec);
  headroom_type = type_of(headroom_spec);
  forget_type = type_of(forget_spec);
  table_type = type_of(table_spec);
  weak_list_type = type_of(weak_list_spec);
  watched_type = type_of(watched_spec);
  planner::simulated_type = type_of(planner::simulated_spec);
  std::pair<const char*, PyTypeObject*> named[] = {
      {"State", state_type}, {"Script", script_type}, {"Operation", operation_type},
      {"Value", value_type}, {"Handle", handle_type}, {"Entry", entry_type}, {"Box", box_type},
      {"Calls", calls_type}, {"Headroom", headroom_type},
      {"Forget", forget_type}, {"Table", table_type}, {"WeakList", weak_list_type},
      {"Simulator", planner::simulated_type}};
  for (auto [name, type] : named) PyModule_AddObjectRef(module, name, object_of(type));
}

PyObject* make_module() {
  find_layout(py::module_::import("lowtide.tape.values"), py::module_::import("lowtide.tape.tape"));
  torch_size = forever("torch", "Size");
  facts_of_function = forever("lowtide.tape.operators", "facts_of");
  ambient_function = forever("lowtide._compat.switches", "ambient");
  trials_module = py::module_::import("lowtide.tape.trials").release().ptr();
  devices_names = Py_NewRef(PyModule_GetDict(py::module_::import("lowtide._compat.devices").ptr()));
  casting_function = forever("lowtide._compat.casting", "casting_now");
  seen_name = interned("accelerator_seen");
  overwriting_function = forever("lowtide.tape.watch", "overwriting");
  out_of_memory_error = forever("torch", "OutOfMemoryError");
  python_unpack = forever("lowtide.replay", "unpack");
  keep_from_leaves_function = forever("lowtide._compat.leafgrads", "keep_from_leaves");
  pieces_type = forever("lowtide.tape.pieces", "Pieces");
  python_run = forever("lowtide.replay", "run");
  draws_lock = forever("lowtide.tape.generators", "lock");
  python_lost = forever("lowtide.replay", "_lost");
  python_free_later = forever("lowtide.tape.retained", "free_later");
  python_free_passed = forever("lowtide.tape.retained", "free_passed");
  listeners = forever("lowtide.replay", "listeners");
  Owned module(checked(PyModule_Create(&definition)));
  add_types(module.get());
  watched = as<Watched>(checked(PyObject_CallNoArgs(object_of(watched_type))));
  PyModule_AddObjectRef(module.get(), "watched", object_of(watched));
  PyModule_AddObjectRef(module.get(), "Ref", object_of(layout.ref));  // tells for which import it is
  PyModule_AddIntConstant(module.get(), "KEY", static_cast<long>(KEY));
  take_key();
  variable_class = forever("torch.autograd", "Variable");
  unpack_function = checked(PyObject_GetAttrString(module.get(), "unpack"));
  pack_function = pack;
  stand_before_the_engine();
  return module.release();
}

}  // namespace
}  // namespace lowtide

PyMODINIT_FUNC PyInit__lowtide_core() {
  HANDLE_TH_ERRORS
  return lowtide::make_module();
  END_HANDLE_TH_ERRORS
}

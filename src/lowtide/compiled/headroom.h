// What a step may take at most, added up call by call.
//
// Problem: a step that no plan covers is watched in Python, ten times as long as its small kernels take,
// although most such steps are below their limit. Invariant: the sum is at least what the forward holds and
// its backward has beside it: the gradients that there are at once (`gradients.h`), each leaf's, and the most
// that a single node takes beside them. What cannot be counted so (a custom Function) makes the sum endless.
// Rejected: adding up what each node takes, which counts the gradient of a recurrent layer's weights once for
// each time step.
#pragma once

#include "gradients.h"
#include "script.h"

#include <cstring>
#include <limits>

namespace lowtide {

// What a call takes at most, in bytes.
struct CallCost {
  int64_t made = 0;   // of its results
  int64_t need = 0;   // while it runs, its results included
  int64_t later = 0;  // while its backward runs
};

// The calls that were met so far, by what they are given.
inline ska::flat_hash_map<uint64_t, CallCost>& known_costs() {
  static auto* costs = new ska::flat_hash_map<uint64_t, CallCost>();
  return *costs;
}

constexpr size_t MOST_COSTS = 1 << 16;

// One operation of the step, as in `OpLog`.
struct Ran {
  PyObject* name;  // interned, or owned by `Headroom::names`
  std::vector<int64_t> sizes, reads, outputs, overwrites;
  int64_t wanted, live;
  int64_t need = 0, later = 0;  // as in `CallCost`
};

// To Python: `Headroom(limit, outside, start, leaves)`.
struct Headroom {
  PyObject_HEAD
  int64_t limit;    // bytes that the step may take
  double outside;   // what a loss outside of the context takes, as a share of what is live
  int64_t start;    // what the backward of its first operations takes beside the gradients of `leaves`
  Gradients gradients;
  std::vector<Ran> ran;
  std::vector<PyObject*> names;
};

inline PyTypeObject* headroom_type;

inline Headroom* headroom_of(const State* state) {
  bool has = state->headroom != nullptr && Py_IS_TYPE(state->headroom, headroom_type);
  return has ? reinterpret_cast<Headroom*>(state->headroom) : nullptr;
}

constexpr int64_t COUNTS = 50;  // gradients are counted again once they may have grown by a 50th of the limit

// What the step takes at most, if so many bytes are live: counted anew if that may decide something.
inline int64_t total(Headroom* room, int64_t live, bool decides) {
  Gradients& gradients = room->gradients;
  if (gradients.endless) return std::numeric_limits<int64_t>::max();
  auto outside = static_cast<int64_t>(room->outside * static_cast<double>(live));
  int64_t rest = live + outside + room->start + gradients.leaves;
  if (gradients.mixed || (in_backward() && !releases_gradients())) {
    return rest + gradients.leaves + gradients.sum + gradients.busiest;
  }
  bool over = rest + gradients.known() > room->limit;
  if (decides || (over && gradients.known() - gradients.at_once >= room->limit / COUNTS)) gradients.count();
  return rest + gradients.known();
}

// Whether a call looks rows up in a table.
inline bool may_be_sparse(const c10::OperatorHandle& op) {
  return op.operator_name().name.find("embedding") != std::string::npos;
}

inline uint64_t node_number(const at::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  auto* meta = static_cast<torch::autograd::AutogradMeta*>(tensor.unsafeGetTensorImpl()->autograd_meta());
  return meta == nullptr || meta->grad_fn_ == nullptr ? 0 : 1 + meta->grad_fn_->sequence_nr();
}

// Whether an operation that runs without grad may do so in the forward of a custom Function, whose node is
// made before that: the newest node is new, and not that of a view that the operation reads.
inline bool may_be_function(const Headroom* room, const c10::IValue* values, size_t arguments) {
  uint64_t next = at::sequence_number::peek();
  if (next == room->gradients.last) return false;
  auto newest = [&](const c10::IValue& value) { return value.isTensor() && node_number(value.toTensor()) == next; };
  for (size_t i = 0; i < arguments; ++i) {
    if (newest(values[i])) return false;
    if (!values[i].isTensorList()) continue;
    auto items = values[i].toListRef();
    if (std::any_of(items.begin(), items.end(), newest)) return false;
  }
  return true;
}

// ---------------------------------------------------------------------- calls

// What is known of a call that is about to run; none: nothing yet. `digest`: 0 if nothing is to be known. A
// copy: before it is used, Python may let another thread add calls.
inline std::optional<CallCost> cost_of(const c10::OperatorHandle& op, const Stack& stack, uint64_t& digest) {
  Digest looked = digest_of(std::numeric_limits<uint64_t>::max(), op, stack);
  looked.add(static_cast<uint64_t>(at::get_num_threads()));  // each has a scratchpad
  digest = looked.known ? looked.number : 0;
  auto found = known_costs().find(digest);
  if (found == known_costs().end()) return {};
  return found->second;
}

// `StepDecisions.before_alone`: an unknown call, or one without room, is about to run.
inline void look_at_room(
    State* state, const Fact& fact, const c10::OperatorHandle& op, const c10::IValue* values,
    const std::optional<CallCost>& known) {
  static PyObject* name = interned("before_alone");
  auto [args, kwargs] = python_arguments(op.schema(), values);
  Owned func(Py_NewRef(torch::detail::getTorchApiFunction(op).ptr()));
  py::tuple positional(args);
  Owned need(known ? checked(PyLong_FromLongLong(known->need)) : Py_NewRef(Py_None));
  PyObject* arguments[] = {state->decisions, fact.facts, func.get(), positional.ptr(), kwargs.ptr(), need.get()};
  Owned done(checked(PyObject_VectorcallMethod(name, arguments, 6, nullptr)));
}

// The step may take more than its limit, or does what is not counted: from here on, it is watched.
inline void ends_alone(State* state) {
  static PyObject* name = interned("watch_from_here");
  Owned done(checked(PyObject_CallMethodNoArgs(state->decisions, name)));
}

// `StepDecisions.cost_of`: for a call that was not met before, or makes more than it did then.
inline CallCost asked_cost(
    State* state, const Fact& fact, const c10::OperatorHandle& op, const c10::IValue* values, int64_t made) {
  static PyObject* name = interned("cost_of");
  auto [args, kwargs] = python_arguments(op.schema(), values);
  Owned func(Py_NewRef(torch::detail::getTorchApiFunction(op).ptr()));
  Owned bytes(checked(PyLong_FromLongLong(made)));
  py::tuple positional(args);
  PyObject* arguments[] = {state->decisions, fact.facts, func.get(), positional.ptr(), kwargs.ptr(), bytes.get()};
  Owned pair(checked(PyObject_VectorcallMethod(name, arguments, 6, nullptr)));
  auto [need, later] = py::cast<std::pair<int64_t, int64_t>>(py::handle(pair.get()));
  return {made, need, later};
}

// `StepDecisions.produced` for an operation of a step that is not watched.
inline void count_call(
    State* state, Headroom* room, const Fact& fact, const c10::OperatorHandle& called, const Operation* op,
    const Made& made, const c10::IValue* values, size_t arguments, uint64_t digest) {
  Ran ran{fact.name, {}, {}, {}, {}, op->wanted, as<Box>(state->live)->number};
  int64_t bytes = 0;
  for (Value* value : made) {
    add_weak(state->made, object_of(value));
    ran.sizes.push_back(value->nbytes);
    ran.outputs.push_back(value->number);
    bytes += value->nbytes;
  }
  for (const Input& input : op->inputs) {
    if (!input.scratch()) ran.reads.push_back(input.value == nullptr ? -1 : input.value->number);
  }
  for (const Write& write : op->rare().writes) {
    const Value* written = op->inputs[write.input].value;
    if (written != nullptr && written->number >= 0) ran.overwrites.push_back(written->number);
  }
  if (op->wanted > 0 && !op->grad_mode && may_be_function(room, values, arguments)) {
    room->gradients.endless = true;
  }
  auto& costs = known_costs();
  auto known = costs.find(digest);
  CallCost cost = known == costs.end() ? CallCost{-1} : known->second;
  if (cost.made < bytes) {
    cost = asked_cost(state, fact, called, values, bytes);
    if (costs.size() >= MOST_COSTS) costs.clear();
    if (digest != 0) costs[digest] = cost;
  }
  ran.need = cost.need;
  if (op->grad_mode && op->wanted > 0) {
    int64_t passing = 0;
    room->gradients.sparse = may_be_sparse(called);
    for (size_t i = 0; i < arguments; ++i) passing += count_gradients(room->gradients, values[i]);
    room->gradients.sparse = false;
    ran.later = cost.later + passing;
    room->gradients.works(ran.later);
  }
  room->ran.push_back(std::move(ran));
  if (total(room, as<Box>(state->live)->number, false) > room->limit) ends_alone(state);
}

// ---------------------------------------------------------------------- as Python sees it

inline PyObject* new_headroom(PyTypeObject* type, PyObject* args, PyObject*) {
  long long limit, start;
  double outside;
  PyObject* leaves;
  if (!PyArg_ParseTuple(args, "LdLO!", &limit, &outside, &start, &PyList_Type, &leaves)) return nullptr;
  Owned made(type->tp_alloc(type, 0));
  if (made.get() == nullptr) return nullptr;
  auto* room = as<Headroom>(made.get());
  new (&room->gradients) Gradients();
  new (&room->ran) std::vector<Ran>();
  new (&room->names) std::vector<PyObject*>();
  room->limit = limit;
  room->outside = outside;
  room->start = start;
  room->gradients.last = at::sequence_number::peek();
  return leave_error([&] {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leaves); ++i) {
      PyObject* leaf = PyList_GET_ITEM(leaves, i);
      if (THPVariable_Check(leaf)) count_leaf(room->gradients, THPVariable_Unpack(leaf), false);
    }
    return made.release();
  });
}

inline void delete_headroom(PyObject* self) {
  auto* room = as<Headroom>(self);
  for (PyObject* name : room->names) Py_DECREF(name);
  room->gradients.~Gradients();
  room->ran.~vector();
  room->names.~vector();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// seen(first): [(signature, outputs, overwrites, live, need, later)] of the operations from there on, see `Ran`.
inline PyObject* headroom_seen(PyObject* self, PyObject* first) {
  return leave_error([&] {
    Owned list(checked(PyList_New(0)));
    const auto& all = as<Headroom>(self)->ran;
    for (auto at = static_cast<size_t>(integer(first)); at < all.size(); ++at) {
      const Ran& ran = all[at];
      Owned sizes = tuple_of(ran.sizes), reads = tuple_of(ran.reads);
      Owned outputs = tuple_of(ran.outputs), overwrites = tuple_of(ran.overwrites);
      Owned item(checked(Py_BuildValue(
          "(OOOL)OOLLL", ran.name, sizes.get(), reads.get(), static_cast<long long>(ran.wanted), outputs.get(),
          overwrites.get(), static_cast<long long>(ran.live), static_cast<long long>(ran.need),
          static_cast<long long>(ran.later))));
      if (PyList_Append(list.get(), item.get()) < 0) throw py::error_already_set();
    }
    return list.release();
  });
}

// note((signature, outputs, overwrites, live, need, later), tensors, grad_mode): an operation that Python has
// recorded.
inline PyObject* headroom_note(PyObject* self, PyObject* args) {
  PyObject *name, *sizes, *reads, *outputs, *overwrites, *tensors;
  long long wanted, live, need, later;
  int grad;
  auto* tuple = &PyTuple_Type;
  if (!PyArg_ParseTuple(args, "((OO!O!L)O!O!LLL)O!p", &name, tuple, &sizes, tuple, &reads, &wanted, tuple, &outputs,
                        tuple, &overwrites, &live, &need, &later, &PyList_Type, &tensors, &grad)) {
    return nullptr;
  }
  return leave_error([&] {
    auto* room = as<Headroom>(self);
    room->names.push_back(Py_NewRef(name));
    Ran ran{name, numbers_in(sizes), numbers_in(reads), numbers_in(outputs), numbers_in(overwrites), wanted, live,
            need};
    if (wanted > 0 && !grad && at::sequence_number::peek() != room->gradients.last) room->gradients.endless = true;
    if (wanted > 0 && grad) {
      int64_t passing = 0;
      room->gradients.sparse = std::strstr(PyUnicode_AsUTF8(name), "embedding") != nullptr;
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
        passing += count_gradients(room->gradients, THPVariable_Unpack(PyList_GET_ITEM(tensors, i)));
      }
      room->gradients.sparse = false;
      ran.later = later + passing;
      room->gradients.works(ran.later);
    }
    room->ran.push_back(std::move(ran));
    if (grad) room->gradients.last = at::sequence_number::peek();
    return Py_NewRef(Py_None);
  });
}

// leaves_read(): those that were read, are still there, and get gradients as large as they are.
inline PyObject* headroom_leaves_read(PyObject* self, PyObject*) {
  return leave_error([&] {
    Owned list(checked(PyList_New(0)));
    for (const auto& weak : as<Headroom>(self)->gradients.whole) {
      auto leaf = weak.lock();
      if (!leaf) continue;
      Owned wrapped(checked(THPVariable_Wrap(at::Tensor(std::move(leaf)))));
      if (PyList_Append(list.get(), wrapped.get()) < 0) throw py::error_already_set();
    }
    return list.release();
  });
}

// at_most(live): what the step takes at most, if so many bytes are live.
inline PyObject* headroom_at_most(PyObject* self, PyObject* live) {
  long long bytes = PyLong_AsLongLong(live);
  if (bytes == -1 && PyErr_Occurred()) return nullptr;
  return PyLong_FromLongLong(total(as<Headroom>(self), bytes, in_backward()));
}

inline Py_ssize_t headroom_length(PyObject* self) {
  return static_cast<Py_ssize_t>(as<Headroom>(self)->ran.size());
}

inline PyMethodDef headroom_methods[] = {
    {"seen", headroom_seen, METH_O, nullptr},
    {"note", headroom_note, METH_VARARGS, nullptr},
    {"leaves_read", headroom_leaves_read, METH_NOARGS, nullptr},
    {"at_most", headroom_at_most, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

inline PyMemberDef headroom_members[] = {
    {"limit", T_LONGLONG, offsetof(Headroom, limit), READONLY, nullptr},
    {"leaves", T_LONGLONG, offsetof(Headroom, gradients.leaves), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

inline PyType_Slot headroom_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(new_headroom)},
    {Py_tp_dealloc, reinterpret_cast<void*>(delete_headroom)},
    {Py_sq_length, reinterpret_cast<void*>(headroom_length)},
    {Py_tp_methods, headroom_methods},
    {Py_tp_members, headroom_members},
    {0, nullptr}};

inline PyType_Spec headroom_spec = {
    "lowtide.compiled.Headroom", sizeof(Headroom), 0, Py_TPFLAGS_DEFAULT, headroom_slots};

}  // namespace lowtide

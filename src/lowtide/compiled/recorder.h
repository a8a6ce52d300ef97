// The recorder's hot path: what `Recorder._run_recorded` and `Recorder.pack` do, without Python.
//
// Problem: a dispatch mode costs 5 to 15 microseconds an operation before it does anything.
// Invariant: a boxed fallback just below autograd sees every operation of a recording thread, runs
// it exactly once, and leaves the same records as the Python recorder; whatever is out of the
// ordinary (unknown tensors, generators of one's own, policies that look at arguments) is handed to that
// recorder, over the same table. Rejected: a recorder that is all C++, whose rare paths would be
// written and tested twice.
#pragma once

#include "operation.h"

#include <array>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/Parallel.h>
#include <c10/util/hash.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/PyInterpreter.h>

namespace lowtide {

// No kernel is registered to this key on any operator, no tensor has it; it stands below autograd
// and Python modes and above the kernels. It is on while a thread records.
constexpr auto KEY = c10::DispatchKey::Fake;

// Base class of the Python recorder that this file speeds up: the fields that both touch.
struct State {
  PyObject_HEAD
  PyObject* region;
  PyObject* table;
  PyObject* live;
  PyObject* forget;
  PyObject* read;
  PyObject* before;
  PyObject* tape;
  PyObject* decisions;
  PyObject* script;   // the plan to follow, or none
  PyObject* made;     // where to note what was made while it is followed: weak references
  PyObject* handles;  // and what autograd got
  long long sequence, numbers, group;
  long long limit;  // bytes that may be alive while the script is followed, -1: any
  char lazy_bits, paused, asks, timed;
  State* outer;  // the recording that this one stands inside of, on the same thread
};

inline thread_local State* current = nullptr;

// What has to be known of an operator here, from `Facts`.
struct Fact {
  PyObject* facts;
  PyObject* name;
  bool casts_inside;
  bool view, ambient, lazy_bits, opaque, random, blank, constant, placing, fills_saved;
  bool always_trains = false;
  int mean = -1, variance = -1, training = -1;  // places of running statistics and their flag
  std::vector<int> writes, fills;               // places of arguments
};

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

inline PyObject* facts_of;  // the Python function

inline std::unordered_map<const c10::FunctionSchema*, Fact>& known_facts() {
  static thread_local std::unordered_map<const c10::FunctionSchema*, Fact> found;
  return found;
}

inline const Fact* fact_of(const c10::OperatorHandle& op) {
  auto& found = known_facts();
  auto at = found.find(&op.schema());
  return at == found.end() ? nullptr : &at->second;
}

// Operators of torch itself are never taken back, so that the address of a schema tells them.
inline const Fact* learn(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (name.compare(0, 6, "aten::") != 0 && name.compare(0, 7, "prims::") != 0) return nullptr;
  py::handle func = torch::detail::getTorchApiFunction(op);
  py::object facts =
      py::reinterpret_steal<py::object>(checked(PyObject_CallOneArg(facts_of, func.ptr())));
  auto flag = [&](const char* field) { return facts.attr(field).cast<bool>(); };
  Owned text(checked(PyObject_GetAttrString(facts.ptr(), "name")));
  PyObject* interned_name = text.release();
  PyUnicode_InternInPlace(&interned_name);
  Fact fact{facts.ptr(),    interned_name,  flag("casts_inside"), flag("view"),   flag("ambient"), flag("lazy_bits"), flag("opaque"),
            flag("random"), flag("blank"),  flag("constant"), flag("placing"),
            !facts.attr("fills_saved").is_none()};
  if (!facts.attr("statistics").is_none()) {
    std::tie(fact.mean, fact.variance, fact.training) =
        facts.attr("statistics").cast<std::tuple<int, int, int>>();
    fact.always_trains = name.size() > 11 && name.compare(name.size() - 11, 11, "with_update") == 0;
  }
  auto place = [&](py::handle where) {
    if (py::isinstance<py::int_>(where)) return where.cast<int>();
    auto found = op.schema().argumentIndexWithName(where.cast<std::string>());
    return found ? static_cast<int>(*found) : -1;
  };
  for (py::handle where : facts.attr("writes")) fact.writes.push_back(place(where));
  for (py::handle where : facts.attr("fills")) fact.fills.push_back(place(where));
  facts.release();
  return &(known_facts()[&op.schema()] = std::move(fact));
}

inline void run_below(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, KEY), stack);
}

// ---------------------------------------------------------------------- global switches

struct Switches {
  bool mkldnn, deterministic, cuda, cudnn, benchmark, cudnn_deterministic;
  int threads;
  c10::ScalarType dtype;
  std::array<at::Float32Precision, 7> precisions;
  bool operator==(const Switches&) const = default;
};

inline PyObject *compat_names, *cuda_seen_name;  // the namespace of `_compat`, and "_cuda_seen"

inline Switches switches_now() {
  using Backend = at::Float32Backend;
  using Op = at::Float32Op;
  auto& context = at::globalContext();
  return {context.userEnabledMkldnn(),
          context.deterministicAlgorithms(),
          PyDict_GetItemWithError(compat_names, cuda_seen_name) == Py_True,
          context.userEnabledCuDNN(),
          context.benchmarkCuDNN(),
          context.deterministicCuDNN(),
          at::get_num_threads(),
          c10::typeMetaToScalarType(c10::get_default_dtype()),
          {context.float32Precision(Backend::GENERIC, Op::ALL),
           context.float32Precision(Backend::CUDA, Op::MATMUL),
           context.float32Precision(Backend::CUDA, Op::CONV),
           context.float32Precision(Backend::CUDA, Op::RNN),
           context.float32Precision(Backend::MKLDNN, Op::MATMUL),
           context.float32Precision(Backend::MKLDNN, Op::CONV),
           context.float32Precision(Backend::MKLDNN, Op::RNN)}};
}

inline PyObject* ambient_function;  // `_compat.ambient`

// The tuple that Python makes of the switches: one object as long as they stay as they are.
inline PyObject* ambient_now() {
  static thread_local Switches last;
  static thread_local PyObject* tuple = nullptr;
  Switches now = switches_now();
  if (tuple == nullptr || !(now == last)) {
    PyObject* made = checked(PyObject_CallNoArgs(ambient_function));
    if (tuple != nullptr && PyObject_RichCompareBool(made, tuple, Py_EQ) == 1) {
      Py_DECREF(made);
    } else {
      Py_XDECREF(tuple);
      tuple = made;
    }
    last = now;
  }
  return tuple;
}

// ---------------------------------------------------------------------- inputs

inline Owned key_of(const at::Tensor& tensor) {
  return Owned(PyLong_FromVoidPtr(tensor.storage().unsafeGetStorageImpl()));
}

inline bool is_ordinary(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return tensor.layout() == c10::kStrided && tensor.has_storage() && !impl->is_inference() &&
      !impl->key_set().has(c10::DispatchKey::Python) && !tensor.is_neg() && !tensor.is_conj() &&
      !tensor.is_quantized() && !tensor.is_nested() &&
      !impl->has_symbolic_sizes_strides();
}

// The value in a storage if it can be read without further ado, as a new reference, else null.
inline Owned readable(State* state, PyObject* entry, const at::Tensor& tensor) {
  const Layout& l = layout;
  if (integer(slot(entry, l.entry_version)) != tensor._version()) return {};
  PyObject* value = slot(entry, l.entry_value);
  Owned found;
  if (!is_none(value)) {
    found = Owned(Py_NewRef(value));
  } else if (!is_none(slot(entry, l.entry_weak))) {
    found = Owned(target_of(slot(entry, l.entry_weak)));
  }
  value = found.get();
  if (value == nullptr) return {};
  bool held = holds(value);
  if (is_none(slot(value, l.value_op))) {
    if (!held) return {};
    put_new(value, l.value_read, Py_True);
  } else if (
      (slot(value, l.value_keep) == Py_True && !held) ||
      slot(value, l.value_region) != state->region) {
    return {};
  }
  return found;
}

inline PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

inline PyObject *watch_function, *watched;  // `watch.watch`, `watch._watched`

// As `Known._hold`.
inline void hold(PyObject* entry, PyObject* value, const at::Tensor& tensor) {
  const Layout& l = layout;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  at::Tensor alias(impl->shallow_copy_and_detach(impl->version_counter(), false));
  put(value, l.value_version, PyLong_FromLongLong(alias._version()));
  put(value, l.value_held, checked(THPVariable_Wrap(std::move(alias))));
  if (slot(value, l.value_keep) == Py_True) {  // `Value.settle`
    put_new(value, l.value_op, Py_None);
    put_new(value, l.value_read, Py_True);
  }
  put(entry, l.entry_weak, checked(PyWeakref_NewRef(value, nullptr)));
  put_new(entry, l.entry_value, Py_None);
  PyObject* key = slot(entry, l.entry_key);
  PyObject* found = PyDict_GetItemWithError(watched, key);
  if (found != nullptr && PyList_GET_SIZE(found) <= 8) {  // `watch`, where there is nothing to sweep
    if (PyList_Append(found, slot(entry, l.entry_weak)) < 0) throw py::error_already_set();
    return;
  }
  PyObject* arguments[] = {key, value};
  Owned done(checked(PyObject_Vectorcall(watch_function, arguments, 2, nullptr)));
}

// As `Known._enter`: an entry for a storage that is not in the table, and its value.
inline std::pair<Owned, Owned> enter(
    State* state, PyObject* op, const at::Tensor& tensor, Owned key, bool counted) {
  const Layout& l = layout;
  Owned storage(checked(THPStorage_Wrap(tensor.storage())));
  PyObject* arguments[] = {storage.get(), state->forget};
  Owned entry(checked(PyObject_Vectorcall(
      reinterpret_cast<PyObject*>(l.entry), arguments, 2, nullptr)));
  auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
  PyObject* e = entry.get();
  bool external = is_none(op);
  Owned value(new_value(op, bytes, state->region, external ? -1 : state->numbers));
  slot(e, l.entry_version) = PyLong_FromLongLong(tensor._version());
  slot(e, l.entry_loose) = Py_NewRef(Py_False);
  slot(e, l.entry_weak) = Py_NewRef(Py_None);
  slot(e, l.entry_nbytes) = PyLong_FromLongLong(bytes);
  slot(e, l.entry_counted) = PyLong_FromLongLong(counted ? bytes : 0);
  slot(e, l.entry_value) = Py_NewRef(value.get());
  if (PyDict_SetItem(state->table, key.get(), e) < 0) throw py::error_already_set();
  slot(e, l.entry_key) = key.release();
  if (!external) ++state->numbers;
  if (counted) {
    int64_t live = integer(PyList_GET_ITEM(state->live, 0)) + bytes;
    if (PyList_SetItem(state->live, 0, PyLong_FromLongLong(live)) < 0) {
      throw py::error_already_set();
    }
  }
  return {std::move(entry), std::move(value)};
}

// Something that this recording has not made and meets for the first time.
inline Owned external(State* state, const at::Tensor& tensor, Owned key, bool read) {
  auto [entry, value] = enter(state, Py_None, tensor, std::move(key), false);
  if (read) put_new(value.get(), layout.value_read, Py_True);
  hold(entry.get(), value.get(), tensor);
  return std::move(value);
}

// Add an input; false if it cannot be named, so that the operation cannot be replayed.
inline bool add_input(State* state, Operation* op, const at::Tensor& tensor, size_t place, int item) {
  if (!is_ordinary(tensor)) return false;
  Owned key = key_of(tensor);
  PyObject* entry = PyDict_GetItemWithError(state->table, key.get());
  Owned value;
  if (entry == nullptr) {
    value = external(state, tensor, std::move(key), true);
  } else {
    value = readable(state, entry, tensor);
  }
  if (value.get() == nullptr) {
    static PyObject* name = interned("_reference");
    Owned wrapped(THPVariable_Wrap(tensor));
    Owned ref(checked(PyObject_CallMethodOneArg(
        reinterpret_cast<PyObject*>(state), name, wrapped.get())));
    if (ref.get() == Py_None) return false;
    value = Owned(Py_NewRef(slot(ref.get(), layout.ref_value)));
  }
  op->inputs.push_back(Input{value.release(), static_cast<int32_t>(place),
                             static_cast<int32_t>(item), Geometry(tensor)});
  return true;
}

// An entry for a storage that is only written; false where it was written unseen.
inline bool enter_external(State* state, const at::Tensor& tensor) {
  Owned key = key_of(tensor);
  PyObject* entry = PyDict_GetItemWithError(state->table, key.get());
  if (entry != nullptr) {
    return integer(slot(entry, layout.entry_version)) == tensor._version();
  }
  enter(state, Py_None, tensor, std::move(key), false);
  return true;
}

// Copy the arguments into the record, each tensor by name; false if one cannot be named.
// Running statistics that the call updates (`statistics`) become scratch memory.
inline bool encode(
    State* state, Operation* op, const c10::IValue* values, size_t count, const Fact* statistics) {
  op->arguments.reserve(count);
  for (size_t place = 0; place < count; ++place) {
    const c10::IValue& value = values[place];
    if (is_number(value)) {
      op->numbers.push_back(static_cast<int32_t>(place));
      op->arguments.emplace_back(value.toTensor().item());
    } else if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      int at = static_cast<int>(place);
      if (statistics != nullptr && (at == statistics->mean || at == statistics->variance)) {
        if (!is_ordinary(tensor) || !enter_external(state, tensor)) return false;
        op->inputs.push_back(Input{nullptr, static_cast<int32_t>(place), -1, Geometry(tensor), true,
                                   static_cast<int64_t>(tensor.storage().nbytes()),
                                   tensor.device()});
      } else if (tensor.defined() && !add_input(state, op, tensor, place, -1)) {
        return false;
      }
      op->arguments.emplace_back();
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      auto items = value.toListRef();
      for (size_t item = 0; item < items.size(); ++item) {
        if (items[item].isTensor() && items[item].toTensor().defined() &&
            !add_input(state, op, items[item].toTensor(), place, static_cast<int>(item))) {
          return false;
        }
      }
      op->lists.push_back({static_cast<int32_t>(place), static_cast<int32_t>(items.size()),
                           value.isOptionalTensorList()});
      op->arguments.emplace_back();
    } else if (value.isGenericDict() || value.isTuple() || value.isObject() || value.isStorage()) {
      return false;
    } else {
      op->arguments.push_back(value);
    }
  }
  return true;
}

// ---------------------------------------------------------------------- outputs

inline void add_output(
    State* state, Operation* op, const c10::IValue& result, int64_t place, PyObject* made) {
  if (!result.isTensor() || !result.toTensor().defined()) return;
  const at::Tensor& tensor = result.toTensor();
  if (tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python) ||
      tensor.unsafeGetTensorImpl()->is_inference() || !tensor.has_storage() ||
      tensor.layout() != c10::kStrided || tensor.is_nested()) {
    return;
  }
  Owned key = key_of(tensor);
  if (PyDict_GetItemWithError(state->table, key.get()) != nullptr) return;  // an alias
  PyObject* maker = op == nullptr ? Py_None : reinterpret_cast<PyObject*>(op);
  auto [entry, value] = enter(state, maker, tensor, std::move(key), true);
  if (op == nullptr) return;
  Owned weak(checked(PyWeakref_NewRef(value.get(), nullptr)));
  Owned pair(checked(PyTuple_New(2)));
  PyTuple_SET_ITEM(pair.get(), 0, PyLong_FromLongLong(place));
  PyTuple_SET_ITEM(pair.get(), 1, weak.release());
  if (PyList_Append(op->outputs, pair.get()) < 0) throw py::error_already_set();
  if (made != nullptr && PyList_Append(made, value.get()) < 0) throw py::error_already_set();
}

inline void add_outputs(State* state, Operation* op, const Stack& stack, size_t count, PyObject* made) {
  int64_t place = 0;
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (stack[i].isList()) {
      for (const c10::IValue& item : stack[i].toListRef()) {
        add_output(state, op, item, place++, made);
      }
    } else {
      add_output(state, op, stack[i], place++, made);
    }
  }
}

// ---------------------------------------------------------------------- a plan that is followed

// What a plan expects of a step, operation by operation, and what it wants kept.
struct Script {
  PyObject_HEAD
  PyObject* names;  // a tuple of operator names
  std::vector<std::vector<int64_t>> sizes;  // bytes of what each makes
  std::vector<std::vector<int64_t>> reads;  // numbers of the values that each reads
  std::vector<int64_t> needs;               // bytes that each allocates
  std::vector<int64_t> choices;             // what to do with each value, see `Prepared`
  std::vector<size_t> looked_at;            // digest of a call that Python found to have room, or 0
};

inline PyTypeObject* script_type;

inline bool following(State* state) { return !is_none(state->script); }

// What the size of a result depends on: the shapes and numbers that a call is given.
inline size_t digest_of(const Operation* op) {
  size_t digest = 1;
  auto add = [&](size_t part) { digest = c10::hash_combine(digest, part); };
  for (const Input& input : op->inputs) {
    for (int64_t size : input.geometry.size) add(static_cast<size_t>(size));
    add(static_cast<size_t>(input.argument) + (input.geometry.dtype.itemsize() << 8));
  }
  for (const c10::IValue& value : op->arguments) {
    if (value.isInt()) {
      add(static_cast<size_t>(value.toInt()));
    } else if (value.isBool()) {
      add(value.toBool() ? 3 : 5);
    } else if (value.isDouble()) {
      add(std::hash<double>()(value.toDouble()));
    } else if (value.isIntList()) {
      for (int64_t each : value.toIntVector()) add(static_cast<size_t>(each));
    } else if (value.isDoubleList()) {
      for (double each : value.toDoubleVector()) add(std::hash<double>()(each));
    }
    add(7);
  }
  return digest == 0 ? 1 : digest;
}

// Whether the call is the planned one, as far as one can tell before it runs, and there is room:
// plenty of it, or enough for a call that has been looked at closely before.
inline bool has_room(State* state, const Fact& fact, const Operation* op, size_t& digest) {
  auto* script = reinterpret_cast<Script*>(state->script);
  auto index = static_cast<size_t>(state->sequence);
  if (state->limit < 0) return true;
  if (index >= script->sizes.size() || fact.name != PyTuple_GET_ITEM(script->names, state->sequence)) {
    return false;
  }
  int64_t room = state->limit - integer(PyList_GET_ITEM(state->live, 0));
  if (2 * script->needs[index] <= room) return true;
  digest = digest_of(op);
  return script->looked_at[index] == digest && script->needs[index] <= room;
}

// `StepDecisions.produced` where the operation is the planned one; false if Python has to decide.
inline bool follow(State* state, const Fact& fact, Operation* op, PyObject* made) {
  const Layout& l = layout;
  auto* script = reinterpret_cast<Script*>(state->script);
  auto index = static_cast<size_t>(op->sequence);
  if (index >= script->sizes.size() || fact.name != PyTuple_GET_ITEM(script->names, op->sequence)) {
    return false;
  }
  const auto &sizes = script->sizes[index], &reads = script->reads[index];
  auto count = static_cast<size_t>(PyList_GET_SIZE(made));
  if (count != sizes.size()) return false;
  size_t read = 0;
  for (const Input& input : op->inputs) {
    if (input.scratch) continue;
    int64_t number = input.value == nullptr ? -1 : integer(slot(input.value, l.value_number));
    if (read >= reads.size() || reads[read++] != number) return false;
  }
  if (read != reads.size()) return false;
  for (size_t i = 0; i < count; ++i) {
    PyObject* value = PyList_GET_ITEM(made, i);
    if (integer(slot(value, l.value_nbytes)) != sizes[i] ||
        script->choices.at(integer(slot(value, l.value_number))) < -1) {
      return false;
    }
  }
  for (size_t i = 0; i < count; ++i) {
    PyObject* value = PyList_GET_ITEM(made, i);
    int64_t choice = script->choices[integer(slot(value, l.value_number))];
    if (choice > 0) put(value, l.value_retain_from, PyLong_FromLongLong(choice));
    Owned weak(checked(PyWeakref_NewRef(value, nullptr)));
    if (PyList_Append(state->made, weak.get()) < 0) throw py::error_already_set();
  }
  return true;
}

// Whether the plan holds a value that autograd is saving.
inline bool plan_holds(State* state, PyObject* value) {
  auto* script = reinterpret_cast<Script*>(state->script);
  return script->choices.at(integer(slot(value, layout.value_number))) < 0;
}

// ---------------------------------------------------------------------- writes

// Whether an operation is a factory of constant memory.
inline bool is_constant(PyObject* op) {
  static PyObject* name = interned("constant");
  PyObject* facts = is_compiled_operation(op) ? reinterpret_cast<Operation*>(op)->facts
                                              : slot(op, layout.operation_facts);
  Owned constant(checked(PyObject_GetAttr(facts, name)));
  return constant.get() == Py_True;
}

// A storage that a call is about to write, and through which argument.
struct Written {
  Owned entry;
  int place;
  at::Tensor tensor;
  int input = -1;       // its place among the inputs, where what it becomes can be made again
  bool hidden = false;  // running statistics, of which autograd is not told
};

inline PyObject* overwriting_function;  // `watch.overwriting`

inline bool contains(const std::vector<int>& places, int place) {
  return std::find(places.begin(), places.end(), place) != places.end();
}

inline bool trains(const Fact& fact, const c10::IValue* values) {
  return fact.mean >= 0 && values[fact.mean].isTensor() && values[fact.mean].toTensor().defined() &&
      (fact.always_trains || values[fact.training].toBool());
}

// As `Recorder._written`; false where Python has to look closer.
inline bool find_written(
    State* state, const c10::FunctionSchema& schema, const std::vector<int>& places,
    const c10::IValue* values, std::vector<Written>& written) {
  for (int place : places) {
    if (place < 0 || schema.arguments()[place].kwarg_only()) return false;  // out=
    if (values[place].isNone()) continue;
    if (!values[place].isTensor()) return false;
    const at::Tensor& tensor = values[place].toTensor();
    if (!tensor.defined()) continue;
    if (!is_ordinary(tensor)) return false;
    Owned key = key_of(tensor);
    if (!enter_external(state, tensor)) return false;
    PyObject* entry = PyDict_GetItemWithError(state->table, key.get());
    for (const Written& other : written) {
      if (other.entry.get() == entry) return false;
    }
    written.push_back({Owned(Py_NewRef(entry)), place, tensor});
  }
  return true;
}

// Whether a view is the whole of a storage, each element once; as `covers`.
inline bool covers(const Geometry& geometry, int64_t nbytes) {
  c10::SmallVector<std::pair<int64_t, int64_t>, 5> dims;
  for (size_t i = 0; i < geometry.size.size(); ++i) {
    if (geometry.size[i] != 1) dims.emplace_back(geometry.stride[i], geometry.size[i]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t count = 1;
  for (auto [stride, size] : dims) {
    if (stride != count) return false;
    count *= size;
  }
  return geometry.offset == 0 && count * static_cast<int64_t>(geometry.dtype.itemsize()) == nbytes;
}

inline void make_blank(Input& input, int64_t nbytes, c10::Device device) {
  PyObject* value = std::exchange(input.value, nullptr);
  Py_XDECREF(value);
  input.blank = nbytes;
  input.device = device;
}

// As `Recorder._can_be_made`: false if what is written cannot be made again in any case.
inline bool may_be_made(const Fact& fact, const std::vector<Written>& written) {
  if (fact.blank || (fact.constant && !c10::GradMode::is_enabled())) return false;
  for (const Written& each : written) {
    if (contains(fact.fills, each.place)) continue;
    PyObject* value = slot(each.entry.get(), layout.entry_value);
    Owned held;
    if (is_none(value) && !is_none(slot(each.entry.get(), layout.entry_weak))) {
      held = Owned(target_of(slot(each.entry.get(), layout.entry_weak)));
      value = held.get();
    }
    if (is_none(value) || is_none(slot(value, layout.value_op))) return false;
  }
  return true;
}

// As `Recorder._write_refs`: whether what is written can be made again; finds the inputs.
inline bool can_be_made(const Fact& fact, Operation* op, std::vector<Written>& written) {
  for (Written& each : written) {
    int found = -1, count = 0;
    for (size_t i = 0; i < op->inputs.size(); ++i) {
      if (op->inputs[i].argument == each.place && op->inputs[i].item < 0) {
        found = static_cast<int>(i);
      }
    }
    if (found < 0) return false;
    PyObject* value = op->inputs[found].value;
    for (const Input& input : op->inputs) count += input.value == value;
    int64_t nbytes = integer(slot(each.entry.get(), layout.entry_nbytes));
    PyObject* made_by = slot(value, layout.value_op);
    if (contains(fact.fills, each.place) && count == 1 &&
        covers(op->inputs[found].geometry, nbytes)) {
      make_blank(op->inputs[found], nbytes, each.tensor.device());
    } else if (is_none(made_by)) {
      return false;
    } else if (!fact.placing && is_constant(made_by)) {
      return false;
    }
    each.input = found;
  }
  return true;
}

// As `Known._rewritten`: a storage has new content.
inline void rewritten(State* state, Operation* op, Written& each, PyObject* made) {
  const Layout& l = layout;
  PyObject* entry = each.entry.get();
  bool made_again = op != nullptr && each.input >= 0;
  PyObject* maker = made_again ? reinterpret_cast<PyObject*>(op) : Py_None;
  Owned value(new_value(maker, integer(slot(entry, l.entry_nbytes)), state->region,
                        made_again ? state->numbers++ : -1));
  if (made_again) {
    op->writes.push_back(
        {static_cast<size_t>(each.input), checked(PyWeakref_NewRef(value.get(), nullptr))});
    if (made != nullptr && PyList_Append(made, value.get()) < 0) throw py::error_already_set();
  }
  put(entry, l.entry_version, PyLong_FromLongLong(integer(slot(entry, l.entry_version)) + 1));
  put_new(entry, l.entry_loose, Py_True);
  put(entry, l.entry_value, value.release());
}

// ---------------------------------------------------------------------- one operation

inline std::optional<c10::Stream> stream_of(const Stack& stack, size_t count) {
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (!stack[i].isTensor() || !stack[i].toTensor().defined()) continue;
    c10::Device device = stack[i].toTensor().device();
    if (device.is_cpu() || device.is_meta()) return {};
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  }
  return {};
}

// The CPU generator as it is; false if the call draws from another one.
inline bool snapshot(const Stack& stack, size_t count, at::Generator& into) {
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (stack[i].isGenerator()) return false;
    if (stack[i].isTensor() && stack[i].toTensor().defined() &&
        !stack[i].toTensor().device().is_cpu()) {
      return false;
    }
  }
  if (count == 0 || !stack[stack.size() - count].isTensor()) return false;  // a factory: its device may be another
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  into = generator.clone();
  return true;
}

// As `Recorder._run_recorded`; false if nothing has been run and the Python recorder has to.
inline bool run_recorded(
    State* state, const Fact& fact, const c10::OperatorHandle& op, c10::DispatchKeySet keys,
    Stack* stack) {
  size_t count = op.schema().arguments().size();
  const c10::IValue* values = stack->data() + stack->size() - count;
  bool statistics = trains(fact, values);
  if (fact.mean >= 0 && !statistics && values[fact.mean].isTensor()) return false;  // frozen
  std::vector<Written> written;
  Owned owner(reinterpret_cast<PyObject*>(new_operation(op)));
  auto* made = reinterpret_cast<Operation*>(owner.get());
  if (!find_written(state, op.schema(), fact.writes, values, written)) return false;
  bool again = statistics || may_be_made(fact, written);
  if (again) {
    if (!encode(state, made, values, count, statistics ? &fact : nullptr)) return false;
    again = statistics || can_be_made(fact, made, written);
  }
  if (statistics) {
    std::vector<int> places;
    for (int place : {fact.mean, fact.variance}) {
      if (!contains(fact.writes, place)) places.push_back(place);
    }
    size_t declared = written.size();
    if (!find_written(state, op.schema(), places, values, written)) return false;
    for (size_t i = declared; i < written.size(); ++i) written[i].hidden = true;
  }
  if (fact.random && again && !snapshot(*stack, count, made->drawn)) return false;
  size_t digest = 0;
  if (following(state) && written.empty() && again && !has_room(state, fact, made, digest)) {
    static PyObject* name = interned("before");
    auto [args, kwargs] = python_arguments(op.schema(), values);
    Owned func(Py_NewRef(torch::detail::getTorchApiFunction(op).ptr()));
    Owned look(checked(PyObject_GetAttr(reinterpret_cast<PyObject*>(state), name)));
    py::tuple positional(args);
    PyObject* arguments[] = {fact.facts, func.get(), positional.ptr(), kwargs.ptr()};
    Owned done(checked(PyObject_Vectorcall(look.get(), arguments, 4, nullptr)));
    if (following(state) && digest != 0) {
      reinterpret_cast<Script*>(state->script)->looked_at[state->sequence] = digest;
    }
  }
  made->facts = Py_NewRef(fact.facts);
  made->outputs = checked(PyList_New(0));
  if (again) {
    made->sequence = state->sequence++;
    made->grad_mode = c10::GradMode::is_enabled();
    if (fact.ambient) made->ambient = Py_NewRef(ambient_now());
    made->stream = stream_of(*stack, count);
  }
  for (const Written& each : written) {
    PyObject* key = slot(each.entry.get(), layout.entry_key);
    if (PyDict_GetItemWithError(watched, key) == nullptr) continue;
    PyObject* arguments[] = {key, each.hidden ? Py_True : Py_False};
    Owned done(checked(PyObject_Vectorcall(overwriting_function, arguments, 2, nullptr)));
  }
  Stack before;  // for a decision that looks at the arguments, should the plan not hold
  if (state->asks && again) before.assign(stack->end() - static_cast<long>(count), stack->end());
  {
    WithoutGil released;
    run_below(op, keys, stack);
  }
  PyObject* policy = slot(state->region, layout.region_policy);
  bool told = again && (state->asks || !is_none(policy));
  Owned results(told ? checked(PyList_New(0)) : nullptr);
  Operation* maker = again ? made : nullptr;
  for (Written& each : written) rewritten(state, maker, each, results.get());
  add_outputs(state, maker, *stack, op.schema().returns().size(), results.get());
  if (!told || (following(state) && follow(state, fact, made, results.get()))) return true;
  static PyObject* name = interned("produced");
  py::tuple args;
  py::dict kwargs;
  if (state->asks) std::tie(args, kwargs) = python_arguments(op.schema(), before.data());
  PyObject* arguments[] = {state->decisions, owner.get(), results.get(), state->region,
                           args.ptr(),       kwargs.ptr()};
  Owned done(checked(PyObject_VectorcallMethod(name, arguments, 6, nullptr)));
  return true;
}

// Hand the call to the Python recorder, which runs it.
inline void run_python(State* state, const c10::OperatorHandle& op, Stack* stack) {
  static PyObject* name = interned("run");
  const auto& schema = op.schema();
  size_t count = schema.arguments().size();
  py::handle func = torch::detail::getTorchApiFunction(op);
  py::object result;
  {
    auto [args, kwargs] = python_arguments(schema, stack->data() + stack->size() - count);
    torch::jit::drop(*stack, count);
    py::tuple positional(args);
    PyObject* arguments[] = {
        reinterpret_cast<PyObject*>(state), func.ptr(), positional.ptr(), kwargs.ptr()};
    result = py::reinterpret_steal<py::object>(
        checked(PyObject_VectorcallMethod(name, arguments, 4, nullptr)));
  }
  const auto& returns = schema.returns();
  if (returns.size() == 1) {
    torch::jit::push(*stack, torch::jit::toIValue(result, returns[0].type()));
  } else if (returns.size() > 1) {
    auto items = py::cast<py::sequence>(result);
    for (size_t i = 0; i < returns.size(); ++i) {
      torch::jit::push(*stack, torch::jit::toIValue(items[i], returns[i].type()));
    }
  }
}

// A selective-checkpoint policy of torch's looks at the arguments of a call.
inline bool asks_for_arguments(PyObject* region) {
  PyObject* policy = slot(region, layout.region_policy);
  static PyObject* name = interned("select");
  return !is_none(policy) && PyObject_HasAttr(policy, name);
}

// Whether autocast would cast what a kernel calls.
inline bool casting() {
  auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  return at::autocast::is_autocast_enabled(at::kCPU) || at::autocast::is_autocast_enabled(at::kCUDA)
      ? !(c10::autocast_dispatch_keyset - excluded).empty()
      : false;
}

// Run what is never replayed, and know what it made only as memory.
inline void run_unrecorded(
    State* state, const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  {
    WithoutGil released;
    run_below(op, keys, stack);
  }
  add_outputs(state, nullptr, *stack, op.schema().returns().size(), nullptr);
}

inline void look_for_freed(State* state) {
  static PyObject* name = interned("_look_for_freed");
  PyObject* arguments[] = {reinterpret_cast<PyObject*>(state), state->read};
  Owned done(checked(PyObject_VectorcallMethod(name, arguments, 2, nullptr)));
}

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  State* state = current;
  c10::impl::ExcludeDispatchKeyGuard guard(KEY);  // kernels call operators too
  if (state == nullptr) return run_below(op, keys, stack);
  const Fact* fact = fact_of(op);
  if (fact == nullptr) {
    Gil gil;
    fact = learn(op);
  }
  if (fact != nullptr && (fact->view || state->paused)) {
    // Python must not see the result: whoever made it may want it to be of a class of theirs.
    if (!is_none(state->read)) {
      Gil gil;
      look_for_freed(state);
    }
    if (fact->lazy_bits) state->lazy_bits = 1;
    return run_below(op, keys, stack);
  }
  Gil gil;
  bool ordinary = fact != nullptr && !fact->opaque && !fact->fills_saved && !state->paused &&
      !state->lazy_bits && !state->timed && state->group == 0 && is_none(state->read) &&
      (is_none(state->before) || following(state)) && !(fact->casts_inside && casting()) &&
      !c10::InferenceMode::is_enabled() &&
      !asks_for_arguments(state->region);
  if (fact != nullptr && fact->casts_inside && casting()) {
    return run_unrecorded(state, op, keys, stack);
  }
  if (ordinary && run_recorded(state, *fact, op, keys, stack)) return;
  run_python(state, op, stack);
}

}  // namespace lowtide

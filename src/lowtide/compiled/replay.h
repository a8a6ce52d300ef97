// Running recorded operations again: what `rematerialize` and `run` of `lowtide/replay.py` do.
//
// Problem: in Python, replaying an operation costs ten times its dispatch. Invariant: the order, the
// guards, the memory and the errors are those of `replay.py`, which stays the reference and runs every
// unusual operation. Rejected: a list of operations to replay, made with each plan: it would hold for one
// shape only, and finding the closure takes less time than its kernels.
#pragma once

#include "recorder.h"
#include "restored.h"

#include <ATen/ScalarOps.h>

#include <algorithm>
#include <unordered_set>

namespace lowtide {

inline PyObject *python_run, *python_lost, *python_free_later;

inline int64_t sequence_of(PyObject* op) {
  if (is_compiled_operation(op)) return as<Operation>(op)->sequence;
  return integer(slot(op, layout.operation_sequence));
}

template <class Visit>
void each_input(PyObject* op, Visit visit) {
  if (is_compiled_operation(op)) {
    for (const Input& input : as<Operation>(op)->inputs) {
      if (input.value != nullptr) visit(input.value);
    }
    return;
  }
  PyObject* refs = slot(op, layout.operation_refs);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(refs); ++i) {
    PyObject* value = slot(PyList_GET_ITEM(refs, i), layout.ref_value);
    if (!is_none(value)) visit(value_of(value));
  }
}

// The ref through which an operation reads one of its inputs.
inline Owned ref_read_by(PyObject* op, Value* value) {
  if (op == nullptr) return Owned(Py_NewRef(Py_None));
  if (is_compiled_operation(op)) {
    for (const Input& input : as<Operation>(op)->inputs) {
      if (input.value == value) return Owned(new_ref(object_of(value), input.geometry));
    }
  } else {
    PyObject* refs = slot(op, layout.operation_refs);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(refs); ++i) {
      PyObject* ref = PyList_GET_ITEM(refs, i);
      if (slot(ref, layout.ref_value) == object_of(value)) return Owned(Py_NewRef(ref));
    }
  }
  return Owned(Py_NewRef(Py_None));
}

[[noreturn]] inline void lost(Value* value, PyObject* ref) {
  PyObject* arguments[] = {object_of(value), ref};
  Owned error(checked(PyObject_Vectorcall(python_lost, arguments, 2, nullptr)));
  PyErr_SetObject(object_of(Py_TYPE(error.get())), error.get());
  throw py::error_already_set();
}

inline int64_t depth_of(PyObject* region) { return integer(slot(region, layout.region_depth)); }

// As `Region.contains`.
inline bool contains(PyObject* region, PyObject* other) {
  while (other != region && depth_of(other) > depth_of(region)) other = slot(other, layout.region_parent);
  return other == region;
}

// One replay, from a request to the tensor.
class Replay {
 public:
  // `events`: if not null, the number of backward's last request, which decides what is retained.
  // `of_region`: whether the decisions are `RegionDecisions`, whose rules are known here.
  Replay(Value* value, PyObject* request, PyObject* decisions, const Box* events, bool of_region)
      : value_(value), request_(request), decisions_(decisions), events_(events), of_region_(of_region) {}

  at::Tensor run() {
    find_closure();
    count_readers();
    Owned owned(Py_NewRef(ambient_now()));  // Python may run anything, another replay included
    PyObject* switches = owned.get();
    BelowAutograd guard;
    RestoredGradMode mode;
    for (const Owned& op : operations_) {
      if (is_compiled_operation(op.get())) {
        run_compiled(as<Operation>(op.get()), switches);
      } else {
        run_rare(op.get(), switches);
      }
    }
    const at::Tensor* found = live(value_);
    if (found == nullptr) lost(value_, Py_None);
    return *found;
  }

  Owned operations() const {
    Owned list(checked(PyList_New(static_cast<Py_ssize_t>(operations_.size()))));
    for (size_t i = 0; i < operations_.size(); ++i) {
      PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), Py_NewRef(operations_[i].get()));
    }
    return list;
  }

 private:
  using Results = c10::SmallVector<std::pair<Owned, at::Tensor>, 2>;  // values made, and what they are
  using Tensors = c10::SmallVector<at::Tensor, 2>;

  // What is known of a value while the replay runs.
  struct Temporary {
    int readers = 0;    // operations that have yet to read it
    at::Tensor tensor;  // once it was made, for as long as it is read
  };

  void find_closure() {
    ska::flat_hash_set<PyObject*> found;
    std::vector<std::pair<Value*, PyObject*>> stack{{value_, nullptr}};
    while (!stack.empty()) {
      auto [wanted, reader] = stack.back();
      stack.pop_back();
      PyObject* op = wanted->op;
      if (op == nullptr) lost(wanted, ref_read_by(reader, wanted).get());
      if (!found.insert(op).second) continue;
      operations_.emplace_back(Py_NewRef(op));
      each_input(op, [&](Value* value) {
        if (in_memory(value) == nullptr) stack.emplace_back(value, op);
      });
    }
    std::sort(operations_.begin(), operations_.end(), [](const Owned& a, const Owned& b) {
      return sequence_of(a.get()) < sequence_of(b.get());
    });
  }

  void count_readers() {
    values_.reserve(2 * operations_.size());
    values_[value_].readers = 1;
    for (const Owned& op : operations_) {
      each_input(op.get(), [&](Value* value) { ++values_[value].readers; });
    }
  }

  const at::Tensor* live(Value* value) const {
    auto found = values_.find(value);
    return found != values_.end() && found->second.tensor.defined() ? &found->second.tensor : nullptr;
  }

  const at::Tensor& base_of(Value* value, const Operation* op) {
    if (const at::Tensor* made = live(value)) return *made;
    const at::Tensor* held = in_memory(value);
    if (held == nullptr) {
      lost(value, ref_read_by(object_of(const_cast<Operation*>(op)), value).get());
    }
    return *held;
  }

  // Whether the process is as it was when an operation was recorded; Python changes it under a lock.
  bool as_recorded(const Operation* op, PyObject* switches) const {
    if (op->default_dtype != c10::get_default_dtype_as_scalartype()) return false;
    if (op->ambient != nullptr && op->ambient != switches &&
        PyObject_RichCompareBool(op->ambient, switches, Py_EQ) != 1) {
      return false;
    }
    return runs_where_it_ran(op);
  }

  void run_compiled(Operation* op, PyObject* switches) {
    if (!as_recorded(op, switches)) return run_rare(object_of(op), switches);
    Tensors written;
    Stack& stack = stack_;
    find_arguments(op, stack, written);
    c10::GradMode::set_enabled(op->grad_mode);
    {
      static const Drawn nothing;
      const Drawn& drawn = op->rare().drawn;
      bool copied = takes_a_copy(op->fact, drawn);
      const auto& called = copied ? given(*op->fact, op->op, stack, 0, copy_to_draw_from(drawn)) : op->op;
      RestoredGenerator generator(copied ? nothing : drawn);
      RestoredThreads threads(op->threads);
      RestoredFlushing flushing(op->flushes);
      RestoredCasting casting(op->casting);
      std::optional<WithoutGil> released;
      if (op->stream != nullptr || !op->fact->brief || !is_short(stack)) released.emplace();
      called.callBoxed(&stack);
    }
    Results made;
    for (const Output& output : op->outputs) {
      if (output.value.get() == nullptr) continue;
      made.emplace_back(Py_NewRef(output.value.get()), result_at(stack, output.place));
    }
    const auto& writes = op->rare().writes;
    for (size_t i = 0; i < writes.size(); ++i) {
      PyObject* value = writes[i].value.get();
      if (value != nullptr) made.emplace_back(Py_NewRef(value), written[i]);
    }
    stack.clear();
    written.clear();
    done(object_of(op), made);
  }

  // The arguments; adds to `written` what the operation is about to write, in the order of its writes.
  void find_arguments(const Operation* op, Stack& stack, Tensors& written) {
    stack.assign(op->arguments.begin(), op->arguments.end());
    const Rare& rare = op->rare();
    for (const Write& write : rare.writes) written.push_back(private_base(op, op->inputs[write.input]));
    auto input = op->inputs.begin();
    auto base = [&]() -> at::Tensor {
      for (size_t i = 0; i < rare.writes.size(); ++i) {
        const Input& other = op->inputs[rare.writes[i].input];
        bool same = input->value == nullptr ? &other == &*input : other.value == input->value;
        if (same) return written[i];
      }
      return input->value == nullptr ? fresh(*input) : base_of(input->value, op);
    };
    auto next = [&](int place, int item) -> std::optional<at::Tensor> {
      if (input == op->inputs.end() || input->argument != place || input->item != item) return {};
      at::Tensor tensor = input->geometry.of(base());
      ++input;
      return tensor;
    };
    for (int32_t place : rare.numbers) {
      stack[place] = at::native::wrapped_scalar_tensor(stack[place].toScalar());
    }
    auto list = rare.lists.begin();
    for (int place = 0; place < static_cast<int>(stack.size()); ++place) {
      if (list == rare.lists.end() || list->argument != place) {
        if (auto tensor = next(place, -1)) stack[place] = std::move(*tensor);
        continue;
      }
      if (list->optional) {
        c10::List<std::optional<at::Tensor>> items;
        for (int item = 0; item < list->count; ++item) items.push_back(next(place, item));
        stack[place] = std::move(items);
      } else {
        c10::List<at::Tensor> items;
        for (int item = 0; item < list->count; ++item) items.push_back(next(place, item).value());
        stack[place] = std::move(items);
      }
      ++list;
    }
  }

  static at::Tensor fresh(const Input& input) {
    at::Tensor bytes = at::empty({input.blank()}, at::TensorOptions(at::kByte).device(input.device));
    return input.geometry.of(bytes);
  }

  // As `_private`: memory for the operation to write, with the content that it is going to change.
  at::Tensor private_base(const Operation* op, const Input& input) {
    if (input.value == nullptr) return fresh(input);
    const at::Tensor* made = live(input.value);
    if (made != nullptr && !input.value->held.is_same(*made)) {
      auto here = std::count_if(op->inputs.begin(), op->inputs.end(), [&](const Input& other) {
        return other.value == input.value;
      });
      if (values_[input.value].readers == here) {
        return *made;  // a temporary of this replay, which no later operation reads
      }
    }
    const at::Tensor& base = base_of(input.value, op);
    Geometry whole({static_cast<int64_t>(base.storage().nbytes())}, {1}, 0,
                   caffe2::TypeMeta::Make<uint8_t>());
    at::Tensor copied = whole.of(base).clone();
    return Geometry(base).of(copied);
  }

  static at::Tensor result_at(const Stack& stack, int64_t place) {
    for (const c10::IValue& result : stack) {
      if (!result.isList()) {
        if (place-- == 0) return result.toTensor();
        continue;
      }
      auto items = result.toListRef();
      if (place < static_cast<int64_t>(items.size())) return items[place].toTensor();
      place -= static_cast<int64_t>(items.size());
    }
    throw std::runtime_error("lowtide: a replayed operator returned fewer tensors than before");
  }

  // Run an operation through Python's `replay.run`, with the part of this replay that it touches.
  void run_rare(PyObject* op, PyObject* switches) {
    Owned live(checked(PyDict_New())), readers(checked(PyDict_New()));
    each_input(op, [&](Value* value) {
      if (const at::Tensor* made = this->live(value)) {
        Owned tensor(checked(THPVariable_Wrap(*made)));
        PyDict_SetItem(live.get(), object_of(value), tensor.get());
      }
      Owned count(PyLong_FromLong(values_[value].readers));
      PyDict_SetItem(readers.get(), object_of(value), count.get());
    });
    Owned mode(checked(PyObject_GetAttrString(op, "grad_mode")));
    c10::GradMode::set_enabled(mode.get() == Py_True);
    PyObject* arguments[] = {op, live.get(), readers.get(), switches};
    Owned results(checked(PyObject_Vectorcall(python_run, arguments, 4, nullptr)));
    Results made;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(results.get()); ++i) {
      PyObject* pair = PyList_GET_ITEM(results.get(), i);
      made.emplace_back(
          Py_NewRef(PyTuple_GET_ITEM(pair, 0)), THPVariable_Unpack(PyTuple_GET_ITEM(pair, 1)));
    }
    done(op, made);
  }

  // An operation is done: free what it was the last to read; keep what it made if that is needed.
  void done(PyObject* op, Results& made) {
    each_input(op, [&](Value* value) {
      Temporary& known = values_[value];
      if (--known.readers == 0) known.tensor.reset();
    });
    for (auto& [owner, tensor] : made) {
      Value* value = value_of(owner.get());
      auto left = values_.find(value);
      if (left != values_.end() && left->second.readers > 0) left->second.tensor = tensor;
      if (!value->held.defined() && retained(value)) {
        value->version = version_of(tensor);
        value->held = tensor;
        if (of_region_) free_later(owner.get());
      }
    }
    if (of_region_) settle_made(op, made);
  }

  // In a backward that retains its graph, what is held is to be dropped in time.
  void free_later(PyObject* value) {
    PyObject* tape = as<Handle>(request_)->tape;
    if (slot(tape, layout.tape_passing) == Py_None) return;  // no regions are nested
    if (!torch::autograd::get_current_graph_task_keep_graph()) return;
    PyObject* arguments[] = {value, tape};
    Owned done(checked(PyObject_Vectorcall(python_free_later, arguments, 2, nullptr)));
  }

  // As `RegionDecisions.replayed`: what is held needs its operation no more if that holds what a policy
  // keeps.
  void settle_made(PyObject* op, const Results& made) {
    bool based = false;
    each_input(op, [&](Value* value) {
      based = based || (value->op == nullptr && value->number >= 0) || based_.count(value) != 0;
    });
    if (!based) return;
    for (const auto& result : made) {
      Value* value = value_of(result.first.get());
      if (!value->held.defined()) {
        based_.insert(value);
      } else if (value->op == op) {
        settle(value);
      }
    }
  }

  // As `Decisions.retained`: that of a planned backward, of a region, or what Python says.
  bool retained(Value* value) {
    bool pending = value->handles != nullptr;
    if (events_ != nullptr) return pending && events_->number >= value->retain_from;
    if (of_region_) {
      PyObject* scope = value->scope;
      if (scope == nullptr || !contains(scope, as<Handle>(request_)->region)) return false;
      return scope != value->region || pending;
    }
    static PyObject* name = interned("retained");
    PyObject* arguments[] = {decisions_, object_of(value), request_};
    Owned answer(checked(PyObject_VectorcallMethod(name, arguments, 3, nullptr)));
    return answer.get() == Py_True;
  }

  Value* value_;
  PyObject *request_, *decisions_;
  const Box* events_;
  bool of_region_;
  std::unordered_set<Value*> based_;  // made from what a policy keeps, and not held
  std::vector<Owned> operations_;
  ska::flat_hash_map<Value*, Temporary> values_;
  Stack stack_;  // of the operation that runs
};

}  // namespace lowtide

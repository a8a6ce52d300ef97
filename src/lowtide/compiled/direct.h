// What autograd saves, handed to `hooks.h` without a call into Python.
//
// Problem: for each tensor that it saves, torch makes an object with two Python hooks and a Python object
// for the tensor, which costs more than packing it. Invariant: the hooks that Python pushed still decide:
// a saved tensor takes this path while the topmost hooks are a recorder's own, and torch's otherwise.
// Rejected: hooks for each saved variable (`register_hooks`), which come after the default ones; a vtable
// of our own in torch's engine.
#pragma once

#include "hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <pthread.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>
#include <memory>

namespace lowtide {

namespace autograd = torch::autograd;

[[noreturn]] inline void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

// Run what may raise a Python error, and rethrow that as torch does: it may have to leave one of the
// engine's threads.
template <class Do>
auto as_torch_throws(Do act) {
  try {
    return act();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (py::builtin_exception& error) {
    error.set_error();
  }
  throw_python_error();
}

// What compiled autograd is given in place of our `unpack`.
inline PyObject* unpack_function;

inline PyObject* unpack_through(PyObject*, PyObject* function) {
  Py_XSETREF(unpack_function, Py_NewRef(function));
  Py_RETURN_NONE;
}

inline int64_t packed_directly = 0;

// The hooks of one saved variable, in place of torch's `PySavedVariableHooks`.
class Saved final : public autograd::SavedVariableHooks {
 public:
  explicit Saved(State* state) : state_(state) {}
  ~Saved() override {
    if (packed_ == nullptr || !Py_IsInitialized()) return;
    Gil gil;
    Py_DECREF(packed_);
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    Gil gil;
    Owned recorder(Py_NewRef(object_of(state_)));  // until here, the stack of hooks keeps it alive
    packed_ = as_torch_throws([&] { return pack_tensor(state_, tensor); });
    state_ = nullptr;
    ++packed_directly;
  }

  at::Tensor call_unpack_hook() override {
    Gil gil;
    if (Py_IS_TYPE(packed_, handle_type)) {
      Owned handle(Py_NewRef(packed_));
      return as_torch_throws([&] { return unpack_handle(as<Handle>(packed_)); });
    }
    Owned found(PyObject_CallOneArg(python_unpack, packed_));
    if (found.get() == nullptr) throw_python_error();
    return THPVariable_Unpack(found.get());
  }

  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data()
      const override {
    Gil gil;
    auto* interpreter = getPyInterpreter();
    return std::make_pair(
        c10::SafePyObject(Py_NewRef(unpack_function), interpreter),
        c10::SafePyObject(Py_NewRef(packed_), interpreter));
  }

 private:
  State* state_;
  PyObject* packed_ = nullptr;
};

inline PyCFunction pack_function;

// The recorder whose hooks are the topmost on this thread, or null.
inline State* recorder_of_hooks() {
  const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state();
  if (hooks.stack.empty() || hooks.is_tracing) return nullptr;
  PyObject* pack = hooks.stack.top().first.ptr(getPyInterpreter());
  if (!PyCFunction_Check(pack) || PyCFunction_GET_FUNCTION(pack) != pack_function) return nullptr;
  return as<State>(PyCFunction_GET_SELF(pack));
}

// The type of the second argument of `Engine::execute_with_graph_task`: which smart pointer it is depends
// on torch's version.
template <class Result, class Task, class Root, class Buffer>
Root root_of(Result (autograd::Engine::*)(Task, Root, Buffer));
using Root = decltype(root_of(&autograd::Engine::execute_with_graph_task));

// The engine that torch asks for the hooks of a saved variable. It leaves all else to torch's own engine.
class Asked final : public autograd::Engine {
 public:
  explicit Asked(autograd::Engine& engine) : engine_(engine) {}

  std::unique_ptr<autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (State* state = recorder_of_hooks(); state != nullptr) {
      if (idle_calls(state) != nullptr) return nullptr;  // autograd keeps the tensor itself
      return std::make_unique<Saved>(state);
    }
    return engine_.get_default_saved_variable_hooks();
  }
  autograd::variable_list execute(
      const autograd::edge_list& roots, const autograd::variable_list& inputs, bool keep_graph,
      bool create_graph, bool accumulate_grad, const autograd::edge_list& outputs) override {
    return engine_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<autograd::GraphTask>& task, Root root,
      autograd::InputBuffer&& buffer) override {
    return engine_.execute_with_graph_task(task, std::move(root), std::move(buffer));
  }
  std::unique_ptr<autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return engine_.make_anomaly_metadata();
  }

 private:
  autograd::Engine& engine_;
};

inline Asked* asked;
inline PyObject* variable_class;  // `torch.autograd.Variable`
inline autograd::Engine* torchs_engine;
inline std::atomic<bool> forked = false;

// In a child process torch makes its engine anew, at the same address, when Python next uses it.
inline void after_fork() {
  if (!forked.exchange(false)) return;
  Gil gil;
  Owned engine(PyObject_GetAttrString(variable_class, "_execution_engine"));
  Owned done(engine.get() == nullptr
                 ? nullptr
                 : PyObject_CallMethod(engine.get(), "is_checkpoint_valid", nullptr));
  if (done.get() == nullptr) PyErr_Clear();
}

inline autograd::Engine& engine_now() {
  if (forked.load(std::memory_order_relaxed)) after_fork();
  if (current != nullptr) return *asked;
  return *torchs_engine;
}

inline void stand_before_the_engine() {
  torchs_engine = &autograd::Engine::get_default_engine();
  asked = new Asked(*torchs_engine);  // for the life of the process
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  autograd::set_default_engine_stub(&engine_now);
}

}  // namespace lowtide

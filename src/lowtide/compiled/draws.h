// Random state: what an operation drew from, and putting it back for a replay: `lowtide/tape/generators.py`,
// which has the rule (3), without Python.
//
// Problem: a transformer with dropout draws in a third of its operations, and handing each to Python cost
// more than all others together. Invariant: the state of the CPU's generator, which is large, is shared by the
// operations between two draws; that of a device is read as bytes by the generator's own `get_state`, which
// synchronises nothing (CUDA's are a seed and an offset, on the host). Generators of other devices that a call
// is given, and devices whose generator torch does not know, are left to the Python recorder. Rejected:
// `clone`: on the CPU it seeds a generator first, and on other devices it may share its state with the
// original, as CUDA's can.
#pragma once

#include "facts.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <cstring>
#include <memory>
#include <optional>

namespace lowtide {

// The state of a CPU's generator. Not a clone: that seeds a generator first, which takes longer than a draw.
struct CpuState {
  at::mt19937_data_pod engine;
  std::optional<float> next_float;
  std::optional<double> next_double;

  static CpuState of(at::CPUGeneratorImpl* generator) {
    return {generator->engine().data(), generator->next_float_normal_sample(),
            generator->next_double_normal_sample()};
  }
  bool operator==(const CpuState& other) const {
    const at::mt19937_data_pod &a = engine, &b = other.engine;
    return a.seed_ == b.seed_ && a.left_ == b.left_ && a.next_ == b.next_ && a.seeded_ == b.seeded_ &&
        a.state_ == b.state_ && next_float == other.next_float && next_double == other.next_double;
  }
  void put(at::CPUGeneratorImpl* into) const {
    static thread_local at::mt19937 carrier;
    carrier.set_data(engine);
    into->set_engine(carrier);
    into->set_next_float_normal_sample(next_float);
    into->set_next_double_normal_sample(next_double);
  }
};

inline at::CPUGeneratorImpl* on_cpu(const at::Generator& generator) {
  return generator.get<at::CPUGeneratorImpl>();
}

// What an operation drew from: a generator of the CPU, in this state; or another device's own, and the bytes
// of its state.
struct Drawn {
  std::shared_ptr<const CpuState> here;
  at::Generator generator;  // undefined: the CPU's default one
  c10::SmallVector<uint8_t, 16> state;

  bool elsewhere() const { return here == nullptr && generator.defined(); }
  bool defined() const { return here != nullptr || generator.defined(); }
};

// Reading a state may make a tensor, which no mode of the program's is to see.
inline c10::DispatchKeySet python_keys() {
  return c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, KEY});
}

inline at::Tensor tensor_of(const c10::SmallVector<uint8_t, 16>& state) {
  auto options = at::TensorOptions().dtype(at::kByte);
  at::Tensor tensor = at::detail::empty_cpu({static_cast<int64_t>(state.size())}, options);
  std::memcpy(tensor.data_ptr(), state.data(), state.size());
  return tensor;
}

// The state of a generator, whose lock is held.
inline void read_state(const at::Generator& generator, c10::SmallVector<uint8_t, 16>& into) {
  c10::impl::ExcludeDispatchKeyGuard guard(python_keys());
  at::Tensor state = generator.get_state();
  const auto* bytes = static_cast<const uint8_t*>(state.const_data_ptr());
  into.assign(bytes, bytes + state.nbytes());
}

inline void write_state(at::Generator& generator, const c10::SmallVector<uint8_t, 16>& state) {
  c10::impl::ExcludeDispatchKeyGuard guard(python_keys());
  generator.set_state(tensor_of(state));
}

// Packages may bring generators of their own.
inline bool is_of_cpu(const at::Generator& generator) {
  return dynamic_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl()) != nullptr;
}

inline std::shared_ptr<const CpuState> state_of(const at::Generator& generator) {
  at::Generator named = generator;
  std::lock_guard<std::mutex> lock(named.mutex());
  return std::make_shared<const CpuState>(CpuState::of(on_cpu(named)));
}

// The state of the CPU's default generator, the one that was read last if nothing was drawn since. Most
// operators that may draw do not (attention without dropout), and a state is larger than all other records.
inline std::shared_ptr<const CpuState> state_now() {
  static thread_local std::shared_ptr<const CpuState> last;
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  CpuState now = CpuState::of(on_cpu(generator));
  if (last == nullptr || !(now == *last)) last = std::make_shared<const CpuState>(now);
  return last;
}

// The default generator of a device; none if torch does not know it.
inline at::Generator generator_of(c10::Device device) {
  try {
    return at::globalContext().defaultGenerator(device);
  } catch (const c10::Error&) {
    return {};
  }
}

// The device that a call draws on: that of its tensors, or, for a factory, the one that it names. None:
// Python has to find it out.
inline std::optional<c10::Device> drawn_on(const torch::jit::Stack& stack, size_t count) {
  std::optional<c10::Device> tensors, named;  // that of the first which is not on the CPU, if any is
  auto look = [&](const c10::IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined()) return;
    if (!tensors || tensors->is_cpu()) tensors = value.toTensor().device();
  };
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (stack[i].isGenerator()) return {};
    if (stack[i].isDevice()) named = stack[i].toDevice();
    look(stack[i]);
    if (!stack[i].isTensorList() && !stack[i].isOptionalTensorList()) continue;
    for (const c10::IValue& item : stack[i].toListRef()) look(item);
  }
  if (!tensors) return named.value_or(c10::Device(c10::kCPU));
  bool elsewhere = named && *named != *tensors;  // `rand_like(x, device="cpu")` does not draw where `x` is
  return elsewhere ? std::nullopt : tensors;
}

// The state that a call is about to draw from; false if Python has to find it out.
inline bool snapshot(const Fact& fact, const torch::jit::Stack& stack, size_t count, Drawn& into) {
  if (fact.generator >= 0 && !fact.taker) {
    const c10::IValue& given = stack[stack.size() - count + fact.generator];
    if (given.isGenerator() && is_of_cpu(given.toGenerator())) {
      into.generator = given.toGenerator();
      into.here = state_of(into.generator);
      return true;
    }
  }
  std::optional<c10::Device> device = drawn_on(stack, count);
  if (!device || device->is_meta()) return false;
  if (device->is_cpu()) {
    into.here = state_now();
    return true;
  }
  if (!device->has_index()) {
    if (!c10::impl::hasDeviceGuardImpl(device->type())) return false;
    *device = c10::impl::VirtualGuardImpl(device->type()).getDevice();
  }
  into.generator = generator_of(*device);
  if (!into.generator.defined()) return false;
  std::lock_guard<std::mutex> lock(into.generator.mutex());
  read_state(into.generator, into.state);
  return true;
}

// A call that drew from a device did not succeed: as if it had not drawn.
inline void put_back(Drawn& drawn) {
  if (!drawn.elsewhere()) return;
  std::lock_guard<std::mutex> lock(drawn.generator.mutex());
  write_state(drawn.generator, drawn.state);
}

// (generator, its state before), as the Python recorder has it.
inline py::tuple draw_of(const Drawn& drawn) {
  if (drawn.elsewhere()) return py::make_tuple(drawn.generator, tensor_of(drawn.state));
  at::Generator copy = at::detail::createCPUGenerator();
  drawn.here->put(on_cpu(copy));
  if (drawn.generator.defined()) return py::make_tuple(drawn.generator, copy);
  return py::make_tuple(py::module_::import("torch").attr("default_generator"), copy);
}

// Holds a Python lock; waiting for it releases the GIL.
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

inline PyObject* draws_lock;  // `lowtide.tape.generators.lock`

// Whether an operation that drew this can be given a generator to draw from.
inline bool takes_a_copy(const Fact* fact, const Drawn& drawn) {
  return fact->generator >= 0 && drawn.here != nullptr;
}

// A CPU generator of this thread's own, in a recorded state.
inline at::Generator& copy_to_draw_from(const Drawn& drawn) {
  static thread_local at::Generator own = at::detail::createCPUGenerator();
  drawn.here->put(on_cpu(own));
  return own;
}

// The operator to call with this generator among its arguments, which begin at `below`.
inline const c10::OperatorHandle& given(
    const Fact& fact, const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t below,
    const at::Generator& own) {
  auto place = stack.begin() + static_cast<long>(below) + fact.generator;
  if (!fact.taker) {
    *place = own;
    return op;
  }
  stack.insert(place, own);
  return *fact.taker;
}

// The call that runs in this scope draws from a copy of a generator of the CPU, which is then as if it had
// been drawn from: no other thread draws between the reading of the state and the call's own draw, and so a
// replay draws the same. The generator's lock is not held meanwhile: what a call destroys may need
// Python's, which a thread that waits for the generator's may hold.
class DrawsFromCopy {
 public:
  explicit DrawsFromCopy(Drawn& drawn) : generator_(drawn.generator) {
    drawn.here = generator_.defined() ? state_of(generator_) : state_now();
    if (!generator_.defined()) generator_ = at::detail::getDefaultCPUGenerator();
    own_ = copy_to_draw_from(drawn);
  }
  ~DrawsFromCopy() {
    std::lock_guard<std::mutex> lock(generator_.mutex());
    CpuState::of(on_cpu(own_)).put(on_cpu(generator_));
  }
  const at::Generator& own() const { return own_; }

 private:
  at::Generator generator_, own_;
};

// A generator in a recorded state, until the end of the scope (rule 3). No other replay draws meanwhile.
class RestoredGenerator {
 public:
  explicit RestoredGenerator(const Drawn& drawn) {
    if (!drawn.defined()) return;
    locked_.emplace(draws_lock);
    generator_ = drawn.elsewhere() ? drawn.generator : at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(generator_.mutex());
    if (drawn.elsewhere()) {
      read_state(generator_, before_);
      write_state(generator_, drawn.state);
    } else {
      before_here_ = CpuState::of(on_cpu(generator_));
      drawn.here->put(on_cpu(generator_));
    }
  }
  ~RestoredGenerator() {
    if (!generator_.defined()) return;
    std::lock_guard<std::mutex> lock(generator_.mutex());
    if (before_here_) {
      before_here_->put(on_cpu(generator_));
    } else {
      write_state(generator_, before_);
    }
  }

 private:
  std::optional<Locked> locked_;  // released last
  at::Generator generator_;
  c10::SmallVector<uint8_t, 16> before_;
  std::optional<CpuState> before_here_;
};

}  // namespace lowtide

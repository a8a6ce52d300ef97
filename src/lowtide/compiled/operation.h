// One operator call as it can be run again, ready for the dispatcher.
//
// Problem: turning Python arguments into a boxed call costs more than most small kernels. Invariant: the
// arguments stay the dispatcher's own values, with an empty one in place of each tensor; what Python has
// of it is in `operation_types.h`. Rejected: keeping the tensors themselves, which would keep all
// activations in memory.
#pragma once

#include "casting.h"
#include "draws.h"
#include "facts.h"
#include "record_types.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <optional>

namespace lowtide {

using Stack = torch::jit::Stack;

// A tensor among the arguments.
struct Input {
  Value* value;  // owned; null: memory that the operation overwrites entirely
  Geometry geometry;
  int32_t item;  // position in a list of tensors, or -1
  int16_t argument;
  c10::Device device = c10::Device(c10::kCPU);
  int64_t fresh = 0;  // bytes of that memory; for scratch memory, their bitwise complement

  int64_t blank() const { return scratch() ? ~fresh : fresh; }
  // Replaces running statistics, which a replay must not move.
  bool scratch() const { return fresh < 0; }
};
static_assert(sizeof(Input) == 32, "most of what a record takes");

// A value that the operation makes, by its position in the flattened result.
struct Output {
  int32_t place;
  Weak value;
};

// An argument that the operation writes, by its position among the inputs, and the value it becomes.
struct Write {
  size_t input;
  Weak value;
};

// A list of tensors among the arguments.
struct TensorList {
  int32_t argument;
  int32_t count;
  bool optional;  // its items may be missing
};

template <class T>
using Few = std::vector<T, PythonMemory<T>>;

// What most operations do not have.
struct Rare {
  Few<TensorList> lists;
  Few<Write> writes;
  Few<int32_t> numbers;  // arguments that were Python numbers in place of a tensor
  Drawn drawn;  // if the operation draws

  static void* operator new(size_t) { return PythonMemory<Rare>().allocate(1); }
  static void operator delete(void* rare) { PyObject_Free(rare); }
};

struct Operation : Record {
  Operation(const c10::OperatorHandle& called, const Fact* known) : fact(known), op(called) {}

  const Fact* fact;
  PyObject* ambient = nullptr;  // null: does not matter
  const Casting* casting = nullptr;  // what autocast did inside of it
  const c10::Stream* stream = nullptr;  // if the device has streams
  PyObject* refs = nullptr;     // a list, once Python has asked for it
  int64_t sequence = 0;
  int64_t wanted = 0;  // bytes of the gradients of its arguments, see `wanted_bytes`
  int threads = 0;  // intra-op threads
  bool crosses = false;  // it reads what was made on another stream
  bool flushes = false;  // denormal numbers to zero
  bool grad_mode = false;
  c10::ScalarType default_dtype = c10::ScalarType::Undefined;
  c10::OperatorHandle op;
  Few<c10::IValue> arguments;  // exactly as many as there are
  c10::SmallVector<Input, 3> inputs;
  c10::SmallVector<Output, 1> outputs;
  std::unique_ptr<Rare> more;

  const Rare& rare() const {
    static const Rare none;
    return more == nullptr ? none : *more;
  }
  Rare& own_rare() {
    if (more == nullptr) more = std::make_unique<Rare>();
    return *more;
  }
};

template <>
inline constexpr bool is_linked<Operation> = false;

inline PyTypeObject* operation_type;

inline bool is_compiled_operation(PyObject* object) { return Py_IS_TYPE(object, operation_type); }

inline const c10::Stream* stream_it_ran_on(PyObject* op) {
  if (is_compiled_operation(op)) return as<Operation>(op)->stream;
  static PyObject* name = interned("stream");
  Owned stream(checked(PyObject_GetAttr(op, name)));
  return stream_from(stream.get());
}

}  // namespace lowtide

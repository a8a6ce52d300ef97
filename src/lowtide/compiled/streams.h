// Memory that is read on another stream of an accelerator than the one it was made on:
// `lowtide/tape/streams.py`, which has the rule, without Python.
//
// Problem: every operation of a step on an accelerator has a stream, and asking Python for it costs more
// than recording the operation. Invariant: the streams, the waits and what allocators are told are those of
// the Python file. Rejected: reading the stream once per step: a program may change it anywhere.
#pragma once

#include "operation.h"

#include <c10/core/Event.h>

namespace lowtide {

inline bool has_streams(c10::Device device) {
  return !device.is_cpu() && !device.is_meta() && c10::impl::hasDeviceGuardImpl(device.type());
}

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// The stream that a call runs on: the current one of the first argument's device that is not the CPU, or of
// the device that is named; none if that has no streams.
inline std::optional<c10::Stream> stream_of(const Stack& stack, size_t count) {
  std::optional<c10::Device> named;
  auto device_of = [](const at::Tensor& tensor) -> std::optional<c10::Device> {
    if (!tensor.defined() || tensor.device().is_cpu() || tensor.device().is_meta()) return {};
    return tensor.device();
  };
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    const c10::IValue& value = stack[i];
    std::optional<c10::Device> found;
    if (value.isTensor()) {
      found = device_of(value.toTensor());
    } else if (value.isDevice()) {
      named = value.toDevice();
    } else if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isInt()) break;  // none of its items is a tensor
        if (!found && item.isTensor()) found = device_of(item.toTensor());
      }
    }
    if (found) return current_stream(*found);
  }
  if (!named || !has_streams(*named)) return {};
  return current_stream(*named);
}

// The stream that a value was made on, or null.
inline const c10::Stream* made_on(const Value* value) {
  return value->op == nullptr ? value->home : stream_it_ran_on(value->op);
}

// Keep the allocator from reusing a tensor's memory while a stream still uses it.
inline void protect(const at::Tensor& tensor, c10::Stream stream) {
  if (!tensor.defined() || !tensor.has_storage() || !has_streams(tensor.device())) return;
  // A copy between devices is ordered with the current stream of the other one.
  if (tensor.device() != stream.device()) stream = current_stream(tensor.device());
  c10::impl::VirtualGuardImpl(stream.device_type())
      .recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

// As `put_on` of `lowtide/tape/streams.py`.
inline void put_on(
    Operation* op, const Fact& fact, c10::Stream stream, const Stack& stack, size_t count) {
  op->stream = the_stream(stream);
  for (const Input& input : op->inputs) {
    const c10::Stream* other = input.value == nullptr ? nullptr : made_on(input.value);
    op->crosses = op->crosses || (other != nullptr && other != op->stream);
  }
  size_t first = stack.size() - count;
  if (fact.non_blocking >= 0 && stack[first + fact.non_blocking].isBool()) {
    // The program waits before it reads a non-blocking copy, a replay does not.
    const c10::IValue& to = stack[first + fact.target];
    bool to_cpu = to.isTensor() ? to.toTensor().device().is_cpu() : to.isDevice() && to.toDevice().is_cpu();
    if (to_cpu) op->arguments[fact.non_blocking] = false;
  }
  if (!op->crosses) return;
  for (size_t i = first; i < stack.size(); ++i) {
    if (stack[i].isTensor()) protect(stack[i].toTensor(), stream);
    if (!stack[i].isList()) continue;
    for (const c10::IValue& item : stack[i].toListRef()) {
      if (item.isTensor()) protect(item.toTensor(), stream);
    }
  }
}

// Whether a replay may run an operation right here: on the stream and device that it was recorded on, with
// nothing that it reads made on another stream. If so, does what `replaying` of `streams.py` would.
inline bool runs_where_it_ran(const Operation* op) {
  const c10::Stream* stream = op->stream;
  if (stream == nullptr) return true;
  if (op->crosses) return false;
  c10::impl::VirtualGuardImpl guard(stream->device_type());
  if (guard.getDevice() != stream->device() || guard.getStream(stream->device()) != *stream) return false;
  for (const Input& input : op->inputs) {
    if (input.value == nullptr || input.value->op != nullptr || input.value->home == stream) continue;
    if (input.value->home) return false;  // a copy that was made elsewhere
    protect(input.value->held, *stream);
  }
  return true;
}

// As `hand_over` of `streams.py`.
inline void order_after_its_stream(const Value* value, const at::Tensor& tensor) {
  if (!has_streams(tensor.device())) return;
  const c10::Stream* stream = made_on(value);
  if (stream == nullptr) return;
  c10::Stream current = current_stream(tensor.device());
  if (current == *stream) return;
  c10::Event made(stream->device_type());
  made.record(*stream);
  made.block(current);
  protect(tensor, current);
}

}  // namespace lowtide

// The nodes that the running backward reaches.
//
// Problem and rejected: see `lowtide/observing/reached.py`. Invariant: the spans are in order, and the number
// of the newest node when something is saved for a reached one is in one of them. That is the node's own
// number, or, for an operation in place on a view, the one before its `CopySlices`; while the forward of a
// custom Function runs, any number up to the next node's.
#pragma once

#include "headroom.h"

#include <limits>
#include <map>

namespace lowtide {

// None outside a backward, else [(first, last), ...].
inline PyObject* reached(PyObject*, PyObject*) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* some = torch::autograd::get_current_graph_task_exec_info();
  if (!in_backward() || nodes == nullptr) Py_RETURN_NONE;
  std::map<int64_t, bool> numbers;  // -> whether it is a custom Function
  auto add = [&](torch::autograd::Node* node) {
    uint64_t number = node->sequence_nr();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return;  // a leaf's
    numbers[static_cast<int64_t>(number)] |= is_custom(node);
  };
  if (auto running = torch::autograd::get_current_node()) add(running.get());  // perhaps the root
  for (auto* node : *nodes) {
    if (some != nullptr && !some->empty()) {
      auto found = some->find(node);
      if (found == some->end() || !found->second.should_execute()) continue;
    }
    add(node);
  }
  Owned spans(checked(PyList_New(0)));
  for (auto at = numbers.begin(); at != numbers.end(); ++at) {
    auto next = std::next(at);
    int64_t last = at->first;
    if (at->second) last = next == numbers.end() ? std::numeric_limits<int64_t>::max() : next->first - 1;
    Owned span(checked(Py_BuildValue("(LL)", static_cast<long long>(at->first - 1),
                                     static_cast<long long>(last))));
    if (PyList_Append(spans.get(), span.get()) < 0) return nullptr;
  }
  return spans.release();
}

}  // namespace lowtide

// The nodes that the running backward reaches.
//
// Problem and rejected: see `lowtide/observing/reached.py`. Invariant: the spans are in order, and if something
// was saved for a reached node, one of them has a number that was given to a node for it. A write to a view is
// in no graph, but the `CopySlices` that is made when it is over. While the forward of a custom Function runs,
// nodes of other graphs may be made.
#pragma once

#include "headroom.h"

#include <torch/csrc/autograd/functions/tensor.h>

#include <limits>
#include <map>

namespace lowtide {

inline bool is_write_to_view(const torch::autograd::Node* node) {
  return dynamic_cast<const torch::autograd::CopySlices*>(node) != nullptr;
}

// None outside a backward, else [(first, last), ...].
inline PyObject* reached(PyObject*, PyObject*) {
  return leave_error([&]() -> PyObject* {
    const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    const auto* some = torch::autograd::get_current_graph_task_exec_info();
    if (!in_backward() || nodes == nullptr) return Py_NewRef(Py_None);
    std::map<int64_t, torch::autograd::Node*> numbers;
    auto add = [&](torch::autograd::Node* node) {
      uint64_t number = node->sequence_nr();
      if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return;  // a leaf's
      auto& found = numbers[static_cast<int64_t>(number)];  // that of another thread may have the same
      if (found == nullptr || is_custom(node) || is_write_to_view(node)) found = node;
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
    int64_t before = 0;
    for (auto at = numbers.begin(); at != numbers.end(); before = (at++)->first) {
      auto next = std::next(at);
      bool custom = is_custom(at->second), write = is_write_to_view(at->second);
      int64_t first = write ? before : at->first, last = at->first;
      if (custom) last = next == numbers.end() ? std::numeric_limits<int64_t>::max() : next->first;
      Owned span(checked(Py_BuildValue("(LL)", static_cast<long long>(first), static_cast<long long>(last))));
      if (PyList_Append(spans.get(), span.get()) < 0) throw py::error_already_set();
    }
    return spans.release();
  });
}

}  // namespace lowtide

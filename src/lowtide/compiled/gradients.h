// The gradients that a backward has at once, at most.
//
// Problem: the sum of all gradients of a step is several times what its backward ever has at once, so a step
// that nobody watches (`headroom.h`) seemed to come near a limit that it is far from. Invariant: a backward
// runs its nodes from the newest to the oldest, so a node's gradient is there from when the newest node that
// reads its result has run until it runs itself; what is counted here is there at least that long. Where that
// order, or that end, is not certain (nodes on two devices, hooks, gradients that are asked for, a backward
// that makes a graph), all are taken to be there at once. Rejected: following the edges of the graph when
// backward begins, which is too late for a forward that has to drop something.
#pragma once

#include "calls.h"
#include "storages.h"

#include <ATen/record_function.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_set>

namespace lowtide {

// Bytes that are there from when the node `made` runs until `taken` has run. Numbers fall as backward goes on.
struct Lasting {
  uint64_t taken, made;
  int64_t bytes;
};

struct Gradients {
  std::vector<Lasting> all, work;  // what nodes get, and what else they take while they run
  ska::flat_hash_map<uint64_t, size_t> counted;  // inputs of nodes: where in `all` they are
  ska::flat_hash_map<uint64_t, uint64_t> kept;   // numbers of nodes: until which one their gradient may be there
  ska::flat_hash_set<uint64_t> read;             // leaves
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> whole;  // leaves that get gradients as large as they are
  std::optional<c10::Device> device;
  bool mixed = false;    // nodes are on several devices or of several threads, each of which has its own order
  bool endless = false;  // there is what cannot be counted, such as a custom Function
  bool sparse = false;   // the call's table may get a smaller gradient
  uint64_t last = 0;     // number of autograd's next node when the last operation with grad mode was over
  int64_t sum = 0;       // bytes of `all`
  int64_t busiest = 0;   // and the most of `work`
  int64_t leaves = 0;    // bytes of the leaves' gradients
  int64_t at_once = 0;   // of `all` and `work`, when that was last counted
  int64_t since = 0;     // bytes of `all` from then on, again of those that are there for longer
  int64_t busy = 0;      // and the most of `work`

  // Bytes at once at most, as far as known without counting.
  int64_t known() const { return std::min(sum + busiest, at_once + since + busy); }

  void works(int64_t bytes) {
    work.push_back({last, newest(), bytes});
    busiest = std::max(busiest, bytes);
    busy = std::max(busy, bytes);
  }

  // Count them, for each node that may be running.
  void count() {
    std::vector<std::pair<uint64_t, int64_t>> changes;
    changes.reserve(2 * (all.size() + work.size()));
    for (const auto* some : {&all, &work}) {
      for (const Lasting& one : *some) {
        changes.emplace_back(one.taken, one.bytes);
        changes.emplace_back(one.made, -one.bytes);
      }
    }
    // What begins at a number comes before what ends there: both are there at once.
    std::sort(changes.begin(), changes.end(), [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first < b.first : a.second > b.second;
    });
    int64_t now = 0;
    at_once = since = busy = 0;
    for (const auto& [number, bytes] : changes) at_once = std::max(at_once, now += bytes);
  }

  // Number of the newest node.
  static uint64_t newest() { return at::sequence_number::peek() - 1; }
};

// Bytes of the gradient that a node gets for one of its inputs; -1: not known.
inline int64_t gradient_bytes(Gradients& gradients, const torch::autograd::Node* node, uint32_t input) {
  if (input >= node->num_inputs()) return 0;
  const auto& metadata = node->input_metadata(input);
  if (metadata.is_nested_tensor() || metadata.is_tensor_subclass()) return -1;
  if (!gradients.device) gradients.device = metadata.device();
  bool here = metadata.device() == *gradients.device && node->thread_id() == at::RecordFunction::currentThreadId();
  gradients.mixed = gradients.mixed || !here;
  auto bytes = static_cast<int64_t>(c10::elementSize(c10::typeMetaToScalarType(metadata.options().dtype())));
  for (const c10::SymInt& size : metadata.shape_as_dim_vector()) {
    auto known = size.maybe_as_int();
    if (!known) return -1;
    bytes *= *known;
  }
  return bytes;
}

enum class NodeKind {
  CUSTOM,     // of a custom Function, of Python or C++
  MAKES_NEW,  // what it returns is new: no view of the gradient that it gets, nor that itself
  OTHER,
};

// Operators whose backward makes new gradients: not those that pass on what they get (`add`), or parts of it
// (`cat`), nor views.
inline bool makes_new(std::string_view name) {
  static const std::unordered_set<std::string_view> names = {
      "Mm", "Addmm", "Bmm", "Baddbmm", "Convolution", "Mul", "Div", "Exp", "Log", "Pow", "Sqrt", "Rsqrt", "Sin",
      "Cos", "Tanh", "Sigmoid", "Relu", "LeakyRelu", "Elu", "Gelu", "Silu", "Softplus", "Softmax", "LogSoftmax",
      "NativeDropout", "NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm", "CudnnBatchNorm",
      "ThnnFusedLstmCell", "ThnnFusedGruCell", "MaxPool2DWithIndices", "MaxPool3DWithIndices", "AvgPool2D",
      "AvgPool3D", "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "UpsampleNearest2D", "UpsampleBilinear2D",
      "UpsampleNearest3D", "UpsampleTrilinear3D", "Embedding", "Index", "IndexSelect", "Gather", "NllLoss",
      "MseLoss"};
  return names.count(name) > 0;
}

// The types are not exported, so their names are read, once for each type: "torch::...::AddmmBackward0".
inline NodeKind kind_of(const torch::autograd::Node* node) {
  static auto* known = new ska::flat_hash_map<const std::type_info*, NodeKind>();
  const std::type_info* type = &typeid(*node);
  auto found = known->find(type);
  if (found != known->end()) return found->second;
  std::string whole = c10::demangle(type->name());
  NodeKind kind = NodeKind::OTHER;
  if (whole.find("PyNode") != std::string::npos || whole.find("CppNode") != std::string::npos) {
    kind = NodeKind::CUSTOM;
  } else if (size_t end = whole.rfind("Backward"); end != std::string::npos) {
    size_t colon = whole.rfind(':', end), begin = colon == std::string::npos ? 0 : colon + 1;
    if (makes_new(std::string_view(whole).substr(begin, end - begin))) kind = NodeKind::MAKES_NEW;
  }
  return (*known)[type] = kind;
}

inline bool is_custom(const torch::autograd::Node* node) { return kind_of(node) == NodeKind::CUSTOM; }

// Addresses are used again once a graph has died, numbers of nodes are not.
inline uint64_t key_of(const void* what, uint32_t input, uint64_t number) {
  Digest key(0);
  key.add(reinterpret_cast<uint64_t>(what));
  key.add(input);
  key.add(number);
  return key.number;
}

constexpr int DEEP = 100;  // nodes that are followed down the graph, one by one

// Until which node the gradient of a node may be there: that of a `cat` is as long as any of its parts, and a
// leaf may keep what it gets. To the end (0) where that is too far to follow.
inline uint64_t kept_until(Gradients& gradients, const torch::autograd::Node* node, int depth = 0) {
  if (depth == DEEP || dynamic_cast<const torch::autograd::AccumulateGrad*>(node) != nullptr) return 0;
  uint64_t number = node->sequence_nr(), until = number;
  if (kind_of(node) == NodeKind::MAKES_NEW) return number;
  auto known = gradients.kept.find(number);
  if (known != gradients.kept.end()) return known->second;
  for (const torch::autograd::Edge& next : node->next_edges()) {
    if (next.is_valid()) until = std::min(until, kept_until(gradients, next.function.get(), depth + 1));
  }
  gradients.kept.emplace(number, until);
  return until;
}

// Count a gradient that the newest node makes; false if it was counted before.
inline bool count_gradient(Gradients& gradients, torch::autograd::Node* node, uint32_t input, int64_t bytes) {
  auto [found, fresh] =
      gradients.counted.emplace(key_of(node, input, node->sequence_nr()), gradients.all.size());
  gradients.since += bytes;
  if (fresh) {
    gradients.all.push_back({kept_until(gradients, node), Gradients::newest(), bytes});
    gradients.sum += bytes;
  } else {
    gradients.all[found->second].made = Gradients::newest();
  }
  return fresh;
}

// Count a leaf's gradient; returns its bytes. Not `certain`: that it gets one.
inline int64_t count_leaf(Gradients& gradients, const at::Tensor& leaf, bool certain = true) {
  int64_t bytes = dense_bytes(leaf);
  if (!gradients.read.insert(key_of(leaf.unsafeGetTensorImpl(), 0, static_cast<uint64_t>(bytes))).second) return bytes;
  gradients.leaves += bytes;
  if (certain && !gradients.sparse) gradients.whole.emplace_back(leaf.getIntrusivePtr());
  return bytes;
}

// Count what backward makes of a tensor that an operation reads; returns what is gone right after the
// operation's own backward, beside the gradients that this returns: what views of other sizes make of them,
// as autograd goes on with the newest node, and the sum with a gradient that was there.
inline int64_t count_gradients(Gradients& gradients, const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return 0;
  auto* meta = static_cast<torch::autograd::AutogradMeta*>(tensor.unsafeGetTensorImpl()->autograd_meta());
  torch::autograd::Node* node = meta == nullptr ? nullptr : meta->grad_fn_.get();
  uint32_t input = meta == nullptr ? 0 : meta->output_nr_;
  if (node == nullptr) return count_leaf(gradients, tensor);
  int64_t passing = 0;
  for (bool returned = true;; returned = false) {
    int64_t bytes = is_custom(node) ? -1 : gradient_bytes(gradients, node, input);
    if (bytes < 0) {
      gradients.endless = true;
      return 0;
    }
    if (!returned) passing += bytes;
    if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      return passing + count_leaf(gradients, leaf->variable);
    }
    if (node->sequence_nr() < gradients.last && !count_gradient(gradients, node, input, bytes)) {
      return passing + bytes;
    }
    // The inputs of an operation were counted when it ran, those of a view may not have been.
    if (kind_of(node) == NodeKind::MAKES_NEW || node->num_outputs() != 1) return passing;
    const torch::autograd::Edge& next = node->next_edge(0);
    if (!next.is_valid()) return passing;
    node = next.function.get();
    input = next.input_nr;
  }
}

inline int64_t count_gradients(Gradients& gradients, const c10::IValue& value) {
  if (value.isTensor()) return count_gradients(gradients, value.toTensor());
  int64_t passing = 0;
  if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor()) passing += count_gradients(gradients, item.toTensor());
    }
  }
  return passing;
}

// Whether the order of the running backward is the usual one, and each gradient is gone when its node has
// run: no hook may keep it, nobody asked for it, and no graph is made of it.
inline bool releases_gradients() {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* some = torch::autograd::get_current_graph_task_exec_info();
  if (nodes == nullptr || c10::GradMode::is_enabled() || (some != nullptr && !some->empty())) return false;
  return std::none_of(nodes->begin(), nodes->end(), [](torch::autograd::Node* node) {
    bool leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node) != nullptr;
    bool hooks = !node->tensor_pre_hooks().empty() || !node->pre_hooks().empty() || !node->post_hooks().empty();
    return !leaf && (hooks || !node->retains_grad_hooks().empty());
  });
}

}  // namespace lowtide

// Maximum flow, as `planner/flow.py` finds it.
//
// Problem: a proof of how good a plan is takes thousands of minimum cuts, each some milliseconds in
// Python. Invariant: of all minimum cuts, the one returned has the fewest nodes on the source's side. It
// does not depend on the flow that was found, so Python and C++ return the same one. Capacities are at
// most INFINITE, and those of an arc and its reverse have a constant sum, so nothing overflows. Knows
// nothing of Python or torch. Rejected: keeping a network from cut to cut: copying it takes less than
// cutting it, and it would have to be told of each change that Python makes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace lowtide::planner {

constexpr int64_t INFINITE = int64_t(1) << 60;

// Nodes 0 (source), 1 (sink) and up; arc `a ^ 1` is the reverse of `a`.
class Network {
 public:
  // `heads` and `rooms`: for each arc, including the reverse ones.
  Network(int32_t nodes, const std::vector<int32_t>& heads, std::vector<int64_t> rooms)
      : nodes_(nodes), head_(heads), room_(std::move(rooms)), begin_(nodes + 1), arcs_(heads.size()) {
    for (size_t arc = 0; arc < heads.size(); ++arc) ++begin_[heads[arc ^ 1] + 1];
    for (int32_t node = 0; node < nodes; ++node) begin_[node + 1] += begin_[node];
    std::vector<int32_t> next(begin_.begin(), begin_.end() - 1);
    for (size_t arc = 0; arc < heads.size(); ++arc) {
      arcs_[next[heads[arc ^ 1]]++] = static_cast<int32_t>(arc);
    }
  }

  // Push until no path is left. For each node, whether the source still reaches it.
  std::vector<char> cut() {
    while (find_levels()) block();
    std::vector<char> reached(nodes_);
    std::vector<int32_t> stack{SOURCE};
    reached[SOURCE] = 1;
    while (!stack.empty()) {
      int32_t node = stack.back();
      stack.pop_back();
      for (int32_t at = begin_[node]; at < begin_[node + 1]; ++at) {
        int32_t to = head_[arcs_[at]];
        if (room_[arcs_[at]] == 0 || reached[to]) continue;
        reached[to] = 1;
        stack.push_back(to);
      }
    }
    return reached;
  }

 private:
  static constexpr int32_t SOURCE = 0, SINK = 1;

  // Distance of each node to the sink; false when the source is cut off.
  bool find_levels() {
    level_.assign(nodes_, nodes_);
    level_[SINK] = 0;
    queue_.assign(1, SINK);
    for (size_t at = 0; at < queue_.size(); ++at) {
      int32_t node = queue_[at];
      for (int32_t place = begin_[node]; place < begin_[node + 1]; ++place) {
        int32_t arc = arcs_[place], tail = head_[arc];
        if (level_[tail] != nodes_ || room_[arc ^ 1] == 0) continue;
        level_[tail] = level_[node] + 1;
        if (tail == SOURCE) return true;
        queue_.push_back(tail);
      }
    }
    return false;
  }

  // Saturate every shortest path (Dinic), with an explicit path instead of recursion.
  void block() {
    place_.assign(begin_.begin(), begin_.end() - 1);
    path_.clear();
    for (int32_t node = SOURCE;;) {
      if (node == SINK) {
        node = push();
        continue;
      }
      int32_t& place = place_[node];
      while (place < begin_[node + 1] && !leads_on(node, arcs_[place])) ++place;
      if (place < begin_[node + 1]) {
        path_.push_back(arcs_[place]);
        node = head_[arcs_[place]];
      } else if (!path_.empty()) {
        level_[node] = nodes_;
        node = head_[path_.back() ^ 1];
        path_.pop_back();
      } else {
        return;
      }
    }
  }

  bool leads_on(int32_t node, int32_t arc) const {
    return room_[arc] != 0 && level_[head_[arc]] == level_[node] - 1;
  }

  // Push as much as the path has room for; returns the first node whose next arc is full.
  int32_t push() {
    int64_t amount = 2 * INFINITE;
    for (int32_t arc : path_) amount = std::min(amount, room_[arc]);
    size_t keep = path_.size();
    for (size_t place = path_.size(); place-- > 0;) {
      int32_t arc = path_[place];
      room_[arc] -= amount;
      room_[arc ^ 1] += amount;
      if (room_[arc] == 0) keep = place;
    }
    int32_t node = head_[path_[keep] ^ 1];
    path_.resize(keep);
    return node;
  }

  int32_t nodes_;
  const std::vector<int32_t>& head_;
  std::vector<int64_t> room_;
  std::vector<int32_t> begin_, arcs_, level_, queue_, place_, path_;
};

}  // namespace lowtide::planner

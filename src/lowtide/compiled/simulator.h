// What a plan costs, as `planner/simulate.py` defines it: its peak and its replayed time.
//
// Problem: a search by random changes needs a hundred thousand simulations, which take minutes in
// Python. Invariant: all that is said of a plan is equal to what `Simulator.run` says, down to the last
// bit of the seconds, which are added in the same order. Knows nothing of Python or torch. Rejected:
// simulating only what a change touches: lifetimes span the whole step, and most changes are rejected
// long before its end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace lowtide::planner {

using Plan = std::vector<int32_t>;  // for each value: HOLD, the first event that may retain it, or NEVER

constexpr int32_t HOLD = -1, NEVER = std::numeric_limits<int32_t>::max();

// Lists of numbers, stored one after another.
struct Lists {
  std::vector<int32_t> begin{0}, items;

  const int32_t* first(int32_t list) const { return items.data() + begin[list]; }
  const int32_t* last(int32_t list) const { return items.data() + begin[list + 1]; }
};

// The lists of Python's `Simulator`, under the same names.
struct Graph {
  std::vector<int64_t> nbytes;
  std::vector<int32_t> producer, free, release, stays;
  Lists reads, outputs;
  std::vector<int64_t> work;
  Lists overwrites;
  std::vector<double> cost;
  std::vector<int32_t> replayable, event_value;
  std::vector<int64_t> event_other, event_peak, event_after;
  std::vector<int32_t> event_end;
  std::vector<int64_t> forward_peak;

  int32_t values() const { return static_cast<int32_t>(nbytes.size()); }
  int32_t operations() const { return static_cast<int32_t>(cost.size()); }
  int32_t events() const { return static_cast<int32_t>(event_value.size()); }
};

// What a simulation reports besides peak and time: nothing, for a search that asks for no more.
struct Unseen {
  void forward(int32_t, int64_t, int64_t) {}
  void highest(int32_t, int64_t) {}
  void replayed(int32_t) {}
  void missed(int32_t, int32_t) {}
  void replay_over(int32_t, int64_t, bool) {}
  void event(int32_t, int64_t, int64_t, int64_t, bool) {}
};

// `Simulation` and `Trace` of `simulate.py`, but for the lifetimes, which the simulator has.
struct Trace {
  enum Phase { FORWARD, REPLAY, BACKWARD };

  explicit Trace(const Graph& graph) : replay(graph.events()), replays(graph.operations()) {}

  std::vector<int64_t> forward_bytes, backward, replay;
  std::vector<int32_t> replays;
  std::vector<std::pair<int32_t, int32_t>> dropped;  // (value, event): recomputed, and not retained
  Phase phase = FORWARD;  // where the peak is
  int32_t index = 0, operation = -1;
  int64_t held = 0;

  void forward(int32_t op, int64_t total, int64_t bytes) {
    forward_bytes.push_back(total);
    if (total <= highest_forward_) return;
    highest_forward_ = total;
    index = op;
    held = bytes;
  }
  void highest(int32_t op, int64_t bytes) {
    highest_operation_ = op;
    highest_held_ = bytes;
  }
  void replayed(int32_t op) { ++replays[op]; }
  void missed(int32_t value, int32_t event) { dropped.emplace_back(value, event); }
  void replay_over(int32_t event, int64_t top, bool peak) {
    replay[event] = top;
    if (peak) at(REPLAY, event, highest_operation_, highest_held_);
  }
  void event(int32_t event, int64_t total, int64_t top, int64_t bytes, bool peak) {
    if (peak) at(BACKWARD, event, -1, bytes);
    backward.push_back(std::max(total, top));
  }

 private:
  void at(Phase now, int32_t place, int32_t op, int64_t bytes) {
    phase = now;
    index = place;
    operation = op;
    held = bytes;
  }

  int64_t highest_forward_ = -1, highest_held_ = 0;
  int32_t highest_operation_ = -1;
};

class Simulator {
 public:
  explicit Simulator(const Graph& graph)
      : graph_(graph),
        alive_(graph.values()),
        start_(graph.values()),
        readers_(graph.values()),
        expire_(graph.events()),
        held_(graph.operations() + 1),
        seen_(graph.operations()) {}

  int64_t peak = 0, count = 0;
  double seconds = 0;
  bool possible = true;  // false: the plan drops a value that cannot be replayed

  // After a run: for each value, the last event of its life, and the event that retained it, HOLD if it was
  // held, or ABSENT.
  const std::vector<int32_t>& alive() const { return alive_; }
  const std::vector<int32_t>& start() const { return start_; }
  static constexpr int32_t ABSENT = NEVER;

  // Simulate until `enough(peak, seconds)` is true for the part so far, of which both only grow; returns
  // whether it got to the end.
  template <class Enough, class Seen = Unseen>
  bool run(const Plan& plan, Enough enough, Seen&& seen = {}) {
    lifetimes(plan);
    forward(plan, seen);
    seconds = 0;
    count = 0;
    possible = true;
    if (enough(peak, seconds)) return false;
    for (int32_t event = 0; event < graph_.events(); ++event) {
      int32_t value = graph_.event_value[event];
      int64_t top = 0;
      if (start_[value] == ABSENT) {
        if (!closure(value)) return possible = false;
        top = replay(plan, event, value, seen);
        seen.replay_over(event, top, top > peak);
        peak = std::max(peak, top);
        if (enough(peak, seconds)) return false;
      }
      int64_t there = bytes_, total = graph_.event_peak[event] + there;
      bytes_ -= expire_[event];
      int64_t after = graph_.event_after[event] + bytes_;
      if (after > total) {
        total = after;
        there = bytes_;
      }
      seen.event(event, total, top, there, total > peak);
      if (total > peak) {
        peak = total;
        if (enough(peak, seconds)) return false;
      }
    }
    return true;
  }

 private:
  // Rule 2 of `simulate.py`: a value lives as long as any made from it by an operation that may be replayed.
  void lifetimes(const Plan& plan) {
    std::copy(graph_.release.begin(), graph_.release.end(), alive_.begin());
    for (int32_t op = graph_.operations() - 1; op >= 0; --op) {
      int32_t last = -1;
      for (auto w = graph_.outputs.first(op); w != graph_.outputs.last(op); ++w) {
        if (alive_[*w] > last && plan[*w] >= 0 && !graph_.free[*w]) last = alive_[*w];
      }
      if (last < 0) continue;
      for (auto x = graph_.reads.first(op); x != graph_.reads.last(op); ++x) {
        if (alive_[*x] < last) alive_[*x] = last;
      }
    }
  }

  template <class Seen>
  void forward(const Plan& plan, Seen& seen) {
    std::fill(held_.begin(), held_.end(), 0);
    std::fill(expire_.begin(), expire_.end(), 0);
    for (int32_t value = 0; value < graph_.values(); ++value) {
      bool held = plan[value] < 0 && alive_[value] >= 0;
      start_[value] = graph_.free[value] || held ? HOLD : ABSENT;
      if (held && !graph_.free[value]) {
        held_[graph_.stays[value] + 1] += graph_.nbytes[value];
        expire_[alive_[value]] += graph_.nbytes[value];
      }
    }
    peak = 0;
    bytes_ = 0;
    for (size_t op = 0; op < held_.size(); ++op) {
      bytes_ += held_[op];
      if (op >= graph_.forward_peak.size()) continue;
      int64_t total = graph_.forward_peak[op] + bytes_;
      seen.forward(static_cast<int32_t>(op), total, bytes_);
      peak = std::max(peak, total);
    }
  }

  // Find the operations to run for a missing value, in order, and how often each result is read.
  bool closure(int32_t value) {
    ++stamp_;
    order_.assign(1, graph_.producer[value]);
    seen_[order_[0]] = stamp_;
    for (size_t next = 0; next < order_.size(); ++next) {
      int32_t op = order_[next];
      if (!graph_.replayable[op]) {
        std::fill(readers_.begin(), readers_.end(), 0);
        return false;
      }
      for (auto x = graph_.reads.first(op); x != graph_.reads.last(op); ++x) {
        if (start_[*x] != ABSENT) continue;
        ++readers_[*x];
        int32_t maker = graph_.producer[*x];
        if (seen_[maker] == stamp_) continue;
        seen_[maker] = stamp_;
        order_.push_back(maker);
      }
    }
    std::sort(order_.begin(), order_.end());
    return true;
  }

  // Rules 3 and 4; returns the peak within the replay.
  template <class Seen>
  int64_t replay(const Plan& plan, int32_t event, int32_t value, Seen& seen) {
    int64_t top = -1, temporary = 0;
    double took = 0;
    for (int32_t op : order_) {
      int64_t total = bytes_ + temporary + graph_.work[op];
      for (auto x = graph_.overwrites.first(op); x != graph_.overwrites.last(op); ++x) {
        if (readers_[*x] == 1 && start_[*x] == ABSENT) total -= graph_.nbytes[*x];
      }
      if (total > top) {
        top = total;
        seen.highest(op, bytes_);
      }
      seen.replayed(op);
      took += graph_.cost[op];
      for (auto w = graph_.outputs.first(op); w != graph_.outputs.last(op); ++w) {
        if (start_[*w] != ABSENT) continue;
        if (plan[*w] <= event && event <= graph_.release[*w]) {
          start_[*w] = event;
          bytes_ += graph_.nbytes[*w];
          expire_[alive_[*w]] += graph_.nbytes[*w];
          continue;
        }
        if (*w == value || readers_[*w]) temporary += graph_.nbytes[*w];
        if (event < graph_.release[*w]) seen.missed(*w, event);
      }
      for (auto x = graph_.reads.first(op); x != graph_.reads.last(op); ++x) {
        if (!readers_[*x]) continue;
        if (readers_[*x] == 1 && start_[*x] == ABSENT) temporary -= graph_.nbytes[*x];
        --readers_[*x];
      }
    }
    if (start_[value] == ABSENT) {  // the node that asked for it has it, and nothing else
      bytes_ += graph_.nbytes[value];
      expire_[graph_.event_end[event]] += graph_.nbytes[value];
    }
    seconds += took;
    count += static_cast<int64_t>(order_.size());
    return top + graph_.event_other[event];
  }

  const Graph& graph_;
  std::vector<int32_t> alive_, start_, readers_;
  std::vector<int64_t> expire_, held_;
  std::vector<int64_t> seen_;  // for each operation, the last closure that it was in
  std::vector<int32_t> order_;
  int64_t stamp_ = 0, bytes_ = 0;
};

}  // namespace lowtide::planner

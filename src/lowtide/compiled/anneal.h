// Annealing: from a plan that fits to a cheaper one that fits, by random changes.
//
// Problem: `planner/exchange.py` judges an exchange by the plan it changes; some much cheaper plans are
// several changes away, and the plans in between do not fit or cost more. Invariant: deterministic. The
// seed is fixed, work is counted in simulated items, and only arithmetic that rounds alike everywhere is
// used, no math library; so the same graph, limit and plan give the same plan on every machine. The
// clock only ends a search early. Knows nothing of Python or torch. Rejected: passes that all start cold
// (1 % of the forward's time, not 8): in ResNet-50 at 30 % they never leave the layout of the large values
// that they are given, which costs a seventh more. Two passes instead of six, more and shorter rounds, and
// temperatures relative to the plan's time: each found less, over twenty networks.
#pragma once

#include "simulator.h"

#include <bit>
#include <chrono>

namespace lowtide::planner {

// A value that a plan decides about, and the decisions that are possible.
struct Choice {
  int32_t value;
  int32_t latest;  // the last event from which a replay may retain it; -1: none may
  bool holds;      // the forward may hold it
  bool never;      // it may be dropped before its release, as its graph is retained

  int32_t dropped() const { return latest < 0 ? NEVER : 0; }
};

// When to stop.
struct Effort {
  int64_t work;    // list items that the simulations visit
  double enough;   // a plan that replays no longer than this is good enough
  double seconds;  // of real time
};

// xorshift64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint32_t below(uint32_t count) { return static_cast<uint32_t>(((next() >> 32) * count) >> 32); }

  bool percent(uint32_t chance) { return below(100) < chance; }

  // Exponentially distributed with a mean of about one: -ln of a number between 0 and 1, where the
  // logarithm is interpolated linearly between powers of two.
  double exponential() {
    uint64_t bits = next() | 1;
    int zeros = std::countl_zero(bits);
    double mantissa = static_cast<double>((bits << zeros) >> 11) * 0x1p-52;
    return 0.6931471805599453 * (zeros + 2 - mantissa);
  }

 private:
  uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    return state_ ^= state_ << 17;
  }

  uint64_t state_;
};

class Annealing {
 public:
  Annealing(const Graph& graph, const std::vector<Choice>& choices, int64_t limit, Plan plan)
      : choices_(choices),
        related_(related(graph, choices)),
        limit_(limit),
        best_(std::move(plan)),
        simulator_(graph) {
    for (double cost : graph.cost) forward_ += cost;
    each_ = graph.values() + graph.operations() + graph.events() + 1;
  }

  // The cheapest plan found, or the first one if that does not fit.
  const Plan& run(const Effort& effort) {
    auto everything = [](int64_t, double) { return false; };
    if (choices_.empty() || !simulator_.run(best_, everything) || simulator_.peak > limit_) {
      return best_;
    }
    seconds_ = simulator_.seconds;
    using Clock = std::chrono::steady_clock;
    auto began = Clock::now();
    std::chrono::duration<double> allowed(effort.seconds);
    auto over = [&] { return seconds_ <= effort.enough || Clock::now() - began > allowed; };
    int64_t rounds = (effort.work - 1) / ROUND + 1;
    for (int64_t round = 0; round < rounds; ++round) {
      for (const Pass& pass : PASSES) {
        if (over()) return best_;
        cool(pass, effort.work / rounds * pass.work / 100, over);
      }
    }
    return best_;
  }

 private:
  // Each pass begins at the best plan so far. The hottest may lay out the large values anew, the coldest
  // stay near that plan. Those that aim below the limit, at a higher price for what is above their aim,
  // lower peaks that leave no room for a change that saves time. Each finds what the others do not.
  struct Pass {
    double temperature, ratio;  // what the first stage accepts, in units of the forward's time; then how much less
    int64_t work, below;        // percent of the work; how far below the limit it aims, in percent
    double dear;                // the cost of exceeding the aim by as much as the limit, in the forward's time
  };
  static constexpr Pass PASSES[] = {{8e-2, 0.9075, 15, 0, 8},   {1e-2, 0.9075, 10, 0, 8},
                                    {1e-1, 0.9075, 15, 6, 100}, {6e-3, 0.915, 10, 0, 8},
                                    {1e-2, 0.9075, 30, 3, 30},  {2e-3, 0.93, 20, 0, 8}};
  static constexpr int STAGES = 64;
  static constexpr int64_t ROUND = 640'000'000;  // with more work than this, there is more than one round
  // List items visited for a replayed operation.
  static constexpr int64_t REPLAY = 4;
  static constexpr int MOST = 3;              // changes at once
  static constexpr uint32_t TWO = 60, THREE = 15, RELATED = 40;  // chances, in percent
  static constexpr uint32_t NEIGHBOURS = 10;  // how far the others may be from the first, in choices
  static constexpr int64_t BETWEEN = 256;     // moves between two looks at the clock

  double score(int64_t peak, double seconds) const {
    return peak > aim_ ? seconds + dear_ * static_cast<double>(peak - aim_) : seconds;
  }

  template <class Over>
  void cool(const Pass& pass, int64_t work, const Over& over) {
    plan_ = best_;
    aim_ = limit_ - limit_ / 100 * pass.below;
    dear_ = pass.dear * forward_ / static_cast<double>(std::max<int64_t>(limit_, 1));
    simulator_.run(plan_, [](int64_t, double) { return false; });
    current_ = score(simulator_.peak, simulator_.seconds);
    double temperature = pass.temperature * forward_;
    int64_t spent = 0, moves = 0;
    for (int stage = 0; stage < STAGES; ++stage, temperature *= pass.ratio) {
      for (int64_t end = work / STAGES * (stage + 1); spent < end; spent += move(temperature)) {
        if (++moves % BETWEEN == 0 && over()) return;
      }
    }
  }

  // Change the plan, unless that costs too much more; returns the work done.
  int64_t move(double temperature) {
    int32_t places[MOST], before[MOST];
    int count = 1 + random_.percent(TWO) + random_.percent(THREE);
    for (int i = 0; i < count; ++i) {
      places[i] = i == 0 ? anywhere() : beside(places[0]);
      const Choice& choice = choices_[places[i]];
      before[i] = plan_[choice.value];
      plan_[choice.value] = another(choice, before[i]);
    }
    // Drawn before the plan is simulated, so that most simulations end early.
    double most = current_ + temperature * random_.exponential();
    if (simulator_.run(plan_, [&](int64_t peak, double s) { return score(peak, s) > most; })) {
      current_ = score(simulator_.peak, simulator_.seconds);
      if (simulator_.peak <= limit_ && simulator_.seconds < seconds_) {
        seconds_ = simulator_.seconds;
        best_ = plan_;
      }
    } else {
      for (int i = count - 1; i >= 0; --i) plan_[choices_[places[i]].value] = before[i];
    }
    return each_ + REPLAY * simulator_.count;
  }

  int32_t anywhere() {
    return static_cast<int32_t>(random_.below(static_cast<uint32_t>(choices_.size())));
  }

  // For each choice, those whose values one operation reads or makes together with its own.
  static std::vector<std::vector<int32_t>> related(const Graph& graph, const std::vector<Choice>& choices) {
    std::vector<int32_t> place(graph.values(), -1);
    for (size_t i = 0; i < choices.size(); ++i) place[choices[i].value] = static_cast<int32_t>(i);
    auto among = [&](const Lists& values, int32_t op) {
      std::vector<int32_t> found;
      for (auto v = values.first(op); v != values.last(op); ++v) {
        if (place[*v] >= 0) found.push_back(place[*v]);
      }
      return found;
    };
    std::vector<std::vector<int32_t>> made(choices.size());
    for (int32_t op = 0; op < graph.operations(); ++op) {
      auto inputs = among(graph.reads, op), outputs = among(graph.outputs, op);
      for (int32_t output : outputs) {
        for (int32_t input : inputs) {
          made[input].push_back(output);
          made[output].push_back(input);
        }
        for (int32_t other : outputs) {
          if (other != output) made[output].push_back(other);
        }
      }
    }
    return made;
  }

  // Changes that work together mostly concern values of one operation, or made one after another.
  int32_t beside(int32_t place) {
    if (random_.percent(RELATED)) {
      const auto& near = related_[place];
      if (!near.empty()) return near[random_.below(static_cast<uint32_t>(near.size()))];
    }
    if (random_.percent(30)) return anywhere();
    auto near = place + static_cast<int32_t>(random_.below(2 * NEIGHBOURS + 1)) -
                static_cast<int32_t>(NEIGHBOURS);
    return std::clamp(near, 0, static_cast<int32_t>(choices_.size()) - 1);
  }

  // A held value is dropped, another is mostly held; some get another event to be retained from.
  int32_t another(const Choice& choice, int32_t now) {
    if (now == HOLD) return random_.percent(15) ? waiting(choice) : choice.dropped();
    if (choice.holds && random_.percent(80)) return HOLD;
    return random_.percent(50) ? waiting(choice) : choice.dropped();
  }

  int32_t waiting(const Choice& choice) {
    if (choice.latest < 0) return NEVER;
    auto event = static_cast<int32_t>(
        random_.below(static_cast<uint32_t>(choice.latest + 1 + choice.never)));
    return event > choice.latest ? NEVER : event;
  }

  const std::vector<Choice>& choices_;
  const std::vector<std::vector<int32_t>> related_;
  int64_t limit_, aim_ = 0, each_ = 0;
  Plan best_, plan_;
  Simulator simulator_;
  Random random_{0x9E3779B97F4A7C15};
  double forward_ = 0, dear_ = 0, seconds_ = 0, current_ = 0;
};

}  // namespace lowtide::planner

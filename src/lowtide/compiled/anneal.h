// Annealing: from a plan that fits to a cheaper one that fits, by random changes.
//
// Problem: `planner/exchange.py` judges an exchange by the plan it changes; some much cheaper plans are
// several changes away, and the plans in between do not fit or cost more. Invariant: deterministic. The
// seed is fixed, work is counted in simulated items, and only arithmetic that rounds alike everywhere is
// used, of the math library only square roots; so the same graph, limit and plan give the same plan on
// every machine. The clock only ends a search early. Knows nothing of Python or torch. Rejected: runs in all
// passes, which find less on some networks; values drawn by their share of the replays' time; a price for
// the excess summed over the step, as in `planner/descent.py`, not the highest: on ten plans it found no
// more; passes that all start cold
// (1 % of the forward's time, not 8): in ResNet-50 at 30 % they never leave the layout of the large values
// that they are given, which costs a seventh more. Two passes instead of six, more and shorter rounds, and
// temperatures relative to the plan's time: each found less, over twenty networks.
#pragma once

#include "simulator.h"

#include <bit>
#include <chrono>
#include <cmath>

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
        limit_(limit),
        best_(std::move(plan)),
        simulator_(graph) {
    for (double cost : graph.cost) forward_ += cost;
    for (const Choice& choice : choices) {
      double size = std::sqrt(static_cast<double>(graph.nbytes[choice.value]));
      sizes_.push_back((sizes_.empty() ? 0.0 : sizes_.back()) + std::floor(size));
    }
    relate(graph);
    each_ = graph.values() + graph.operations() + graph.events() + 1;
  }

  // The cheapest plan found, or the first one if that does not fit.
  const Plan& run(const Effort& effort) {
    auto everything = [](int64_t, double) { return false; };
    if (choices_.empty() || !simulator_.run(best_, everything) || simulator_.peak > limit_) {
      return best_;
    }
    seconds_ = simulator_.seconds;
    const Plan first = best_;
    const double begun = seconds_;
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
    // Where a search ends is chance: from two places in turn, the better end is often far better.
    for (uint64_t again = 1; again <= AGAIN && seconds_ > DEAR * forward_ && !over(); ++again) {
      Plan best = std::exchange(best_, first);
      double seconds = std::exchange(seconds_, begun);
      random_ = Random(SEED + again);
      for (const Pass& pass : PASSES) {
        if (pass.anew && !over()) cool(pass, effort.work / rounds * pass.work / 100, over);
      }
      if (seconds_ >= seconds) {
        best_ = std::move(best);
        seconds_ = seconds;
      }
    }
    return best_;
  }

 private:
  // Each pass begins at the best plan so far. The hottest may lay out the large values anew, the coldest
  // stay near that plan. Those that aim below the limit, at a higher price for what is above their aim,
  // lower peaks that leave no room for a change that saves time. Each finds what the others do not. The last
  // three, which work on what those before them leave, also lay out parts of the step anew: they change runs
  // of values too, and more often the large ones.
  struct Pass {
    double temperature, ratio;  // what the first stage accepts, in forwards; then how much less
    int64_t work, below;        // percent of the work, 160 in all; how far it aims below the limit, too
    double dear;                // what exceeding the aim by as much as the limit costs, in the same units
    bool anew;                  // lays out parts anew; left out: it does not
  };
  static constexpr Pass PASSES[] = {{8e-2, 0.9075, 15, 0, 8},         {1e-2, 0.9075, 10, 0, 8},
                                    {1e-1, 0.9075, 15, 6, 100},       {6e-3, 0.915, 10, 0, 8},
                                    {1e-2, 0.9075, 30, 3, 30},        {2e-3, 0.93, 20, 0, 8},
                                    {1e-1, 0.9075, 15, 6, 100, true}, {1e-2, 0.9075, 30, 3, 30, true},
                                    {2e-3, 0.93, 15, 0, 8, true}};
  static constexpr uint64_t SEED = 0x9E3779B97F4A7C15;
  // Plans that add more than so many forwards are searched for again so many times, from the first plan on.
  static constexpr double DEAR = 0.5;
  static constexpr uint64_t AGAIN = 2;
  static constexpr int STAGES = 64;
  static constexpr int64_t ROUND = 640'000'000;  // with more work than this, there is more than one round
  // List items visited for a replayed operation.
  static constexpr int64_t REPLAY = 4;
  static constexpr uint32_t TWO = 60, THREE = 15, RELATED = 40;  // chances, in percent, as the next
  static constexpr uint32_t LARGE = 70, FEW = 75, HELD = 10, DROPPED = 6, COPIED = 4;  // the rest are swaps
  static constexpr uint32_t LONGEST = 12;     // choices in a run
  static constexpr uint32_t NEIGHBOURS = 10;  // how far the others may be from the first, in choices
  static constexpr int64_t BETWEEN = 256;     // moves between two looks at the clock

  double score(int64_t peak, double seconds) const {
    return peak > aim_ ? seconds + dear_ * static_cast<double>(peak - aim_) : seconds;
  }

  template <class Over>
  void cool(const Pass& pass, int64_t work, const Over& over) {
    plan_ = best_;
    if (pass.anew && !anew_) random_ = Random(SEED);  // what these find does not depend on draws before them
    anew_ = pass.anew;
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
    changed_.clear();
    uint32_t kind = anew_ ? random_.below(100) : 0;
    if (kind < FEW) {
      change_few();
    } else if (kind < FEW + HELD) {
      hold_run();
    } else if (kind < FEW + HELD + DROPPED) {
      drop_run();
    } else if (kind < FEW + HELD + DROPPED + COPIED) {
      copy_run();
    } else {
      swap();
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
      for (auto last = changed_.rbegin(); last != changed_.rend(); ++last) plan_[last->first] = last->second;
    }
    return each_ + REPLAY * simulator_.count;
  }

  void change(int32_t place, int32_t decision) {
    int32_t& now = plan_[choices_[place].value];
    if (now == decision) return;
    changed_.emplace_back(choices_[place].value, now);
    now = decision;
  }

  // Up to three values, mostly of one operation or made one after another.
  void change_few() {
    int count = 1 + random_.percent(TWO) + random_.percent(THREE);
    int32_t first = anywhere();
    for (int i = 0; i < count; ++i) {
      int32_t place = i == 0 ? first : beside(first);
      change(place, another(choices_[place], plan_[choices_[place].value]));
    }
  }

  // Values made one after another, as places from the first to the last but one. To hold or drop them one
  // at a time leads through plans that cost more: what recomputes one mostly recomputes those before it.
  std::pair<int32_t, int32_t> run_of_choices() {
    uint32_t count = 2 + random_.below(LONGEST - 1);
    int32_t begin = std::max(0, anywhere() - static_cast<int32_t>(random_.below(count)));
    return {begin, std::min(begin + static_cast<int32_t>(count), static_cast<int32_t>(choices_.size()))};
  }

  void hold_run() {
    auto [begin, end] = run_of_choices();
    for (int32_t place = begin; place < end; ++place) {
      if (choices_[place].latest >= 0 || random_.percent(20)) hold(place);
    }
  }

  // Drop a run: its values are retained once they are recomputed, from where backward reaches the run, or
  // each from where it is asked for. In half of the cases, some of what it is made from is held.
  void drop_run() {
    auto [begin, end] = run_of_choices();
    uint32_t when = random_.below(3);
    int32_t reached = NEVER;
    for (int32_t place = begin; place < end; ++place) {
      if (choices_[place].latest >= 0) reached = std::min(reached, choices_[place].latest);
    }
    for (int32_t place = begin; place < end; ++place) {
      const Choice& choice = choices_[place];
      bool at_once = choice.latest < 0 || when == 0;
      change(place, at_once ? choice.dropped() : when == 1 ? reached : choice.latest);
    }
    if (random_.percent(50)) return;
    for (int32_t place = begin; place < end; ++place) {
      for (int32_t input : inputs_[place]) {
        if (input < begin && random_.percent(50)) hold(input);
      }
    }
  }

  // Decide about a run as about another: layers are mostly made alike.
  void copy_run() {
    auto [begin, end] = run_of_choices();
    int32_t from = anywhere(), count = static_cast<int32_t>(choices_.size());
    for (int32_t place = begin; place < end && from < count; ++place, ++from) {
      int32_t decision = plan_[choices_[from].value];
      if (decision == HOLD) {
        hold(place);
      } else {
        const Choice& choice = choices_[place];
        change(place, decision == 0 || choice.latest < 0 ? choice.dropped() : choice.latest);
      }
    }
  }

  // Hold what a value is made from in its place, or the value in place of that.
  void swap() {
    int32_t place = anywhere();
    const Choice& choice = choices_[place];
    if (plan_[choice.value] == HOLD) {
      change(place, random_.percent(30) ? waiting(choice) : choice.dropped());
      for (int32_t input : inputs_[place]) hold(input);
    } else {
      hold(place);
      for (int32_t input : inputs_[place]) {
        if (random_.percent(70)) change(input, choices_[input].dropped());
      }
    }
  }

  void hold(int32_t place) {
    if (choices_[place].holds) change(place, HOLD);
  }

  // A choice; to lay out anew, mostly one drawn by the square root of its bytes: small values make no room.
  int32_t anywhere() {
    auto count = static_cast<uint32_t>(choices_.size());
    if (!anew_ || !random_.percent(LARGE)) return static_cast<int32_t>(random_.below(count));
    double at = sizes_.back() * (random_.below(1u << 30) * 0x1p-30);
    auto place = std::upper_bound(sizes_.begin(), sizes_.end() - 1, at) - sizes_.begin();
    return static_cast<int32_t>(place);
  }

  // For each choice, those whose values the operation that makes its own reads; and those whose values one
  // operation reads or makes together with its own.
  void relate(const Graph& graph) {
    std::vector<int32_t> place(graph.values(), -1);
    for (size_t i = 0; i < choices_.size(); ++i) place[choices_[i].value] = static_cast<int32_t>(i);
    auto among = [&](const Lists& values, int32_t op) {
      std::vector<int32_t> found;
      for (auto v = values.first(op); v != values.last(op); ++v) {
        if (place[*v] >= 0) found.push_back(place[*v]);
      }
      return found;
    };
    inputs_.resize(choices_.size());
    related_.resize(choices_.size());
    for (int32_t op = 0; op < graph.operations(); ++op) {
      auto inputs = among(graph.reads, op), outputs = among(graph.outputs, op);
      for (int32_t output : outputs) {
        inputs_[output] = inputs;
        for (int32_t input : inputs) {
          related_[input].push_back(output);
          related_[output].push_back(input);
        }
        for (int32_t other : outputs) {
          if (other != output) related_[output].push_back(other);
        }
      }
    }
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
  std::vector<std::vector<int32_t>> inputs_, related_;
  int64_t limit_, aim_ = 0, each_ = 0;
  bool anew_ = false;
  Plan best_, plan_;
  Simulator simulator_;
  std::vector<double> sizes_;  // for each choice, the square roots of the bytes up to it, added up
  std::vector<std::pair<int32_t, int32_t>> changed_;  // by the move: values, and the decisions before
  Random random_{SEED};
  double forward_ = 0, dear_ = 0, seconds_ = 0, current_ = 0;
};

}  // namespace lowtide::planner

// Prices for the rows of a linear program, such that they prove nearly as much as its optimum.
//
// Problem: `planner/rows.py` has thousands of rows, and a proof solves some dozens of such programs in
// half a second, without a solver to depend on. Invariant: prices are zero or more and finite. Nothing
// else is promised: what they prove is computed in Python, for any prices, so a poor answer costs points
// and is never wrong. Deterministic: sums have a fixed order, effort is counted in steps. Source: Applegate
// et al., *Practical large-scale linear programming using primal-dual hybrid gradient*, 2021; step sizes
// per row and column are Pock and Chambolle's. Knows nothing of Python or torch. Rejected: a simplex
// method, which is exact but several times the code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace lowtide::planner {

using Numbers = std::vector<double>;

// Least of `cost * x` with `matrix * x <= right` and `low <= x <= top`; the matrix is given by rows.
struct Program {
  Numbers cost, right, low, top, coefficients;
  std::vector<int32_t> begin, columns;

  size_t rows() const { return right.size(); }

  Numbers times(const Numbers& x) const {
    Numbers found(rows());
    for (size_t row = 0; row < rows(); ++row) {
      double sum = 0;
      for (int32_t at = begin[row]; at < begin[row + 1]; ++at) sum += coefficients[at] * x[columns[at]];
      found[row] = sum;
    }
    return found;
  }

  // The cost of each column once the rows have prices.
  Numbers reduced(const Numbers& prices) const {
    Numbers found = cost;
    for (size_t row = 0; row < rows(); ++row) {
      if (prices[row] == 0) continue;
      for (int32_t at = begin[row]; at < begin[row + 1]; ++at) {
        found[columns[at]] += prices[row] * coefficients[at];
      }
    }
    return found;
  }

  double proved(const Numbers& prices) const {
    Numbers left = reduced(prices);
    double sum = 0;
    for (size_t row = 0; row < rows(); ++row) sum -= prices[row] * right[row];
    for (size_t x = 0; x < left.size(); ++x) sum += left[x] * (left[x] > 0 ? low[x] : top[x]);
    return sum;
  }
};

struct Point {
  Numbers x, prices;
};

class Pricing {
 public:
  // `weight` says how much larger steps of prices are than those of columns; it adapts.
  Pricing(const Program& program, Point start, double weight)
      : program_(program), now_(std::move(start)), weight_(weight), wide_(program.cost.size()),
        tall_(program.rows()) {
    for (size_t row = 0; row < program.rows(); ++row) {
      for (int32_t at = program.begin[row]; at < program.begin[row + 1]; ++at) {
        tall_[row] += std::abs(program.coefficients[at]);
        wide_[program.columns[at]] += std::abs(program.coefficients[at]);
      }
    }
    for (double& size : wide_) size = 1 / std::max(size, LEAST);
    for (double& size : tall_) size = 1 / std::max(size, LEAST);
    for (size_t x = 0; x < now_.x.size(); ++x) {
      now_.x[x] = std::clamp(now_.x[x], program.low[x], program.top[x]);
    }
    best_ = now_;
    restart(now_);
  }

  // Take steps until `enough` is proved.
  void run(int64_t steps, double enough) {
    for (int64_t step = 1; step <= steps && proved_ < enough; ++step) {
      advance();
      if (step % CHECK == 0 || step == steps) compare(step);
    }
  }

  const Point& best() const { return best_; }
  double weight() const { return weight_; }

 private:
  static constexpr double LEAST = 1e-12, SHORT = 0.36, NEARER = 0.3, VIOLATED = 5.0;
  static constexpr int64_t CHECK = 40;

  void advance() {
    Numbers left = program_.reduced(now_.prices);
    ahead_ = now_.x;
    for (size_t x = 0; x < left.size(); ++x) {
      double moved = now_.x[x] - wide_[x] / weight_ * left[x];
      now_.x[x] = std::clamp(moved, program_.low[x], program_.top[x]);
      ahead_[x] = 2 * now_.x[x] - ahead_[x];
    }
    Numbers there = program_.times(ahead_);
    for (size_t row = 0; row < there.size(); ++row) {
      double moved = now_.prices[row] + tall_[row] * weight_ * (there[row] - program_.right[row]);
      now_.prices[row] = std::max(moved, 0.0);
    }
    ++count_;
    for (size_t x = 0; x < left.size(); ++x) sum_.x[x] += now_.x[x];
    for (size_t row = 0; row < there.size(); ++row) sum_.prices[row] += now_.prices[row];
  }

  // Note what the point and the mean since the last restart prove; restart from the nearer one.
  void compare(int64_t step) {
    Point mean = sum_;
    for (double& x : mean.x) x /= static_cast<double>(count_);
    for (double& price : mean.prices) price /= static_cast<double>(count_);
    double here = distance(now_), there = distance(mean), nearer = std::min(here, there);
    if (nearer >= NEARER * last_ && static_cast<double>(count_) < SHORT * static_cast<double>(step)) return;
    if (there < here) now_ = std::move(mean);
    double wide = 0, tall = 0;
    for (size_t x = 0; x < wide_.size(); ++x) {
      wide += std::pow(now_.x[x] - since_.x[x], 2) / wide_[x];
    }
    for (size_t row = 0; row < tall_.size(); ++row) {
      tall += std::pow(now_.prices[row] - since_.prices[row], 2) / tall_[row];
    }
    if (wide > LEAST && tall > LEAST) weight_ = std::sqrt(std::sqrt(tall / wide) * weight_);
    last_ = nearer;
    restart(now_);
  }

  // From the optimum: the difference between cost and what is proved, and what the rows are over.
  double distance(const Point& point) {
    double proved = program_.proved(point.prices), cost = 0, over = 0, most = 0;
    if (proved > proved_) {
      proved_ = proved;
      best_ = point;
    }
    Numbers there = program_.times(point.x);
    for (size_t x = 0; x < point.x.size(); ++x) {
      cost += program_.cost[x] * point.x[x];
      most = std::max(most, program_.cost[x]);
    }
    for (size_t row = 0; row < there.size(); ++row) over += std::max(there[row] - program_.right[row], 0.0);
    return std::abs(cost - proved) + over * most / VIOLATED;
  }

  void restart(const Point& point) {
    since_ = point;
    sum_ = {Numbers(point.x.size()), Numbers(point.prices.size())};
    count_ = 0;
  }

  const Program& program_;
  Point now_, best_, since_, sum_;
  double weight_, proved_ = -std::numeric_limits<double>::infinity(),
                  last_ = std::numeric_limits<double>::infinity();
  Numbers wide_, tall_, ahead_;
  int64_t count_ = 0;
};

}  // namespace lowtide::planner

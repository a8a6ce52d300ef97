// Pages of memory, handed out in blocks and kept for the next ones, up to a bound.
//
// Problem: what a block needs is pages, and a page is dear only when the kernel has to clear a new one. An
// allocator that gives them all back on release pays for every block; one that keeps them by the size of
// their blocks needs several times what is in use, as the sizes in a training step differ. Invariant: the
// process has no page of ours that is not counted in `live` or `dirty` (free and kept), and those are
// together at most `bound()`, unless none of what is free is a whole `unit`. The kernel brings and takes
// pages by that unit: of what is free, the parts of one are kept all or none, or it would bring more than
// is counted. Addresses cost next to nothing, and are given back only where a limit on them is in the way.
// Knows the kernel's mmap and madvise, and nothing of torch. Not thread-safe.
// Rejected: keeping blocks of equal size, which on the networks of `benchmarks/resident.py` has the kernel
// clear 4 to 100 times the pages; moving pages together with mremap, which leaves thousands of mappings;
// giving back parts of a huge page, of which the kernel frees nothing until it is short of memory.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "nodes.h"

namespace lowtide::cpu {

const size_t PAGE = sysconf(_SC_PAGESIZE);
constexpr size_t GROWTH = size_t(32) << 20;  // addresses are taken in multiples of this, as are units

constexpr size_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }
constexpr size_t rounded_down(size_t size, size_t unit) { return size / unit * unit; }

class Pages {
 public:
  size_t live = 0, peak = 0, dirty = 0, highest = 0, addresses = 0;
  std::optional<size_t> reserve;  // none: the most that was in use so far
  size_t unit = PAGE;             // or the size of a huge page; changes only without addresses

  size_t bound() const { return std::max(live, reserve.value_or(peak)); }

  // A block of at least `size` bytes; its address is a multiple of PAGE. 0 if the kernel has no more.
  uintptr_t take(size_t size) {
    if (size > SIZE_MAX - GROWTH) return 0;
    size = rounded(size, PAGE);
    if (!nodes(1)) return 0;
    auto place = kept(size);
    if (!place) place = window(size);
    if (!place && (grow(size) || (shed() && grow(size)))) place = window(size);
    if (!place) return 0;
    bring(rounded_down(*place, unit), rounded(*place + size, unit));
    cut(*place, *place + size);
    blocks_.emplace(*place, size);
    live += size;
    peak = std::max(peak, live);
    fit();
    highest = std::max(highest, live + dirty);
    return *place;
  }

  // Release a block. False if it is none of ours.
  bool give(uintptr_t place) {
    auto block = blocks_.find(place);
    if (block == blocks_.end()) return false;
    live -= block->second;
    add(place, place + block->second, true);
    blocks_.erase(block);
    fit();
    return true;
  }

  bool owns(uintptr_t place) const { return blocks_.count(place) != 0; }

  // Give free pages back to the kernel until the bound is kept.
  void fit() { fit_to(bound()); }
  void fit_to(size_t most) {
    while (!whole_.empty() && live + dirty > most && nodes(0)) {
      // The range of which the fewest units suffice, of which the rest stays; else the largest.
      size_t excess = rounded(live + dirty - most, unit);
      auto found = whole_.lower_bound({excess, 0});
      if (found == whole_.end()) --found;
      auto [size, start] = *found;
      give_back(start + size - std::min(size, excess), start + size);
    }
  }

  // Give back addresses, too: `ulimit -v` and strict overcommit count them. Beside blocks only those of large
  // ranges, as each hole splits a mapping, of which the kernel allows a process 65,530. True if there were any.
  bool shed() {
    size_t least = live ? GROWTH : PAGE;
    fit_to(0);
    size_t before = addresses;
    for (auto at = free_.begin(); at != free_.end();) {
      auto [start, range] = *at;
      size_t size = range.end - start;
      if (range.dirty || size < least || munmap(reinterpret_cast<void*>(start), size)) {
        ++at;
      } else {
        addresses -= size;
        at = erase(at);
      }
    }
    return addresses < before;
  }

 private:
  struct Free {
    uintptr_t end;
    bool dirty;  // its pages are here; else they are the kernel's, and it begins and ends with a unit
  };
  template <class Value>
  using Map = std::map<uintptr_t, Value, std::less<uintptr_t>, Node<std::pair<const uintptr_t, Value>>>;
  Map<Free> free_;                                // neighbours differ in `dirty`, or have something between
  using Size = std::pair<size_t, uintptr_t>;
  using Sizes = std::set<Size, std::less<Size>, Node<Size>>;
  Sizes sizes_;  // of the dirty ones
  Sizes whole_;  // of their whole units, where there are any
  Map<size_t> blocks_;

  // Each block that is released may become a range, with three nodes; taking one, and giving pages back,
  // changes a few ranges more.
  bool nodes(size_t more) const { return Nodes::have(3 * (blocks_.size() + more) + 32); }

  // The smallest dirty range that the block fits in: the kernel has nothing to do.
  std::optional<uintptr_t> kept(size_t size) const {
    auto found = sizes_.lower_bound({size, 0});
    return found == sizes_.end() ? std::nullopt : std::optional(found->second);
  }

  // The place with the most dirty pages, across free ranges that touch.
  std::optional<uintptr_t> window(size_t size) const {
    std::optional<uintptr_t> best;
    size_t most = 0, least = SIZE_MAX;
    for (auto first = free_.begin(); first != free_.end();) {
      auto last = first;
      for (auto next = std::next(first); next != free_.end() && next->first == last->second.end; ++next) {
        last = next;
      }
      size_t run = last->second.end - first->first;
      if (run >= size) {
        auto [place, reused] = window_in(first, std::next(last), size);
        if (!best || reused > most || (reused == most && run < least)) {
          best = place, most = reused, least = run;
        }
      }
      first = std::next(last);
    }
    return best;
  }

  using At = Map<Free>::iterator;
  using ConstAt = Map<Free>::const_iterator;

  // Among the places that begin with a dirty range: one that begins before it, moved there, loses none.
  static std::pair<uintptr_t, size_t> window_in(ConstAt first, ConstAt end, size_t size) {
    std::vector<std::pair<uintptr_t, uintptr_t>> ranges;
    std::vector<size_t> before{0};  // dirty bytes of the ranges before each
    uintptr_t low = first->first, high = std::prev(end)->second.end - size;
    for (auto at = first; at != end; ++at) {
      if (!at->second.dirty) continue;
      ranges.emplace_back(at->first, at->second.end);
      before.push_back(before.back() + (at->second.end - at->first));
    }
    auto below = [&](uintptr_t place) {
      auto after = std::upper_bound(ranges.begin(), ranges.end(), std::pair(place, UINTPTR_MAX));
      size_t index = after - ranges.begin();
      if (index == 0) return size_t(0);
      return before[index - 1] + (std::min(ranges[index - 1].second, place) - ranges[index - 1].first);
    };
    std::pair<uintptr_t, size_t> best{low, below(low + size) - below(low)};
    for (auto [start, stop] : ranges) {
      uintptr_t place = std::min(start, high);
      size_t reused = below(place + size) - below(place);
      if (reused > best.second) best = {place, reused};
    }
    return best;
  }

  bool grow(size_t size) {
    size = rounded(size, GROWTH);
    // Not MAP_NORESERVE, with which the kernel would grant more than the machine has, and end the process
    // when that is written.
    size_t more = unit - PAGE;
    void* made = mmap(nullptr, size + more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return false;
    auto low = reinterpret_cast<uintptr_t>(made), start = rounded(low, unit);
    // Nothing unused remains around them: what is mapped next touches it, and blocks may lie across.
    if (start > low) munmap(made, start - low);
    if (low + more > start) munmap(reinterpret_cast<void*>(start + size), low + more - start);
    madvise(reinterpret_cast<void*>(start), size, unit == PAGE ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
    addresses += size;
    add(start, start + size, false);
    return true;
  }

  // What the kernel brings when all between these is written. `start` and `end` begin a unit.
  void bring(uintptr_t start, uintptr_t end) {
    while (start < end) {
      auto found = free_.upper_bound(start);
      if (found != free_.begin() && std::prev(found)->second.end > start) --found;
      if (found == free_.end() || found->first >= end) return;
      uintptr_t from = std::max(found->first, start), to = std::min(found->second.end, end);
      if (!found->second.dirty) {
        cut(from, to);
        add(from, to, true);
      }
      start = to;
    }
  }

  void give_back(uintptr_t start, uintptr_t end) {
    madvise(reinterpret_cast<void*>(start), end - start, MADV_DONTNEED);
    cut(start, end);
    add(start, end, false);
  }

  // Take a part out of the free ranges that it lies in.
  void cut(uintptr_t start, uintptr_t end) {
    auto at = std::prev(free_.upper_bound(start));
    while (at != free_.end() && at->first < end) {
      auto [low, range] = *at;
      at = erase(at);
      if (low < start) insert(low, {start, range.dirty});
      if (range.end > end) insert(end, {range.end, range.dirty});
    }
  }

  void add(uintptr_t start, uintptr_t end, bool kept) {
    auto after = free_.lower_bound(start);
    if (after != free_.end() && after->first == end && after->second.dirty == kept) {
      end = after->second.end;
      after = erase(after);
    }
    if (after != free_.begin()) {
      auto before = std::prev(after);
      if (before->second.end == start && before->second.dirty == kept) {
        start = before->first;
        erase(before);
      }
    }
    insert(start, {end, kept});
  }

  void insert(uintptr_t start, Free range) {
    free_.emplace(start, range);
    if (!range.dirty) return;
    sizes_.emplace(range.end - start, start);
    if (size_t size = whole(start, range.end)) whole_.emplace(size, rounded(start, unit));
    dirty += range.end - start;
  }

  At erase(At at) {
    auto [start, range] = *at;
    if (range.dirty) {
      sizes_.erase({range.end - start, start});
      if (size_t size = whole(start, range.end)) whole_.erase({size, rounded(start, unit)});
      dirty -= range.end - start;
    }
    return free_.erase(at);
  }

  size_t whole(uintptr_t start, uintptr_t end) const {
    uintptr_t from = rounded(start, unit), to = rounded_down(end, unit);
    return from < to ? to - from : 0;
  }
};

}  // namespace lowtide::cpu

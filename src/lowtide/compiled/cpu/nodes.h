// Memory for the nodes of the containers in `pages.h`, set aside before it is needed.
//
// Problem: blocks are released by destructors, which must not throw, and to write down what is free takes
// memory. Invariant: `have` is asked when a block is taken, while it can still be refused, for all nodes that
// its release may need. Knows nothing of pages. Not thread-safe. Rejected: std::pmr's pools, which cannot
// promise that they have what will be asked for; bitmaps of pages, which are as large as the addresses.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace lowtide::cpu {

class Nodes {
 public:
  static constexpr size_t SIZE = 64;

  static bool have(size_t number) {
    constexpr size_t MORE = 64;
    while (count_ < number) {
      auto* made = static_cast<char*>(malloc(MORE * SIZE));
      if (made == nullptr) return false;
      for (size_t index = 0; index < MORE; ++index) put(made + index * SIZE);
    }
    return true;
  }

  static void* get() {
    if (!have(1)) throw std::bad_alloc();
    auto* node = first_;
    first_ = node->next;
    --count_;
    return node;
  }

  static void put(void* place) {
    first_ = new (place) Spare{first_};
    ++count_;
  }

 private:
  struct Spare {
    Spare* next;
  };
  inline static Spare* first_ = nullptr;
  inline static size_t count_ = 0;
};

template <class T>
struct Node {
  using value_type = T;
  Node() = default;
  template <class U>
  Node(const Node<U>&) {}
  T* allocate(size_t) {
    static_assert(sizeof(T) <= Nodes::SIZE);
    return static_cast<T*>(Nodes::get());
  }
  void deallocate(T* node, size_t) { Nodes::put(node); }
  bool operator==(const Node&) const { return true; }
};

}  // namespace lowtide::cpu

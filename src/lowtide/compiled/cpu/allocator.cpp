// An allocator of torch's for the CPU that keeps the process at what is in use.
//
// Problem: a limit on what torch allocates does not lower what the process takes: the C library keeps what
// is freed, and does not fit new tensors into it. Invariant: every allocation and release is reported to
// torch's profiler as by torch's own allocator, with the same sizes, so that what lowtide counts does not
// change; blocks below SMALL are that allocator's. It lives as long as the process: tensors may outlive
// anything. See `pages.h` for where blocks come from. Imports c10 and Python.
// Rejected: setting the C library's mmap threshold, which has every page of every tensor cleared by the
// kernel; another C library's allocator, which must be loaded before the process starts.

#include <Python.h>

#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <mutex>

#include "pages.h"

namespace lowtide::cpu {
namespace {

const size_t SMALL = 16 * PAGE;  // of which the rounding to pages is at most a 16th

struct Allocator final : at::Allocator {
  at::Allocator* before = nullptr;    // torch's own, or whatever was in use; never changed, as it has blocks
  at::Allocator* replaced = nullptr;  // what `remove` puts back
  std::mutex lock;
  bool used = false;  // else it is still asked by storages that grow, and by an allocator on top of it
  Pages pages;

  at::DataPtr allocate(size_t size) override;
  at::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};

Allocator& allocator() {
  static auto* made = new Allocator();
  return *made;
}

void release(void* block) {
  auto& ours = allocator();
  auto place = reinterpret_cast<uintptr_t>(block);
  if (place % PAGE == 0 && block != nullptr) {
    // Reported first: once it is free, another thread may take and report the same address.
    std::unique_lock guard(ours.lock);
    if (ours.pages.owns(place)) {
      guard.unlock();
      c10::profiledCPUMemoryReporter().Delete(block);
      guard.lock();
      ours.pages.give(place);
      return;
    }
  }
  ours.before->raw_deallocate(block);
}

at::DataPtr Allocator::allocate(size_t size) {
  uintptr_t place = 0;
  if (size >= SMALL) {
    std::lock_guard guard(lock);
    if (used) place = pages.take(size);
  }
  auto* block = place ? reinterpret_cast<void*>(place) : before->raw_allocate(size);
  if (place) c10::profiledCPUMemoryReporter().New(block, size);
  return {block, block, &release, at::Device(at::kCPU)};
}

at::DeleterFnPtr Allocator::raw_deleter() const { return &release; }

// A child process has a copy of the pages: the lock must be free in it.
void stay_usable_after_fork() {
  pthread_atfork([] { allocator().lock.lock(); }, [] { allocator().lock.unlock(); },
                 [] { allocator().lock.unlock(); });
}

// The size in which pages come and go. False if there are blocks in pages of another size.
PyObject* set_unit(PyObject*, PyObject* argument) {
  size_t unit = PyLong_AsSize_t(argument);
  if (PyErr_Occurred()) return nullptr;
  std::lock_guard guard(allocator().lock);
  auto& pages = allocator().pages;
  if (pages.unit != unit) {
    pages.shed();
    if (pages.addresses) Py_RETURN_FALSE;
    pages.unit = unit;
  }
  Py_RETURN_TRUE;
}

// Returns what is in the way, or None.
PyObject* install(PyObject*, PyObject*) {
  auto& ours = allocator();
  auto* current = c10::GetCPUAllocator();
  if (current != &ours) {
    if (current->raw_deleter() == nullptr) {
      return PyUnicode_FromString("the allocator in use does not release blocks by their address");
    }
    // Of two copies of this library, each may find the other in use: the first one found remains `before`, or
    // they would ask each other for ever.
    auto* before = ours.before;
    if (before == nullptr) ours.before = current;
    c10::SetCPUAllocator(&ours, 0);
    if (c10::GetCPUAllocator() != &ours) {
      ours.before = before;
      return PyUnicode_FromString("the allocator in use has a higher priority");
    }
    if (before == nullptr) stay_usable_after_fork();
    ours.replaced = current;
  }
  std::lock_guard guard(ours.lock);
  ours.used = true;
  Py_RETURN_NONE;
}

// Blocks that are in use remain until they are released; nothing is kept any more.
PyObject* remove(PyObject*, PyObject*) {
  auto& ours = allocator();
  if (c10::GetCPUAllocator() == &ours) c10::SetCPUAllocator(ours.replaced, 0);
  std::lock_guard guard(ours.lock);
  ours.used = false;
  ours.pages.reserve = 0;
  ours.pages.fit();
  Py_RETURN_NONE;
}

PyObject* installed(PyObject*, PyObject*) {
  auto& ours = allocator();
  std::lock_guard guard(ours.lock);
  return PyBool_FromLong(ours.used && c10::GetCPUAllocator() == &ours);
}

PyObject* reserve(PyObject*, PyObject* most) {
  std::optional<size_t> bytes;
  if (most != Py_None) {
    bytes = PyLong_AsSize_t(most);
    if (PyErr_Occurred()) return nullptr;
  }
  std::lock_guard guard(allocator().lock);
  auto& pages = allocator().pages;
  pages.reserve = bytes;
  pages.fit();
  Py_RETURN_NONE;
}

PyObject* empty_cache(PyObject*, PyObject*) {
  std::lock_guard guard(allocator().lock);
  allocator().pages.fit_to(0);
  Py_RETURN_NONE;
}

PyObject* reset_peaks(PyObject*, PyObject*) {
  std::lock_guard guard(allocator().lock);
  auto& pages = allocator().pages;
  pages.peak = pages.live;
  pages.fit();
  pages.highest = pages.live + pages.dirty;
  Py_RETURN_NONE;
}

PyObject* figures(PyObject*, PyObject*) {
  std::lock_guard guard(allocator().lock);
  auto& pages = allocator().pages;
  return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n}", "allocated", pages.live, "reserved", pages.live + pages.dirty,
                       "peak_allocated", pages.peak, "peak_reserved", pages.highest, "unit", pages.unit);
}

PyMethodDef functions[] = {
    {"set_unit", set_unit, METH_O, nullptr},
    {"install", install, METH_NOARGS, nullptr},
    {"remove", remove, METH_NOARGS, nullptr},
    {"installed", installed, METH_NOARGS, nullptr},
    {"reserve", reserve, METH_O, nullptr},
    {"empty_cache", empty_cache, METH_NOARGS, nullptr},
    {"reset_peaks", reset_peaks, METH_NOARGS, nullptr},
    {"figures", figures, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_lowtide_cpu", nullptr, -1, functions,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace lowtide::cpu

PyMODINIT_FUNC PyInit__lowtide_cpu() { return PyModule_Create(&lowtide::cpu::definition); }

// `lowtide::cpu::Pages` for Python, with its members checked and the kernel asked. See `__init__.py`.

#include <Python.h>

#include <cstring>
#include <string>

#define private public
#include "../../src/lowtide/compiled/cpu/pages.h"
#undef private

using lowtide::cpu::PAGE;
using lowtide::cpu::Pages;

namespace {

struct Object {
  PyObject_HEAD
  Pages* pages;
};

Pages& of(PyObject* self) { return *reinterpret_cast<Object*>(self)->pages; }

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject*) {
  size_t unit;
  if (!PyArg_ParseTuple(arguments, "n", &unit)) return nullptr;
  auto* self = reinterpret_cast<Object*>(type->tp_alloc(type, 0));
  self->pages = new Pages();
  self->pages->unit = unit;
  return reinterpret_cast<PyObject*>(self);
}

size_t resident(uintptr_t start, uintptr_t end) {
  std::vector<unsigned char> here((end - start) / PAGE);
  if (mincore(reinterpret_cast<void*>(start), end - start, here.data())) return SIZE_MAX;
  return PAGE * std::count_if(here.begin(), here.end(), [](unsigned char page) { return page & 1; });
}

// Everything goes back to the kernel, addresses too: a test makes many of these.
void destroy(PyObject* self) {
  auto& pages = of(self);
  for (auto [start, range] : pages.free_) munmap(reinterpret_cast<void*>(start), range.end - start);
  for (auto [start, size] : pages.blocks_) munmap(reinterpret_cast<void*>(start), size);
  delete &pages;
  Py_TYPE(self)->tp_free(self);
}

PyObject* take(PyObject* self, PyObject* size) { return PyLong_FromSize_t(of(self).take(PyLong_AsSize_t(size))); }
PyObject* give(PyObject* self, PyObject* place) { return PyBool_FromLong(of(self).give(PyLong_AsSize_t(place))); }

PyObject* reserve(PyObject* self, PyObject* most) {
  of(self).reserve = most == Py_None ? std::nullopt : std::optional(PyLong_AsSize_t(most));
  of(self).fit();
  Py_RETURN_NONE;
}

PyObject* fit_to(PyObject* self, PyObject* most) {
  of(self).fit_to(PyLong_AsSize_t(most));
  Py_RETURN_NONE;
}

PyObject* shed(PyObject* self, PyObject*) { return PyBool_FromLong(of(self).shed()); }

PyObject* figures(PyObject* self, PyObject*) {
  auto& pages = of(self);
  return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n,s:n,s:N}", "live", pages.live, "dirty", pages.dirty, "peak", pages.peak,
                       "highest", pages.highest, "addresses", pages.addresses, "bound", pages.bound(),
                       "whole", PyBool_FromLong(!pages.whole_.empty()));
}

PyObject* kernel(PyObject* self, PyObject*) {
  size_t found = 0;
  for (auto [start, range] : of(self).free_) found += resident(start, range.end);
  for (auto [start, size] : of(self).blocks_) found += resident(start, start + size);
  return PyLong_FromSize_t(found);
}

std::string flaw_of(const Pages& pages) {
  std::map<uintptr_t, uintptr_t> all;
  Pages::Sizes sizes, whole;
  size_t dirty = 0, live = 0, total = 0;
  const std::pair<const uintptr_t, Pages::Free>* before = nullptr;
  for (auto& each : pages.free_) {
    auto [start, range] = each;
    if (range.end <= start) return "an empty range";
    if (before && before->second.end == start && before->second.dirty == range.dirty) return "ranges not merged";
    before = &each;
    all.emplace(start, range.end);
    if (range.dirty) {
      dirty += range.end - start;
      sizes.emplace(range.end - start, start);
      auto from = (start + pages.unit - 1) / pages.unit * pages.unit, to = range.end / pages.unit * pages.unit;
      if (from < to) whole.emplace(to - from, from);
    } else if (start % pages.unit || range.end % pages.unit) {
      return "a part of a unit is not counted";
    }
  }
  for (auto [start, size] : pages.blocks_) {
    live += size;
    if (start % PAGE || size % PAGE || !size) return "a block that is not pages";
    if (!all.emplace(start, start + size).second) return "a block in a free range";
  }
  uintptr_t end = 0;
  for (auto [start, stop] : all) {
    if (start < end) return "two at the same place";
    end = stop;
    total += stop - start;
  }
  if (total != pages.addresses) return "lost addresses";
  if (live != pages.live || dirty != pages.dirty) return "sums differ";
  if (sizes != pages.sizes_ || whole != pages.whole_) return "indexes differ";
  return "";
}

PyObject* flaw(PyObject* self, PyObject*) {
  auto found = flaw_of(of(self));
  if (found.empty()) Py_RETURN_NONE;
  return PyUnicode_FromString(found.c_str());
}

PyObject* fill(PyObject*, PyObject* arguments) {
  size_t place, size;
  unsigned char byte;
  if (!PyArg_ParseTuple(arguments, "nnb", &place, &size, &byte)) return nullptr;
  memset(reinterpret_cast<void*>(place), byte, size);
  Py_RETURN_NONE;
}

PyObject* holds(PyObject*, PyObject* arguments) {
  size_t place, size;
  unsigned char byte;
  if (!PyArg_ParseTuple(arguments, "nnb", &place, &size, &byte)) return nullptr;
  auto* at = reinterpret_cast<unsigned char*>(place);
  return PyBool_FromLong(std::all_of(at, at + size, [&](unsigned char found) { return found == byte; }));
}

PyMethodDef methods[] = {
    {"take", take, METH_O, nullptr},           {"give", give, METH_O, nullptr},
    {"reserve", reserve, METH_O, nullptr},     {"fit_to", fit_to, METH_O, nullptr},
    {"figures", figures, METH_NOARGS, nullptr}, {"resident", kernel, METH_NOARGS, nullptr},
    {"flaw", flaw, METH_NOARGS, nullptr},      {"shed", shed, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef functions[] = {
    {"fill", fill, METH_VARARGS, nullptr},
    {"holds", holds, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {0, nullptr},
};
PyType_Spec spec = {"_cpu_pages_driver.Pages", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, slots};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu_pages_driver", nullptr, -1, functions,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu_pages_driver() {
  auto* module = PyModule_Create(&definition);
  PyModule_AddObject(module, "Pages", PyType_FromSpec(&spec));
  return module;
}

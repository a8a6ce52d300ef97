// What has to be known about an operator: `Facts` of `lowtide/tape/operators.py`, once per operator.
//
// Problem: every call needs them, and looks them up without the GIL. Invariant: a `Fact` lives as long as
// the process, so that records may point to it. Rejected: attributes of the Python object, each of which
// costs more than the dispatch of a small kernel.
#pragma once

#include "objects.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/PyInterpreter.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_map>

namespace lowtide {

// torch registers no kernel for this key, and no tensor has it; it is below autograd and Python modes and
// above the kernels. It is included while a thread records.
constexpr auto KEY = c10::DispatchKey::Fake;

// What C++ has to know of an operator's `Facts`.
struct Fact {
  PyObject* facts;
  PyObject* name;
  bool view, ambient, lazy_bits, opaque, random, blank, constant, placing, chunks, makes, fills_saved;
  bool tried_out;                  // not replayed while cuDNN tries its kernels out
  // Takes short on little: draws from no generator, is no factory, and was not seen to make much of it. Needs
  // the GIL.
  mutable bool brief = false;
  bool always_trains = false;
  int mean = -1, variance = -1, training = -1;  // positions of running statistics and the training flag
  int generator = -1;                           // where it takes a generator, or `taker` does
  std::optional<c10::OperatorHandle> taker;     // the overload that takes one, if it takes none
  int non_blocking = -1, target = -1;           // for a copy: positions of that flag and of the target
  std::vector<int> writes, fills;               // positions of arguments
  mutable c10::SmallVector<c10::IValue, 4> lists;  // see `shared_list`; needs the GIL
};

// A list of integers with the items of this one, which other records of the operator have too: strides and
// paddings are few, and torch makes a list for each call, which would be freed long after, one by one.
inline const c10::IValue& shared_list(const Fact& fact, const c10::IValue& list) {
  constexpr size_t MOST = 8;
  auto items = list.toListRef();
  auto same = [](const c10::IValue& one, const c10::IValue& other) {
    return one.isInt() && other.isInt() && one.toInt() == other.toInt();
  };
  for (const c10::IValue& known : fact.lists) {
    auto others = known.toListRef();
    if (std::equal(items.begin(), items.end(), others.begin(), others.end(), same)) return known;
  }
  if (fact.lists.size() < MOST) fact.lists.push_back(list);
  return list;
}

inline bool contains(const std::vector<int>& places, int place) {
  return std::find(places.begin(), places.end(), place) != places.end();
}

inline PyObject* facts_of_function;  // `lowtide.tape.operators.facts_of`

// One per thread, so that a lookup needs no lock.
inline ska::flat_hash_map<const c10::FunctionSchema*, const Fact*>& known_facts() {
  static thread_local ska::flat_hash_map<const c10::FunctionSchema*, const Fact*> found;
  return found;
}

inline const Fact* fact_of(const c10::OperatorHandle& op) {
  auto& found = known_facts();
  auto at = found.find(&op.schema());
  return at == found.end() ? nullptr : at->second;
}

// Operators of torch itself are never deregistered, so the address of a schema identifies them. Null for all
// others, also for those that the program has added to torch's: another one may get that address later.
inline const Fact* learn(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (name.compare(0, 6, "aten::") != 0 && name.compare(0, 7, "prims::") != 0) return nullptr;
  static auto* all = new std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Fact>>();
  std::unique_ptr<Fact>& made = (*all)[&op.schema()];
  if (made != nullptr) return known_facts()[&op.schema()] = made.get();
  py::handle func = torch::detail::getTorchApiFunction(op);
  py::object facts =
      py::reinterpret_steal<py::object>(checked(PyObject_CallOneArg(facts_of_function, func.ptr())));
  auto flag = [&](const char* field) { return facts.attr(field).cast<bool>(); };
  if (flag("added")) return nullptr;
  Owned text(checked(PyObject_GetAttrString(facts.ptr(), "name")));
  PyObject* interned_name = text.release();
  PyUnicode_InternInPlace(&interned_name);
  Fact fact{facts.ptr(),    interned_name,  flag("view"),   flag("ambient"), flag("lazy_bits"), flag("opaque"),
            flag("random"), flag("blank"),  flag("constant"), flag("placing"), flag("chunks"),
            flag("makes"),  !facts.attr("fills_saved").is_none(), flag("tried_out")};
  fact.brief = !fact.random && !fact.blank && !fact.constant;
  if (!facts.attr("statistics").is_none()) {
    std::tie(fact.mean, fact.variance, fact.training) =
        facts.attr("statistics").cast<std::tuple<int, int, int>>();
    fact.always_trains = fact.training < 0;
  }
  auto place = [&](py::handle where) {
    if (py::isinstance<py::int_>(where)) return where.cast<int>();
    auto found = op.schema().argumentIndexWithName(where.cast<std::string>());
    return found ? static_cast<int>(*found) : -1;
  };
  if (!facts.attr("generator").is_none()) {
    fact.generator = place(facts.attr("generator"));
    if (fact.generator < 0) {
      auto overload = facts.attr("with_generator").attr("_schema").attr("overload_name");
      fact.taker = c10::Dispatcher::singleton().findSchema({name, overload.cast<std::string>()});
      auto found = fact.taker ? fact.taker->schema().argumentIndexWithName("generator") : std::nullopt;
      if (found) fact.generator = static_cast<int>(*found);
    }
  }
  for (py::handle where : facts.attr("writes")) fact.writes.push_back(place(where));
  for (py::handle where : facts.attr("fills")) fact.fills.push_back(place(where));
  if (name == "aten::copy_" || name == "aten::_to_copy") {
    fact.non_blocking = place(py::str("non_blocking"));
    fact.target = name == "aten::copy_" ? 0 : place(py::str("device"));
  }
  facts.release();
  if (made == nullptr) made = std::make_unique<Fact>(std::move(fact));  // else another thread was faster
  return known_facts()[&op.schema()] = made.get();
}

}  // namespace lowtide

// The simulator, the annealing and the minimum cut as Python functions of the extension.
//
// Problem: the planner has its graph in Python lists. Invariant: arguments are checked before they are
// used as indices, and copied, so that annealing and cuts run without the GIL. Rejected: keeping a copied
// graph between calls; copying takes a negligible part of a search.
#pragma once

#include "anneal.h"
#include "flow.h"
#include "objects.h"

#include <torch/csrc/Exceptions.h>

namespace lowtide::planner {

constexpr size_t LISTS = 14;
constexpr int64_t PYTHON_NEVER = int64_t(1) << 60;

inline Lists lists_of(py::handle rows) {
  Lists made;
  for (py::handle row : rows) {
    for (auto item : row.cast<std::vector<int32_t>>()) made.items.push_back(item);
    made.begin.push_back(static_cast<int32_t>(made.items.size()));
  }
  return made;
}

inline void check(bool right) {
  if (!right) throw std::runtime_error("lowtide: these lists are not a graph's; please report this");
}

template <class Numbers>
void check_within(const Numbers& numbers, int64_t least, int64_t end) {
  for (auto number : numbers) check(number >= least && number < end);
}

inline void check_graph(const Graph& graph) {
  int32_t values = graph.values(), ops = graph.operations(), events = graph.events();
  for (size_t size : {graph.producer.size(), graph.free.size(), graph.release.size(),
                      graph.stays.size()}) {
    check(size == graph.nbytes.size());
  }
  for (size_t size : {graph.reads.begin.size() - 1, graph.outputs.begin.size() - 1,
                      graph.work.size(), graph.replayable.size()}) {
    check(size == graph.cost.size());
  }
  check(graph.event_other.size() == graph.event_value.size());
  check(graph.event_peak.size() == graph.event_value.size());
  check_within(graph.producer, -1, ops);
  check_within(graph.stays, -1, ops);
  check_within(graph.release, -1, events);
  for (const auto* ids : {&graph.reads.items, &graph.outputs.items, &graph.event_value}) {
    check_within(*ids, 0, values);
  }
  for (int32_t value = 0; value < values; ++value) {
    check(graph.free[value] || graph.producer[value] >= 0);
  }
}

// From the tuple that `tables` of `planner/polish.py` makes.
inline Graph graph_of(py::tuple lists) {
  check(lists.size() == LISTS);
  Graph graph;
  size_t next = 0;
  auto take = [&](auto& into) { into = lists[next++].cast<std::decay_t<decltype(into)>>(); };
  take(graph.nbytes);
  take(graph.producer);
  take(graph.free);
  take(graph.release);
  take(graph.stays);
  graph.reads = lists_of(lists[next++]);
  graph.outputs = lists_of(lists[next++]);
  take(graph.work);
  take(graph.cost);
  take(graph.replayable);
  take(graph.event_value);
  take(graph.event_other);
  take(graph.event_peak);
  take(graph.forward_peak);
  check_graph(graph);
  return graph;
}

inline Plan plan_of(py::handle retain, const Graph& graph) {
  Plan plan;
  for (int64_t choice : retain.cast<std::vector<int64_t>>()) {
    plan.push_back(static_cast<int32_t>(std::clamp<int64_t>(choice, HOLD, NEVER)));
  }
  check(plan.size() == graph.nbytes.size());
  return plan;
}

// simulate(graph, retain, seconds_limit): peak, seconds, replayed operations, whether it got to the end.
inline PyObject* simulate(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *lists, *retain;
  double limit;
  if (!PyArg_ParseTuple(args, "O!Od", &PyTuple_Type, &lists, &retain, &limit)) return nullptr;
  Graph graph = graph_of(py::reinterpret_borrow<py::tuple>(lists));
  Simulator simulator(graph);
  bool complete = simulator.run(plan_of(retain, graph),
                                [&](int64_t, double seconds) { return seconds > limit; });
  if (!simulator.possible) throw std::runtime_error("lowtide: this plan cannot be replayed");
  return py::make_tuple(simulator.peak, simulator.seconds, simulator.count, complete)
      .release()
      .ptr();
  END_HANDLE_TH_ERRORS
}

// anneal(graph, choices, retain, limit, work, enough, seconds): the decisions of a plan.
inline PyObject* anneal(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *lists, *rows, *retain;
  long long limit, work;
  Effort effort;
  if (!PyArg_ParseTuple(args, "O!OOLLdd", &PyTuple_Type, &lists, &rows, &retain, &limit, &work,
                        &effort.enough, &effort.seconds)) {
    return nullptr;
  }
  effort.work = work;
  Graph graph = graph_of(py::reinterpret_borrow<py::tuple>(lists));
  std::vector<Choice> choices;
  for (auto [value, latest, holds, never] :
       py::handle(rows).cast<std::vector<std::tuple<int32_t, int32_t, bool, bool>>>()) {
    check(value >= 0 && value < graph.values() && latest >= -1 && latest < graph.events());
    choices.push_back({value, latest, holds, never});
  }
  Annealing annealing(graph, choices, limit, plan_of(retain, graph));
  std::vector<int64_t> found;
  {
    py::gil_scoped_release unlocked;
    for (int32_t choice : annealing.run(effort)) {
      found.push_back(choice == NEVER ? PYTHON_NEVER : choice);
    }
  }
  return py::cast(found).release().ptr();
  END_HANDLE_TH_ERRORS
}

// minimum_cut(nodes, heads, rooms): `bytes`, for each node whether it is on the source's side.
inline PyObject* minimum_cut(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  int nodes;
  PyObject *heads, *rooms;
  if (!PyArg_ParseTuple(args, "iO!O!", &nodes, &PyList_Type, &heads, &PyList_Type, &rooms)) {
    return nullptr;
  }
  auto head = py::handle(heads).cast<std::vector<int32_t>>();
  std::vector<int64_t> room(PyList_GET_SIZE(rooms));
  check(nodes >= 2 && head.size() == room.size() && head.size() % 2 == 0);
  check_within(head, 0, nodes);
  for (size_t arc = 0; arc < room.size(); ++arc) {
    int overflow = 0;
    room[arc] = PyLong_AsLongLongAndOverflow(PyList_GET_ITEM(rooms, arc), &overflow);
    if (overflow > 0 || room[arc] > INFINITE) room[arc] = INFINITE;
  }
  if (PyErr_Occurred()) return nullptr;
  check_within(room, 0, INFINITE + 1);
  std::vector<char> side;
  {
    py::gil_scoped_release unlocked;
    side = Network(nodes, head, std::move(room)).cut();
  }
  return PyBytes_FromStringAndSize(side.data(), static_cast<Py_ssize_t>(side.size()));
  END_HANDLE_TH_ERRORS
}

}  // namespace lowtide::planner

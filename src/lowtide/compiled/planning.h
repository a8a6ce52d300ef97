// The simulator, the annealing, the minimum cut and prices as Python functions of the extension.
//
// Problem: the planner has its graph in Python lists. Invariant: arguments are checked before they are
// used as indices, and copied, so that annealing and cuts run without the GIL. Rejected: a graph that is
// read where Python has it, which would have to be checked at each access.
#pragma once

#include "anneal.h"
#include "flow.h"
#include "objects.h"
#include "prices.h"

#include <memory>

#include <torch/csrc/Exceptions.h>

namespace lowtide::planner {

constexpr size_t LISTS = 17;
constexpr int64_t PYTHON_NEVER = int64_t(1) << 60, PYTHON_ABSENT = int64_t(1) << 61;

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
                      graph.overwrites.begin.size() - 1, graph.work.size(), graph.replayable.size()}) {
    check(size == graph.cost.size());
  }
  check(graph.event_other.size() == graph.event_value.size());
  check(graph.event_peak.size() == graph.event_value.size());
  check(graph.event_after.size() == graph.event_value.size());
  check(graph.event_end.size() == graph.event_value.size());
  check_within(graph.producer, -1, ops);
  check_within(graph.stays, -1, ops);
  check_within(graph.release, -1, events);
  check_within(graph.event_end, 0, events);
  for (const auto* ids : {&graph.reads.items, &graph.outputs.items, &graph.overwrites.items,
                          &graph.event_value}) {
    check_within(*ids, 0, values);
  }
  for (int32_t value = 0; value < values; ++value) {
    check(graph.free[value] || graph.producer[value] >= 0);
  }
}

// From what `Simulator.lists` of `planner/simulate.py` gives.
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
  graph.overwrites = lists_of(lists[next++]);
  take(graph.cost);
  take(graph.replayable);
  take(graph.event_value);
  take(graph.event_other);
  take(graph.event_peak);
  take(graph.event_after);
  take(graph.event_end);
  take(graph.forward_peak);
  check_graph(graph);
  return graph;
}

inline Plan plan_of(PyObject* retain, const Graph& graph) {
  Owned list(checked(PySequence_Fast(retain, "lowtide: a plan is a list of numbers")));
  auto count = PySequence_Fast_GET_SIZE(list.get());
  check(count == static_cast<Py_ssize_t>(graph.nbytes.size()));
  Plan plan(count);
  for (Py_ssize_t value = 0; value < count; ++value) {
    int64_t choice = integer(PySequence_Fast_GET_ITEM(list.get(), value));
    plan[value] = static_cast<int32_t>(std::clamp<int64_t>(choice, HOLD, NEVER));
  }
  return plan;
}

// ---------------------------------------------------------------------- the simulator

// A graph that plans are tried on: `Compiled` of `simulate.py`.
struct Simulated {
  PyObject_HEAD
  Graph* graph;  // owned, as the next
  Simulator* simulator;
};

inline PyTypeObject* simulated_type;

// Simulator(lists)
inline PyObject* simulated_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* lists;
  if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &lists)) return nullptr;
  return leave_error([&] {
    auto graph = std::make_unique<Graph>(graph_of(py::reinterpret_borrow<py::tuple>(lists)));
    auto simulator = std::make_unique<Simulator>(*graph);
    PyObject* made = checked(type->tp_alloc(type, 0));
    as<Simulated>(made)->graph = graph.release();
    as<Simulated>(made)->simulator = simulator.release();
    return made;
  });
}

inline void simulated_delete(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete as<Simulated>(self)->simulator;
  delete as<Simulated>(self)->graph;
  type->tp_free(self);
  Py_DECREF(type);
}

template <class Numbers>
py::list list_of(const Numbers& numbers) {
  py::list made(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    PyList_SET_ITEM(made.ptr(), i, checked(PyLong_FromLongLong(numbers[i])));
  }
  return made;
}

// The fields of Python's `Trace`, in their order.
inline py::tuple trace_of(const Simulator& simulator, const Trace& seen) {
  py::list start = list_of(simulator.start());
  static PyObject* absent = checked(PyLong_FromLongLong(PYTHON_ABSENT));
  for (size_t value = 0; value < simulator.start().size(); ++value) {
    if (simulator.start()[value] == Simulator::ABSENT) {
      PyList_SetItem(start.ptr(), static_cast<Py_ssize_t>(value), Py_NewRef(absent));
    }
  }
  py::list missed;
  for (auto [value, event] : seen.dropped) missed.append(py::make_tuple(value, event));
  return py::make_tuple(list_of(seen.forward_bytes), list_of(seen.backward), list_of(seen.replay), start,
                        list_of(simulator.alive()), list_of(seen.replays), seen.operation, missed);
}

// run(retain, seconds_limit, trace): the fields of Python's `Simulation`, in their order; None: the plan
// drops what cannot be replayed.
inline PyObject* simulated_run(PyObject* self, PyObject* args) {
  PyObject* retain;
  double limit;
  int traced;
  if (!PyArg_ParseTuple(args, "Odp", &retain, &limit, &traced)) return nullptr;
  return leave_error([&] {
    const Graph& graph = *as<Simulated>(self)->graph;
    Simulator& simulator = *as<Simulated>(self)->simulator;
    Trace seen(graph);
    auto enough = [&](int64_t, double seconds) { return seconds > limit; };
    bool complete = simulator.run(plan_of(retain, graph), enough, seen);
    if (!simulator.possible) return Py_NewRef(Py_None);
    constexpr const char* phases[] = {"forward", "replay", "backward"};
    py::object trace = traced ? py::object(trace_of(simulator, seen)) : py::none();
    return py::make_tuple(simulator.peak, py::make_tuple(phases[seen.phase], seen.index),
                          simulator.seconds, simulator.count, seen.held, complete, trace)
        .release()
        .ptr();
  });
}

inline PyMethodDef simulated_methods[] = {
    {"run", simulated_run, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};

inline PyType_Slot simulated_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(simulated_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(simulated_delete)},
    {Py_tp_methods, simulated_methods},
    {0, nullptr}};

inline PyType_Spec simulated_spec = {
    "lowtide.compiled.Simulator", sizeof(Simulated), 0, Py_TPFLAGS_DEFAULT, simulated_slots};

// ---------------------------------------------------------------------- searches

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

// prices(rows, low, top, x, prices, weight, steps, enough): the best prices, the columns there and the
// weight; `rows` are the costs, where rows begin, their columns, coefficients and right sides.
inline PyObject* prices(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *lists, *low, *top, *x, *start;
  double weight, enough;
  long long steps;
  if (!PyArg_ParseTuple(args, "O!OOOOdLd", &PyTuple_Type, &lists, &low, &top, &x, &start, &weight, &steps,
                        &enough)) {
    return nullptr;
  }
  auto [cost, begin, columns, coefficients, right] =
      py::handle(lists)
          .cast<std::tuple<Numbers, std::vector<int32_t>, std::vector<int32_t>, Numbers, Numbers>>();
  Program program{cost, right, py::handle(low).cast<Numbers>(), py::handle(top).cast<Numbers>(),
                  coefficients, begin, columns};
  Point point{py::handle(x).cast<Numbers>(), py::handle(start).cast<Numbers>()};
  for (size_t size : {program.low.size(), program.top.size(), point.x.size()}) check(size == cost.size());
  check(point.prices.size() == right.size() && begin.size() == right.size() + 1);
  check(columns.size() == coefficients.size() && begin.front() == 0 && weight > 0);
  check(static_cast<size_t>(begin.back()) == columns.size() && std::is_sorted(begin.begin(), begin.end()));
  check_within(columns, 0, static_cast<int64_t>(cost.size()));
  for (size_t column = 0; column < cost.size(); ++column) check(program.low[column] <= program.top[column]);
  Pricing pricing(program, std::move(point), weight);
  {
    py::gil_scoped_release unlocked;
    pricing.run(steps, enough);
  }
  const Point& best = pricing.best();
  return py::make_tuple(best.prices, best.x, pricing.weight()).release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace lowtide::planner

"""The graph of a watched step, at each of the points at which a plan is asked for.

Problem: plans are made before a backward, of which only its first request is known, after it, and
before another one of the same step. Invariant: what is observed is not changed, but for `passed`;
what differs between these points is set aside while `rebuild` reads it. Imports `_compat`, reached,
rebuild and the planner's graph. Rejected: arguments of `rebuild` for all of it, which most of its
parts would hand on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from lowtide import _compat
from lowtide.observing.reached import Reached
from lowtide.observing.rebuild import rebuild, released_last
from lowtide.planner.graph import Graph

if TYPE_CHECKING:
    from lowtide.observing.observer import Observer


def graph_before(observer: Observer, first: int) -> Graph:
    """The step before a backward whose first request is for something that was saved after `first`
    operations. Autograd goes from the newest node to the oldest, so that what was saved later is
    not asked for in this backward, nor is what was saved for nodes that it does not reach. As long
    as autograd has it, the record can make it again, so a plan decides whether to hold it; and
    `passed` is set: another backward may ask for it."""
    reached = Reached(observer.spans)
    later = Counter(
        save
        for save, nodes in zip(observer.last_save, observer.nodes, strict=True)
        if save[1] > first + 1 or not reached.asks(nodes)
    )
    gone = Counter(save for save in observer.last_save if not observer.handles.get(save[0]))
    dead, observer.dead = observer.dead, observer.dead | later | gone
    alive = [save for save, count in later.items() if save not in gone and count > dead[save]]
    observer.passed = bool(alive)
    try:
        return released_last(whole_graph(observer), {number for number, _ in alive})
    finally:
        observer.dead = dead


def with_earlier(observer: Observer, graph: Graph) -> Graph:
    """The step with the backwards that have run before the one that `graph` has the events of. What
    that one releases, they have kept."""
    if not observer.requests:
        return graph
    before = graph_of(observer)
    if len(before.values) != len(graph.values) or len(before.ops) != len(graph.ops):
        return graph
    kept = {value for event in before.events for value in event.releases}
    kept.difference_update(value for event in graph.events for value in event.releases)
    earlier = tuple([replace(event, releases=()) for event in before.events])
    *others, last = (*earlier, *graph.events)
    last = replace(last, releases=tuple(sorted(kept.union(last.releases))))
    return replace(graph, events=(*others, last))


def whole_graph(observer: Observer) -> Graph:
    """The step before a backward that asks for all that autograd has."""
    # Those so far are of an earlier backward of the step.
    requests, observer.requests = observer.requests, []
    try:
        return graph_of(observer)
    finally:
        observer.requests = requests


def graph_of(observer: Observer) -> Graph:
    """The step as a graph. Before backward, its events are predicted from the saves."""
    if not observer.later or observer.requests:
        return rebuild(observer)
    # The gradients that earlier backwards have left are there, and what they kept of the graph this
    # one may release. The step as a whole is another matter.
    leaves, elsewhere, retains = observer.leaves.gradients, observer.elsewhere, observer.retains
    observer.leaves.gradients = dict(leaves)
    try:
        observer.leaves.look_again()
        there = leaves.keys() - observer.leaves.gradients.keys()
        observer.elsewhere += sum(leaves[key][1] for key in there)
        observer.retains = _compat.backward_retains_graph()
        return rebuild(observer)
    finally:
        observer.leaves.gradients = leaves
        observer.elsewhere, observer.retains = elsewhere, retains

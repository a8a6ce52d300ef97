"""The steps of torch's own partitioner around the choice of what forward saves for backward.

Problem: torch.compile splits a joint graph of forward and backward in two. To choose what one
saves for the other, Inductor has the public hook `custom_partitioner_fn`; the steps around that
choice have only private names, as of torch 2.13. Unnecessary when the partitioner accepts a
function that names the saved values. Invariant: as in `lowtide._compat`, of which this is the part
that only `lowtide.inductor` uses. Imports symbolic and torch. Rejected: a partitioner of our own,
which would miss what torch adds to its own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowtide._compat.symbolic import without_new_sizes


class JointGraph:
    """A joint graph, prepared as by torch's own partitioner, with what torch knows about it."""

    def __init__(self, module: Any, outputs: int, static: list[int] | None) -> None:
        from torch._functorch import config, partitioners
        from torch._functorch.compile_utils import fx_graph_cse

        module.graph.eliminate_dead_code()
        module.recompile()
        if config.cse:
            module.graph = fx_graph_cse(module.graph)
        if partitioners.has_recomputable_ops(module):
            module = partitioners.cleanup_recompute_tags(module, is_default_partition=False)
        partitioners.force_save_collectives(module)
        partitioners.force_save_effectful_ops(module)
        partitioners.force_save_bw_mutation_src(module)
        self.module = module
        self.outputs = outputs
        self.static = list(static or [])
        self.info = partitioners.classify_nodes(module, self.static, outputs)
        self.has_backward = len(self.info.required_bw_nodes) > 0
        self._cuts: dict[Any, Any] = {}

    @property
    def nodes(self) -> list[Any]:
        return list(self.module.graph.nodes)

    def tangent_dependent(self) -> set[Any]:
        """Nodes that need a gradient from outside, and so belong to the backward."""
        return set(self.info.tangents_closure)

    def results(self) -> tuple[list[Any], list[Any]]:
        """What the forward and the backward return: nodes or constants."""
        from torch._functorch.partitioners import _extract_fwd_bwd_outputs

        forward, backward, _, _ = _extract_fwd_bwd_outputs(
            self.module, num_fwd_outputs=self.outputs
        )
        return forward, backward

    def overwritten(self) -> set[Any]:
        """Inputs that are written by the forward or by what runs right after it."""
        output = next(iter(self.module.graph.find_nodes(op="output")))
        placeholders = self.module.graph.find_nodes(op="placeholder")
        by_desc = {n.meta.get("desc"): n for n in placeholders}
        found = {
            n.args[0] for n in self.module.graph.nodes if n.target is torch.ops.aten.copy_.default
        }
        for desc in (output.meta.get("desc") or [])[: self.outputs]:
            if hasattr(desc, "mutated_input"):
                known = by_desc.get(desc.mutated_input)
                found |= set(placeholders) if known is None else {known}
        return found

    def prefers_channels_last(self) -> bool:
        """Whether Inductor puts all tensors of 2D convolutions into that layout."""
        from torch._inductor.graph import GraphLowering

        return bool(GraphLowering.decide_layout_opt(self.module, is_inference=False))

    def converted_inputs(self) -> set[Any]:
        """Inputs that Inductor copies to channels last for convolutions, at the start of a forward.

        Its backward gets the copies. Inductor copies every 4D input that a convolution is computed
        from (`GraphLowering.find_nodes_prefer_channels_last`).
        """
        if not self.prefers_channels_last():
            return set()
        forward = self.info._required_fw_nodes
        wanted: set[Any] = set()
        found = set()
        for node in reversed(self.nodes):
            if node not in forward or node.target is torch.ops.aten.bmm.default:
                continue
            of_convolution = node.target is torch.ops.aten.convolution.default
            if of_convolution or not wanted.isdisjoint(node.users):
                wanted.add(node)
                value = node.meta.get("val")
                if (
                    node.op == "placeholder"
                    and isinstance(value, torch.Tensor)
                    and value.dim() == 4
                    and not value.is_contiguous(memory_format=torch.channels_last)
                ):
                    found.add(node)
        return found

    def saved_by_torch(self, budget: float = 1.0) -> list[Any]:
        """What torch's own partitioner would save, at an `activation_memory_budget`."""
        from torch._functorch.partitioners import choose_saved_values_set

        for node in reversed(self.module.graph.nodes):
            far = int(1e9)
            if node.op != "output" and not self.info.is_required_fw(node):
                far = 0
            elif node.op != "output":
                far = min([far, *(user.dist_from_bw + 1 for user in node.users)])
            node.dist_from_bw = far
        # To estimate times, torch runs operators on fakes. The sizes that these seem to find in
        # data would be taken for some of the graph.
        with _remembered_cuts(self.module.graph, self._cuts), without_new_sizes(self.nodes):
            return list(choose_saved_values_set(self.module.graph, self.info, budget))

    def split(self, saved: list[Any]) -> tuple[Any, Any]:
        """Split into two modules, where the forward hands these tensors to the backward.

        Nodes tagged by `recomputed_draw` draw the same numbers in both.
        """
        from torch._functorch import partitioners
        from torch._functorch._aot_autograd.graph_compile import is_opaque_node
        from torch._functorch.compile_utils import raise_getitems
        from torch.fx.experimental.proxy_tensor import is_sym_node

        forward = self.info._required_fw_nodes
        symbols = [
            n
            for n in self.module.graph.nodes
            if is_sym_node(n)
            and n not in self.info.tangents_closure
            and not partitioners._is_assert_only_symbool(n)
        ]
        opaque = [n for n in self.module.graph.nodes if n in forward and is_opaque_node(n)]
        one, two = partitioners._extract_fwd_bwd_modules(
            self.module,
            saved,
            saved_sym_nodes=symbols,
            saved_opaque_nodes=opaque,
            num_fwd_outputs=self.outputs,
            static_lifetime_input_nodes=self.info.static_lifetime_input_nodes,
        )
        if partitioners.has_recomputable_rng_ops(self.module):
            one, two = partitioners.functionalize_rng_ops(self.module, one, two, len(symbols))
        two = partitioners.reordering_to_mimic_autograd_engine(two)
        one, two = raise_getitems(one), raise_getitems(two)
        one = partitioners.thread_graphsafe_rng_from_hops(one, is_backward=False)
        two = partitioners.thread_graphsafe_rng_from_hops(two, is_backward=True)
        return one, two

    def split_without_backward(self) -> tuple[Any, Any]:
        from torch._functorch.partitioners import default_partition

        halves: tuple[Any, Any] = default_partition(
            self.module,
            None,
            num_fwd_outputs=self.outputs,
            static_lifetime_input_indices=self.static,
            static_lifetime_input_nodes=self.info.static_lifetime_input_nodes,
        )
        return halves


def is_called_by_another(inputs: Any) -> bool:
    """Whether what AOTAutograd wants split is a graph that the one to come calls (a region that is
    compiled once): for these it gives no inputs."""
    return not inputs


def split_by_torch(module: Any, outputs: int, static: list[int] | None) -> tuple[Any, Any]:
    """Split a joint graph as torch alone would."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    halves: tuple[Any, Any] = min_cut_rematerialization_partition(
        module, [], num_fwd_outputs=outputs, static_lifetime_input_indices=static
    )
    return halves


class Subgraph:
    """A graph that a node of another one calls (a branch, the body of a loop, a region that is
    compiled once), with as much of `JointGraph` as it takes to know its memory."""

    static: tuple[int, ...] = ()

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def nodes(self) -> list[Any]:
        return list(self.module.graph.nodes)

    def tangent_dependent(self) -> set[Any]:
        return set()

    def results(self) -> tuple[list[Any], list[Any]]:
        (returned,) = next(iter(self.module.graph.find_nodes(op="output"))).args
        return list(returned) if isinstance(returned, list | tuple) else [returned], []

    def overwritten(self) -> set[Any]:
        return set()

    def prefers_channels_last(self) -> bool:
        return False

    def converted_inputs(self) -> set[Any]:
        return set()


def subgraphs_of(module: Any, node: Any) -> list[Subgraph]:
    """The graphs that a node of this module calls."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    found = (getattr(module, n.target, None) for n in node.all_input_nodes if n.op == "get_attr")
    return [Subgraph(graph) for graph in found if isinstance(graph, torch.fx.GraphModule)]


def call_of_one(node: Any) -> list[Any] | None:
    """The operands of a node that does no more than call one graph; None for any other node."""
    name = getattr(node.target, "_name", "")
    return list(node.args[2:]) if name == "invoke_subgraph" else None


def calls_mutating_operator(node: Any) -> bool:
    """Whether a node calls an operator that writes to its arguments on copies of these."""
    return getattr(node.target, "_name", "") in ("auto_functionalized", "auto_functionalized_v2")


def keeps_iterations(node: Any) -> bool:
    """Whether a node has the results of two iterations at once, or of all of them twice."""
    return getattr(node.target, "_name", "") in ("map_impl", "while_loop")


def handed_on_by(node: Any) -> int | None:
    """How many of the results of an iteration a `scan` hands to the next, the first ones: it stacks
    the others, by the places of their elements. None for any other node."""
    return len(node.args[1]) if getattr(node.target, "_name", "") == "scan" else None


@contextlib.contextmanager
def _remembered_cuts(mine: Any, known: dict[Any, Any]) -> Iterator[None]:
    """Find each minimum cut of one graph once: other budgets ask for the same cuts."""
    from torch._functorch import partitioners

    original = partitioners.solve_min_cut

    def remembered(graph: Any, info: Any, options: Any, dont_ban: Any = None) -> Any:
        if graph is not mine:  # another thread's
            return original(graph, info, options, dont_ban)
        key = (str(options), frozenset(dont_ban or ()))
        if key not in known:
            known[key] = original(graph, info, options, dont_ban)
        saved, banned = known[key]
        return list(saved), banned.copy()

    partitioners.solve_min_cut = remembered  # type: ignore[assignment]
    try:
        yield
    finally:
        partitioners.solve_min_cut = original


def recomputed_draw(node: Any) -> None:
    """Tag a random operator to draw in the backward what it drew in the forward."""
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def untagged(node: Any) -> None:
    """Remove from a node the tag of a checkpoint inside compiled code."""
    node.meta.pop("recompute", None)


def must_be_saved(node: Any) -> bool:
    """Whether a policy inside compiled code, or torch itself, requires that a node is saved."""
    from torch.utils.checkpoint import CheckpointPolicy

    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


def is_overload(target: object) -> bool:
    """Whether an FX node calls an operator of the dispatcher."""
    return isinstance(target, torch._ops.OpOverload)


@functools.cache
def fusible_operators() -> frozenset[Any]:
    """Operators that Inductor generates code for, and can therefore fuse."""
    from torch._functorch.partitioners import get_default_op_list

    return frozenset(get_default_op_list().fusible_ops)


def as_hook(choose: Callable[..., tuple[Any, Any]]) -> Any:
    """`choose` as Inductor's `custom_partitioner_fn`."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
            return choose(gm, joint_inputs, **kwargs)

        def uuid(self) -> Any:
            return "lowtide"  # for Inductor's cache, whose keys contain the split graphs

        def __reduce__(self) -> Any:
            return str, ("lowtide",)  # only pickled into those keys, never unpickled

    return Partitioner()


@contextlib.contextmanager
def uncached_partitions() -> Iterator[None]:
    """While this is open, AOTAutograd does not use split graphs from an earlier compilation."""
    from torch._functorch import config

    with config.patch(enable_autograd_cache=False):
        yield


def compile_with_inductor(graph: Any, examples: Any, options: dict[str, Any], mode: Any) -> Any:
    """What `torch.compile` does with a graph by default."""
    return torch._TorchCompileInductorWrapper(mode, options, None)(graph, examples)


def compile_with_aot_eager(graph: Any, examples: Any, choose: Callable[..., Any]) -> Any:
    """What the backend `aot_eager` does with a graph, but with another partitioner."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    return aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=choose,
        keep_inference_input_mutations=True,
    )(graph, examples)


def traced_inputs(graph: Any, examples: Any) -> list[Any]:
    """What Dynamo has traced a graph with: its inputs without memory, some of their sizes symbols.

    Of other inputs it would not be known which of their sizes are. Dynamo removes them from the
    graph when it is done.
    """
    inputs = graph.graph.find_nodes(op="placeholder")
    found = zip(inputs, examples, strict=True)
    return [node.meta.get("example_value", example) for node, example in found]


def tracing_context() -> Any:
    """What Dynamo knows while it compiles a graph, needed to compile it a second time."""
    from torch._guards import TracingContext

    return TracingContext.try_get()


def function_being_compiled() -> int | None:
    """The number of the code object that Dynamo compiles; the same when it does so again."""
    from torch._guards import CompileContext

    compiling = CompileContext.current_compile_id()
    return None if compiling is None else compiling.frame_id


@contextlib.contextmanager
def tracing_again(context: Any) -> Iterator[None]:
    """Act as if Dynamo were compiling that graph now, and no other part of what DDP has split.

    For these parts one context counts which backward is compiled next; it has one of each.
    """
    from torch._guards import tracing

    context = copy.copy(context)
    if context is not None:
        context.ddp_optimizer_ctx = None
    with tracing(context), torch.random.fork_rng(devices=[]):
        yield


def split_for_ddp(context: Any) -> bool:
    """Whether Dynamo compiles the parts of one graph, by DDP's buckets of gradients."""
    return getattr(context, "ddp_optimizer_ctx", None) is not None


def are_fake(args: tuple[Any, ...]) -> bool:
    """Whether Dynamo calls one of these parts while it compiles, to learn what the next is given.

    Code that was compiled for that answers its first call so, whatever that call is given.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    return any(isinstance(arg, FakeTensor) for arg in args)


def broken_off(graph: Any) -> bool:
    """Whether Dynamo ended this graph at a graph break, so that more of the function follows."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    return bool(getattr(reason, "graph_break", False))

"""The memory of code that Inductor has generated, line by line.

Problem: which buffers generated code allocates, and when it frees them, is decided late in
Inductor's lowering, and known only from its wrapper's lines, which have private names. Unnecessary
when Inductor reports what its code allocates. Invariant: as in `lowtide._compat`, of which this is
the part that only `lowtide.inductor` uses; what is not understood is reported as such, never
guessed. Imports symbolic and torch. Rejected: reading the generated text, which says the same less
clearly.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lowtide._compat.symbolic import expression_hint

_HARMLESS = re.compile(r"\s*(#|assert_|$)")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of generated code that concerns memory.

    Attributes:
        kind: "take": allocate a buffer; "same": another name for one; "several": a call that
            returns new tensors, which "piece" lines name; "run": a call outside generated kernels;
            "free": drop a name.
        name: name of the buffer.
        of: the buffer that this is another name or a piece of.
        nbytes: bytes of a buffer or a piece.
        nodes: FX nodes that a call was made from.
    """

    kind: Literal["take", "same", "several", "piece", "run", "free"]
    name: str
    of: str = ""
    nbytes: int = 0
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lowered:
    """The generated code of one graph: its inputs by name, and its lines; None: not understood."""

    inputs: tuple[str, ...]
    lines: tuple[Line, ...] | None


class _Watch(threading.local):
    """The list to which graphs lowered on this thread are appended, if any."""

    found: list[Lowered] | None = None


_watch = _Watch()


@contextlib.contextmanager
def watching_lowering() -> Iterator[list[Lowered]]:
    """List the graphs that Inductor lowers meanwhile on this thread, a backward with its forward.

    By default AOTAutograd compiles a backward when it first runs. Graphs in Inductor's cache would
    not be lowered, so that cache is off; the cache of compiled kernels is still used.
    """
    from torch._functorch import config
    from torch._inductor import config as inductor_config

    _read_after_passes()
    before, _watch.found = _watch.found, []
    try:
        with (
            config.patch(force_non_lazy_backward_lowering=True),
            inductor_config.patch(fx_graph_cache=False),
        ):
            yield _watch.found
    finally:
        _watch.found = before


@functools.cache
def _read_after_passes() -> None:
    """From now on, read the lines once all buffers are planned, on threads that watch."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    original = PythonWrapperCodegen.run_wrapper_ir_passes

    def passes(self: Any, is_inference: bool) -> None:
        original(self, is_inference)
        if _watch.found is not None:
            _watch.found.append(_read(self))

    PythonWrapperCodegen.run_wrapper_ir_passes = passes  # type: ignore[method-assign]


def _read(wrapper: Any) -> Lowered:
    from torch._inductor.virtualized import V

    lines: list[Line] = []
    understood = all(_enter(line, lines) for line in wrapper.lines)
    return Lowered(tuple(V.graph.graph_inputs), tuple(lines) if understood else None)


def _enter(line: Any, lines: list[Line]) -> bool:
    """Add what a line does to memory; return whether it is understood."""
    from torch._inductor import ir
    from torch._inductor.codegen import wrapper as code

    if isinstance(line, code.AllocateLine):
        lines.append(Line("take", line.node.get_name(), nbytes=_nbytes(line.node)))
    elif isinstance(line, code.ReuseLine | code.ReinterpretLine):
        lines.append(Line("same", line.reused_as.get_name(), line.node.get_name()))
        if isinstance(line, code.ReuseLine) and line.delete_old:
            lines.append(Line("free", line.node.get_name()))
    elif isinstance(line, code.FreeLine | code.FreeIfNotReusedLine):
        if not getattr(line, "is_reused", False):
            lines.append(Line("free", line.node.get_name()))
    elif isinstance(line, code.MultiOutputLine):
        nbytes = _nbytes(_graph().get_buffer(line.result_name))
        lines.append(Line("piece", line.result_name, line.arg_name, nbytes))
    elif isinstance(line, code.ExternKernelOutLine):
        lines.append(Line("run", line.node.get_name(), nodes=_nodes(line.node)))
    elif isinstance(line, code.ExternKernelAllocLine):
        node, layout = line.node, line.node.get_output_spec()
        name, nodes = node.get_name(), _nodes(node)
        aliased = node.get_inputs_that_alias_output()
        if isinstance(layout, ir.MultiOutputLayout):
            lines.append(Line("several", name, nodes=nodes))
        elif isinstance(layout, ir.NoneLayout) or aliased:
            lines.append(Line("run", name, nodes=nodes))
            lines.extend(Line("same", name, other) for other in list(aliased)[:1])
        else:
            lines.append(Line("run", name, nodes=nodes))
            lines.append(Line("take", name, nbytes=_nbytes(node)))
    elif isinstance(line, str):
        return _HARMLESS.match(line) is not None
    else:
        return type(line).__name__ in _NO_MEMORY
    return True


_NO_MEMORY = frozenset(
    ("NullLine", "LineContext", "CommentLine", "KernelCallLine", "KernelDefinitionLine",
     "AssertSizeStrideLine", "GroupedAssertSizeStrideLine", "AssertDivByZeroLine",
     "DynamicScalarLine", "SymbolicCallArgLine",
     "UnbackedSymbolDefsLine", "IndexPutFallbackLine", "ScatterFallbackLine",
     "EnterDeviceContextManagerLine", "ExitDeviceContextManagerLine",
     "EnterDeviceContextManagerWithStreamInfoLine",
     "ExitDeviceContextManagerWithStreamInfoLine")
)  # fmt: skip


def _graph() -> Any:
    from torch._inductor.virtualized import V

    return V.graph


def _nbytes(buffer: Any) -> int:
    graph = _graph()
    size = graph.get_allocation_storage_size(buffer)
    itemsize: int = buffer.get_dtype().itemsize
    return expression_hint(size, graph.sizevars.shape_env) * itemsize


def _nodes(buffer: Any) -> tuple[str, ...]:
    """The FX nodes of a call: first its own, then those that were fused into it."""
    own = buffer.get_origin_node()
    names = [own.name] if isinstance(own, torch.fx.Node) else []
    return tuple(dict.fromkeys([*names, *sorted(node.name for node in buffer.origins)]))

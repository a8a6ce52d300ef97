"""What has to be known about an operator before it can be recorded and replayed.

Problem: a recorder sees an operator overload and must know, at once, whether it makes memory,
writes memory, draws random numbers, or does something that must not happen twice. Invariant:
facts about particular operators that recording and replaying depend on are in this file only, each
exception with its reason and a test (what operators cost and use besides is in `kernels`). Facts
are computed once per overload from its schema and tags. Imports _compat. Rejected: a hand-written
table of all operators, which is wrong for the next release.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lowtide import _compat

# Namespaces whose operators are pure functions of their arguments, save for what the schema and
# tags declare. Everything else (c10d, fsdp, user libraries, compiled kernels) may talk to other
# processes or to state the tape cannot see: it is never replayed (rule 5).
PURE_NAMESPACES = frozenset({"aten", "prims", "torchvision", "quantized_decomposed"})

# What the program says of operators of other namespaces, by their qualified names.
_declared: set[str] = set()

# Operators of those namespaces that must not be replayed nevertheless.
_NEVER_REPLAYED = frozenset(
    {
        "aten::_cudnn_rnn",  # draws dropout from a state buffer of its own
        "aten::miopen_rnn",  # the same
        "aten::_cudnn_init_dropout_state",
        "aten::_thnn_fused_lstm_cell",  # CUDA only; its workspace output is kept as it is
        "aten::set_",  # setting and resizing change which storage a tensor has
        "aten::set_data",
        "aten::resize_",
        "aten::resize_as_",
        "aten::_resize_output_",
        "aten::from_file",
        "aten::_pin_memory",
        "aten::pin_memory",
        "aten::_nested_tensor_from_mask",
    }
)

# May run cuDNN's kernels, of which `torch.backends.cudnn.benchmark` takes the fastest at the first
# call of each shape *in each thread* (torch's `BenchmarkCache` is `thread_local`): a replay, on
# autograd's thread, may get another one, with other bits. See `tape/trials.py`.
_TRIED_OUT = frozenset(
    {
        "aten::convolution",
        "aten::_convolution",
        "aten::cudnn_convolution",
        "aten::cudnn_convolution_transpose",
        "aten::cudnn_convolution_relu",
        "aten::cudnn_convolution_add_relu",
    }
)

# Views whose schema does not say so. Recorded, such a view would be an operation that makes nothing
# and is freed at once, and with it a kept value that nothing else has read yet.
_UNDECLARED_VIEWS = frozenset({"aten::_unsafe_view"})
# Is declared to write, but only affects when the allocator reuses the memory.
_TELLS_THE_ALLOCATOR = "aten::record_stream"
# Their results share the memory of their argument, but not its version counter.
_CHUNKS = frozenset({"aten::unsafe_split", "aten::unsafe_split_with_sizes"})

# Outputs are uninitialised: something that the recorder does not see may fill them (rule 5).
_BLANK = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "empty_permuted",
        "empty_quantized",
        "_efficientzerotensor",
    }
)
# Outputs are constant; buffers that foreign kernels accumulate into are made with these.
CONSTANTS = frozenset(
    {
        "zeros",
        "ones",
        "full",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "zero",
        "scalar_tensor",
    }
)
# In-place operators with which code builds a tensor piece by piece.
_PLACING = frozenset(
    {
        "index_add_",
        "index_copy_",
        "index_fill_",
        "index_put_",
        "_index_put_impl_",
        "index_reduce_",
        "scatter_",
        "scatter_add_",
        "scatter_reduce_",
        "copy_",
        "masked_fill_",
        "masked_scatter_",
        "fill_",
        "zero_",
        "triu_",
        "tril_",
        "fill_diagonal_",
        "put_",
    }
)
# In-place operators whose result does not depend on the old content.
_OVERWRITING = frozenset(
    {
        "normal_",
        "uniform_",
        "random_",
        "bernoulli_",
        "exponential_",
        "geometric_",
        "cauchy_",
        "log_normal_",
        "fill_",
        "zero_",
        "copy_",
    }
)
# Operators that fill an argument that autograd has saved *before* the call (its position): backward
# is meant to see the new content.
_FILLS_SAVED = {"rrelu_with_noise": 1, "rrelu_with_noise_": 1}
_ALWAYS = -1  # in place of the position of a training flag: it always trains, and has no such flag
# `native_batch_norm` and its kin update running statistics, which the schema does not declare.
# In training no result depends on them, so a replay gets scratch memory in their place
# (positions of mean, variance and the training flag). The first two are seen in inference mode and
# below autograd only; the last three are parts of a `SyncBatchNorm`.
_HIDDEN_STATISTICS = {
    "aten::batch_norm": (3, 4, 5),
    "aten::instance_norm": (3, 4, 5),
    "aten::native_batch_norm": (3, 4, 5),
    "aten::cudnn_batch_norm": (3, 4, 5),
    "aten::miopen_batch_norm": (3, 4, 5),
    "aten::_batch_norm_impl_index": (3, 4, 5),
    "aten::batch_norm_update_stats": (1, 2, _ALWAYS),
    "aten::batch_norm_gather_stats": (3, 4, _ALWAYS),
    "aten::batch_norm_gather_stats_with_counts": (3, 4, _ALWAYS),
}
# The same where the schema does declare that they are written.
_DECLARED_STATISTICS = {
    "aten::_native_batch_norm_legit": (3, 4, 5),
    "aten::_batch_norm_with_update": (3, 4, _ALWAYS),
}
# Families that consult global switches, which are recorded with each such operation (rule 5).
_AMBIENT_PARTS = ("conv", "mm", "matmul", "linear", "attention", "rnn", "lstm", "gru", "batch_norm",
                  "bilinear", "index", "scatter", "gather", "cumsum", "upsample", "put", "sum",
                  "pool", "mv", "dot", "einsum", "fft", "linalg", "embedding", "norm", "mean",
                  "softmax", "prod", "sort", "median", "kthvalue", "histc", "bincount",
                  "gelu", "dist", "transformer")  # fmt: skip

# Make a few times what the largest argument has, broadcast with the others, or what those of a list
# have together. So does all that torch says goes point by point, or reduces. What any other makes
# (`index`, a pad, a factory: any number of bytes out of little) is found before it runs; to have
# one in here only saves time. What a convolution takes is asked for elsewhere, see `unfolds`.
_BOUNDED = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "mv", "dot", "_softmax", "_log_softmax", "_safe_softmax",
        "native_layer_norm", "native_group_norm", "native_batch_norm", "cudnn_batch_norm",
        "_fused_rms_norm", "native_dropout", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "cat", "stack", "_to_copy", "empty_like", "zeros_like", "ones_like", "full_like",
        "rand_like", "randn_like", "bernoulli", "unsafe_split", "sum", "mean", "cumsum", "triu",
        "tril", "roll", "flip", "gather", "scatter", "scatter_add", "index_add", "index_put",
        "_prelu_kernel", "nll_loss_forward", "mse_loss", "convolution",
    )
)  # fmt: skip
_BOUNDING = {torch.Tag.pointwise, torch.Tag.reduction}


class Facts:
    """Facts about one operator overload.

    Attributes:
        name: qualified, e.g. ``aten::mm``.
        view: only makes aliases; there is nothing to record.
        opaque: is run, and never replayed.
        handed: no operator, but a call that is handed to the recorder: the forward of a custom
            Function (`functions.Rerun`), the launch of a kernel (`launches.Launch`).
        foreign: not torch's own: what it takes inside, and what its backward does, nothing tells.
        added: to torch's own operators, by the program, which may take it away again.
        tried_out: the same while cuDNN tries kernels out, see `_TRIED_OUT`.
        has_bodies: a higher-order operator, which calls functions of the program.
        writes: positions (int) or keywords (str) of arguments that it writes.
        random: draws from a generator.
        generator: where it takes one, a position or a keyword, or None.
        with_generator: what to call with one; another overload if this one takes none.
        blank, constant: a factory of uninitialised or of constant memory.
        chunks: returns parts of its first argument, with version counters of their own.
        simple: neither writes nor draws, and needs no other special treatment.
        placing: an in-place write with which code builds a tensor, see `_PLACING`.
        fills: arguments whose old content does not matter, as it is overwritten entirely.
        fills_saved: such an argument that autograd saved before the call, or None.
        unversioned: writes without moving a version counter: a fused optimizer, a launch.
        statistics: positions (mean, var, training) of running statistics, or None. The last is -1
            if it always trains.
        makes: returns something that is no alias of an argument, whatever it writes besides.
        lazy_bits: makes a lazily conjugated or negated tensor.
        ambient: recorded with the global switches: a family of kernels that consults them, or a
            factory.
        places: takes a keyword `device` for its results.
        grows: may make far more than it is given, see `_BOUNDED`.
    """

    __slots__ = (
        "added",
        "ambient",
        "blank",
        "chunks",
        "constant",
        "fills",
        "fills_saved",
        "foreign",
        "func",
        "generator",
        "grows",
        "handed",
        "has_bodies",
        "lazy_bits",
        "makes",
        "name",
        "opaque",
        "places",
        "placing",
        "random",
        "simple",
        "statistics",
        "tried_out",
        "unversioned",
        "view",
        "with_generator",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        self.func = self.with_generator = func
        # As of a higher-order operator, which has no schema: its body is Python, run as it is.
        self.name = str(func)
        self.opaque = self.has_bodies = self.foreign = self.makes = True
        self.added = self.handed = self.tried_out = self.view = self.simple = False
        self.blank = self.constant = self.placing = self.chunks = self.unversioned = False
        self.random = self.ambient = self.lazy_bits = self.grows = self.places = False
        self.generator: int | str | None = None
        self.statistics: tuple[int, int, int] | None = None
        self.writes: tuple[int | str, ...] = ()
        self.fills: frozenset[int | str] = frozenset()
        self.fills_saved: int | None = None
        schema = _compat.schema_if_any(func)
        if schema is not None:
            self._read(schema)

    def _read(self, schema: Any) -> None:
        """Take the facts from an operator's schema and tags."""
        namespace, _, base = schema.name.partition("::")
        self.name, self.has_bodies = schema.name, False
        # Those of the other namespaces that Python code has added are torch's: all of `prims`.
        self.added = namespace == "aten" and _compat.added_in_python(schema)
        self.foreign = namespace not in PURE_NAMESPACES
        declared = schema.name in _declared
        self.opaque = (self.foreign and not declared) or schema.name in _NEVER_REPLAYED
        self.opaque = self.opaque or self.added
        self.tried_out = schema.name in _TRIED_OUT and torch.version.hip is None
        self._read_aliases(schema)
        self._read_writes(schema, base)
        makes = not any("Tensor" in str(a.type) for a in schema.arguments) or base.endswith("_like")
        makes = makes or base.startswith("new_")
        self.blank = base in _BLANK
        self.constant = base in CONSTANTS and makes
        self.grows = schema.name not in _BOUNDED and _BOUNDING.isdisjoint(self.func.tags)
        self.places = any(a.name == "device" and a.kwarg_only for a in schema.arguments)
        # A declared one may draw from a default generator without saying so, as dropout inside of
        # an attention kernel does.
        self.random = torch.Tag.nondeterministic_seeded in self.func.tags or declared
        if self.random and schema.name.startswith("aten::"):  # others may draw from any besides
            self.with_generator, self.generator = _with_generator(self.func, schema)
        factory = makes and any(a.name == "dtype" for a in schema.arguments)
        self.ambient = factory or declared or any(part in base for part in _AMBIENT_PARTS)
        self.simple = (
            not (self.writes or self.opaque or self.random or self.blank or self.constant)
            and self.statistics is None
            and not self.chunks
        )

    def _read_aliases(self, schema: Any) -> None:
        self.makes = any(r.alias_info is None for r in schema.returns)
        self.writes = _written_arguments(schema)
        self.view = not self.writes and not self.opaque and _returns_only_aliases(schema)
        self.view = self.view or schema.name in _UNDECLARED_VIEWS
        if schema.name == _TELLS_THE_ALLOCATOR:
            self.view, self.writes = True, ()
        self.lazy_bits = schema.name in ("aten::_conj", "aten::_neg_view")
        self.chunks = schema.name in _CHUNKS

    def _read_writes(self, schema: Any, base: str) -> None:
        """How it writes what it writes, see `_read_aliases`, and what no schema says of that."""
        self.placing = base in _PLACING
        self.unversioned = base.startswith("_fused_") and bool(self.writes) and not schema.returns
        self.fills_saved = _FILLS_SAVED.get(base)
        fills: set[int | str] = {where for where in self.writes if isinstance(where, str)}
        if base in _OVERWRITING:
            fills.add(0)
        if self.fills_saved is not None:
            fills.add(self.fills_saved)
        self.fills = frozenset(fills)
        if schema.overload_name != "no_stats":
            hidden = _HIDDEN_STATISTICS.get(schema.name)
            self.statistics = hidden or _DECLARED_STATISTICS.get(schema.name)

    @classmethod
    def of_forward(cls, func: Any, name: str) -> Facts:
        """Of a function of the program's that may run again, see `functions.Rerun`."""
        facts = cls(func)
        facts.name, facts.opaque, facts.has_bodies = name, False, False
        facts.handed = True
        facts.random = facts.ambient = True  # as of a declared operator
        return facts

    @classmethod
    def of_launch(
        cls, func: Any, name: str, writes: tuple[int, ...], fills: frozenset[int] | None
    ) -> Facts:
        """Of a kernel that no dispatcher sees, see `launches.Launch`; `fills` is None where it is
        not replayed."""
        facts = cls(func)
        facts.name, facts.writes, facts.has_bodies, facts.makes = name, writes, False, False
        facts.opaque = fills is None
        facts.fills = frozenset() if fills is None else fills
        facts.handed = facts.unversioned = True
        return facts


def _written_arguments(schema: Any) -> tuple[int | str, ...]:
    found: list[int | str] = []
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            found.append(argument.name if argument.kwarg_only else position)
    return tuple(found)


def _with_generator(func: Any, schema: Any) -> tuple[Any, int | str | None]:
    """The overload that takes a generator and what `func` takes, and where it takes it."""
    for overload in (func, *_compat.overloads_beside(func)):
        arguments = _compat.schema_of(overload).arguments
        for position, argument in enumerate(arguments):
            if argument.name != "generator":
                continue
            others = [*arguments[:position], *arguments[position + 1 :]]
            if overload is func or _as_declared(others) == _as_declared(schema.arguments):
                return overload, argument.name if argument.kwarg_only else position
    return func, None


def _as_declared(arguments: Iterable[Any]) -> list[tuple[str, str, bool]]:
    return [(each.name, str(each.type), each.kwarg_only) for each in arguments]


def _returns_only_aliases(schema: Any) -> bool:
    returns = schema.returns
    return bool(returns) and all(r.alias_info is not None for r in returns)


FACTS: dict[int, Facts] = {}
"""By id, as hashing an overload runs Python code; `Facts.func` keeps the overload alive."""


def facts_of(func: Any) -> Facts:
    """The facts of an operator overload, computed at its first use."""
    facts = FACTS.get(id(func))
    if facts is None:
        facts = FACTS[id(func)] = Facts(func)
    return facts


def declare_replayable(name: str) -> None:
    """Record calls of this operator from now on, and replay them."""
    _declared.add(name)
    for key, facts in list(FACTS.items()):
        if facts.name == name:
            del FACTS[key]


def hidden_statistics(facts: Facts, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Positions of running statistics that this call updates and a replay must not."""
    assert facts.statistics is not None
    mean, var, training = facts.statistics
    if training != _ALWAYS and (len(args) <= training or not args[training]):
        return ()
    return (mean, var) if isinstance(args[mean], torch.Tensor) else ()

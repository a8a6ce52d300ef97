"""`lowtide.saved_tensors`: what autograd holds between forward and backward, and what made it.

Problem: "why is my memory not going down?" Invariant: each storage is counted once, however many
operations saved a view of it; rows add up to the total, which is asserted; what is in memory anyway
(parameters, inputs) is told apart from what lives for backward alone. Imports dryrun and witness.
Rejected: walking ``grad_fn._saved_*``, which counts a storage once for each of its views and knows
neither module nor line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lowtide.alike import stems, together
from lowtide.dryrun.found import OUTSIDE
from lowtide.dryrun.ledger import Ledger
from lowtide.dryrun.run import dry_run
from lowtide.dryrun.witness import Witness
from lowtide.errors import UsageError
from lowtide.limits import format_bytes
from lowtide.texttable import count_of, table

_WHY = {
    "activation": "an activation: it lives for backward alone",
    "parameter": "a parameter: it is in memory anyway",
    "buffer": "a buffer: it is in memory anyway",
    "input": "an input: your program holds it anyway",
    "unseen": "made where the recorder cannot see it (a compiled or custom kernel, a collective, "
    "a write that bypassed the dispatcher): it can only be kept",
}
_ROWS = 24
LEFT_OUT = "The regions that the step checkpoints with lowtide are left out here"
KEYS = ("module", "operator", "line", "kind", "dtype", "name")
"""What saved tensors can be summed by, see `SavedTensors.by`."""
_USUAL_KEYS = ("module", "operator", "line")
_TITLE = "What autograd holds for backward alone"
_PLURALS = (
    ("parameter", "parameters"),
    ("buffer", "buffers"),
    ("input", "inputs"),
    ("gradient", "gradients"),
)


@dataclass(frozen=True, slots=True)
class SavedRow:
    """One storage that autograd holds.

    Attributes:
        nbytes: bytes of the storage.
        kind: "activation", "parameter", "buffer", "input" or "unseen" (made where the recorder
            cannot see it).
        module: qualified name of the module that made it; "(model)" in the model's own forward,
            "" outside modules.
        operator: the operator that made it, e.g. ``aten::convolution``; "" if it was made before
            the step.
        line: the line of your program that made it, ``path:number``: the innermost one outside
            torch.
        shape: shape of the tensor that was saved.
        dtype: dtype of that tensor.
        name: name of the parameter, buffer or input; "" for any other kind.
    """

    nbytes: int
    kind: str
    module: str
    operator: str
    line: str
    shape: tuple[int, ...]
    dtype: str
    name: str

    @property
    def why(self) -> str:
        """Why it is held, in words."""
        return _WHY[self.kind]


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """Rows that have their keys in common, and their sum.

    Attributes:
        keys: the common values, in the order given to `SavedTensors.by`.
        nbytes: bytes of all these rows.
        count: number of storages.
    """

    keys: tuple[str, ...]
    nbytes: int
    count: int


@dataclass(frozen=True, repr=False)
class SavedTensors:
    """What autograd held at the end of a step's forward. Prints as a table.

    Attributes:
        rows: each storage once, largest first.
        standing: bytes that were in memory before the step, by kind ("parameter", "buffer",
            "gradient", "input"), whether autograd saved them or not.
        source: "fake": nothing was run; "recorded": from one real step.
        in_regions: whether the step checkpoints parts of itself with lowtide. They are shown as if
            it did not.
    """

    rows: tuple[SavedRow, ...]
    standing: dict[str, int]
    source: str
    in_regions: bool = False

    def __post_init__(self) -> None:
        assert sum(group.nbytes for group in self.by("module")) == self.total

    @property
    def total(self) -> int:
        """Bytes of all rows."""
        return sum(row.nbytes for row in self.rows)

    @property
    def activation_bytes(self) -> int:
        """Bytes that live for backward alone: all that recomputation could free, and what was made
        where the recorder cannot see it, which can only be kept."""
        return sum(row.nbytes for row in self.rows if row.kind in ("activation", "unseen"))

    def by(self, *keys: str) -> tuple[SavedGroup, ...]:
        """Sum the rows that have these keys in common, largest sum first.

        Args:
            *keys: any of "module", "operator", "line", "kind", "dtype" and "name".

        Raises:
            UsageError: a key is none of these.
        """
        check_keys(keys)
        sums: dict[tuple[str, ...], list[int]] = {}
        for row in self.rows:
            found = sums.setdefault(tuple(getattr(row, key) for key in keys), [0, 0])
            found[0] += row.nbytes
            found[1] += 1
        groups = (SavedGroup(names, nbytes, count) for names, (nbytes, count) in sums.items())
        return tuple(sorted(groups, key=lambda group: -group.nbytes))

    def to_dict(self) -> dict[str, Any]:
        """Return the total and all rows as JSON types."""
        return {
            "source": self.source,
            "total": self.total,
            "activation_bytes": self.activation_bytes,
            "standing": dict(self.standing),
            "rows": [
                {
                    "bytes": row.nbytes,
                    "kind": row.kind,
                    "module": row.module,
                    "operator": row.operator,
                    "line": row.line,
                    "shape": list(row.shape),
                    "dtype": row.dtype,
                    "name": row.name,
                }
                for row in self.rows
            ],
        }

    def __str__(self) -> str:
        return format_saved_tensors(self)

    def __repr__(self) -> str:
        alone, total = format_bytes(self.activation_bytes), format_bytes(self.total)
        storages = count_of(len(self.rows), "storage")
        return f"<SavedTensors: {storages}, {total}, of which {alone} for backward alone>"

    def _repr_html_(self) -> str:
        from lowtide.page.notebook import table_html

        return table_html(_TITLE, *_table_of(self, _USUAL_KEYS), _others(self))


def saved_tensors(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> SavedTensors:
    """List what autograd holds after the forward of a step, by module, operator and line.

    A dry run, like `lowtide.plan`: nothing is computed. If that is not possible, one real step is
    recorded, with a `DryRunWarning`.

    Args:
        fn: the step, as for `lowtide.plan`.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        Each storage that autograd holds, with its origin. Prints as a table.

    Raises:
        UsageError: ``fn`` cannot be called; or called inside a budget or region, or with grad
            disabled.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
        >>> held = saved_tensors(layers, torch.ones(16, 8))
        >>> [(row.module, row.nbytes) for row in held.rows if row.kind == "activation"]
        [('1', 4096)]
    """
    witness = Witness()
    step = dry_run(fn, args, kwargs, witness=witness)
    assert witness.ledger is not None
    return from_ledger(witness.ledger, step.source)


def check_keys(keys: Iterable[str]) -> None:
    """Raise `UsageError` for what saved tensors cannot be summed by."""
    for key in keys:
        if key not in KEYS:
            raise UsageError(
                f"saved tensors cannot be summed by {key!r}: use one or more of {', '.join(KEYS)}."
            )


def from_ledger(ledger: Ledger, source: str) -> SavedTensors:
    """What autograd holds in a step that a dry run saw already."""
    rows, billed = [], set()
    for saved in ledger.saved:
        if saved.block >= 0:
            if saved.block in billed:
                continue  # another value of the same storage
            billed.add(saved.block)
        site = saved.site
        rows.append(
            SavedRow(
                saved.nbytes,
                saved.kind,
                site.module,
                site.operator,
                site.line,
                saved.shape,
                saved.dtype,
                saved.name,
            )
        )
    rows.sort(key=lambda row: -row.nbytes)
    return SavedTensors(tuple(rows), dict(ledger.standing), source, ledger.in_regions)


# ---------------------------------------------------------------------------- text


def format_saved_tensors(
    saved: SavedTensors,
    *,
    by: str | Iterable[str] = ("module", "operator", "line"),
    rows: int | None = _ROWS,
) -> str:
    """Format what autograd holds as a table, largest first. Its rows add up to the printed total.

    Modules that repeat share a row: ``layers.0-11.attention``. `SavedTensors.by` has each by
    itself.

    Args:
        saved: from `saved_tensors`.
        by: what to sum by: one or more of the keys of `SavedTensors.by`.
        rows: how many rows to print; one more row sums up the others. None: all.

    Raises:
        UsageError: an unknown key or none, a negative number of rows, or ``saved`` is something
            else, such as the step itself.
    """
    if not isinstance(saved, SavedTensors):
        raise UsageError(
            "format_saved_tensors and print_saved_tensors take what lowtide.saved_tensors returns; "
            f"got {type(saved).__name__}. Write lowtide.saved_tensors(step, ...) around the step."
        )
    keys = (by,) if isinstance(by, str) else _as_keys(by)
    if rows is not None and (not isinstance(rows, int) or rows < 0):
        raise UsageError(
            f"rows is how many rows to print, 0 or more, or None for all; got {rows!r}."
        )
    titles, lines = _table_of(saved, keys, rows)
    text = [_TITLE, "", *table(titles, lines, right=4, total=True)]
    text += ["", *_others(saved)]
    return "\n".join(text)


def _as_keys(by: Iterable[str]) -> tuple[str, ...]:
    keys = tuple(by) if isinstance(by, Iterable) else (by,)
    if not keys:
        raise UsageError(
            f"a table is summed by one or more of {', '.join(KEYS)}; got none of them."
        )
    return keys


def _table_of(
    saved: SavedTensors, keys: tuple[str, ...], most: int | None = _ROWS
) -> tuple[tuple[str, ...], list[list[str]]]:
    """The titles and cells of the table: `most` rows, one for the others, and the total."""
    only = [row for row in saved.rows if row.kind in ("activation", "unseen")]
    held = SavedTensors(tuple(only), saved.standing, saved.source)
    groups = _joined(held, keys)
    shown = groups if most is None else groups[:most]
    lines = [_cells(g.nbytes, held.total, g.count, _named(keys, g.keys)) for g in shown]
    rest = groups[len(shown) :]
    if rest:
        more = sum(group.nbytes for group in rest)
        count = sum(group.count for group in rest)
        label = [f"({count_of(len(rest), 'row')} not shown)", *[""] * (len(keys) - 1)]
        lines.append(_cells(more, held.total, count, label))
    assert sum(g.nbytes for g in shown) + sum(g.nbytes for g in rest) == held.total
    lines.append(_cells(held.total, held.total, len(only), ["total", *[""] * (len(keys) - 1)]))
    return ("bytes", "size", "share", "storages", *keys), lines


def _joined(held: SavedTensors, keys: tuple[str, ...]) -> tuple[SavedGroup, ...]:
    """Sums like those of `SavedTensors.by`, in which modules that repeat are one."""
    groups = held.by(*keys)
    if "module" not in keys:
        return groups
    place, stem = keys.index("module"), stems({row.module for row in held.rows})
    # Where no column tells a Linear from the GELU beside it, their operators do.
    made: dict[str, set[str]] = {}
    for row in held.rows if "operator" not in keys else ():
        made.setdefault(row.module, set()).add(row.operator)
    alike: dict[Any, list[SavedGroup]] = {}
    for group in groups:
        module = group.keys[place]
        others = (*group.keys[:place], *group.keys[place + 1 :])
        key = (stem(module), others, frozenset(made.get(module, ())))
        alike.setdefault(key, []).append(group)
    joined = []
    for parts in alike.values():
        module = together({part.keys[place] for part in parts})
        names = (*parts[0].keys[:place], module, *parts[0].keys[place + 1 :])
        nbytes = sum(part.nbytes for part in parts)
        joined.append(SavedGroup(names, nbytes, sum(part.count for part in parts)))
    return tuple(sorted(joined, key=lambda group: -group.nbytes))


def _others(saved: SavedTensors) -> list[str]:
    """What is not in the table: what is in memory anyway, in sentences."""
    groups = {group.keys[0]: group for group in saved.by("kind")}
    parts = [
        f"{format_bytes(groups[kind].nbytes)} of {plural}"
        for kind, plural in _PLURALS
        if kind in groups
    ]
    text = [f"{LEFT_OUT}: they hold less."] if saved.in_regions else []
    if parts:
        text.append(
            f"Autograd also refers to {', '.join(parts)}: they are in memory anyway and cost "
            "nothing more."
        )
    standing = standing_text(saved.standing)
    text.append(f"In memory before the step, whatever is recomputed: {standing}.")
    return text


def standing_text(standing: dict[str, int]) -> str:
    """What was in memory before a step: ``"parameters 48.1 MiB, inputs 4.0 KiB"``."""
    parts = (f"{name} {format_bytes(standing[kind])}" for kind, name in _PLURALS
             if standing.get(kind))  # fmt: skip
    return ", ".join(parts) or "nothing"


def _named(keys: tuple[str, ...], names: tuple[str, ...]) -> list[str]:
    return [
        name or (OUTSIDE if key == "module" else "(unknown)")
        for key, name in zip(keys, names, strict=True)
    ]


def _cells(nbytes: int, total: int, count: int, labels: list[str]) -> list[str]:
    share = f"{nbytes / total:.1%}" if total else ""
    return [f"{nbytes:,}", format_bytes(nbytes), share, str(count), *labels]


def print_saved_tensors(
    saved: SavedTensors,
    *,
    by: str | Iterable[str] = ("module", "operator", "line"),
    rows: int | None = _ROWS,
) -> None:
    """Print what autograd holds as a table; the arguments are those of `format_saved_tensors`."""
    print(format_saved_tensors(saved, by=by, rows=rows))  # noqa: T201

"""Rules 1 and 5: a replay runs under the global switches that its operation ran under."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import lowtide
from against_plain import leaf
from lowtide._compat import devices, switches


@dataclass(frozen=True)
class Switch:
    """A public setting that kernels consult, and a value that it does not have by default."""

    owner: Any
    name: str
    other: Any

    def get(self) -> Any:
        return getattr(self.owner, self.name)

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        before = self.get()
        assert before != self.other
        setattr(self.owner, self.name, self.other)
        try:
            yield
            assert self.get() == self.other
        finally:
            setattr(self.owner, self.name, before)


_products, _cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
SWITCHES = [
    Switch(torch.backends.mkldnn, "enabled", False),
    Switch(torch.backends.mkldnn, "deterministic", True),
    Switch(torch.utils.deterministic, "fill_uninitialized_memory", False),
    Switch(_cudnn, "enabled", False),
    Switch(_cudnn, "benchmark", True),
    Switch(_cudnn, "deterministic", True),
    Switch(_cudnn, "allow_tf32", False),
    Switch(torch.backends.miopen, "immediate", True),
    Switch(_products, "allow_tf32", True),
    Switch(_products, "allow_fp16_reduced_precision_reduction", False),
    Switch(_products, "allow_bf16_reduced_precision_reduction", False),
    Switch(_products, "allow_fp16_accumulation", True),
]


def _label(switch: Switch) -> str:
    owner = switch.owner
    return f"{getattr(owner, '__name__', type(owner).__name__).rpartition('.')[2]}.{switch.name}"


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches of CUDA count where an accelerator was seen."""
    monkeypatch.setattr(devices, "accelerator_seen", True)


def during_replays(region: Callable[[], Any], look: Callable[[], Any]) -> list[Any]:
    """What `look` says while each operation of a region is replayed."""
    seen: list[Any] = []
    restored = switches.restored_ambient

    def watched(state: Any) -> Any:
        context = restored(state)

        class Watched:
            def __enter__(self) -> None:
                context.__enter__()
                seen.append(look())

            def __exit__(self, *error: Any) -> None:
                context.__exit__(*error)

        return Watched()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(switches, "restored_ambient", watched)
        lowtide.checkpoint(region).sum().backward()
    return seen


@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize("switch", SWITCHES, ids=_label)
def test_a_replay_finds_the_switch_as_the_forward_did(switch: Switch) -> None:
    x, before = leaf(4, 4), switch.get()

    def region() -> Any:
        with switch.changed():
            return (x.sin() @ x).exp()

    seen = during_replays(region, switch.get)
    assert seen
    assert set(seen) == {switch.other}
    assert switch.get() == before


@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize("switch", SWITCHES, ids=_label)
def test_a_switch_that_changes_after_the_forward_stays_as_it_is(switch: Switch) -> None:
    x = leaf(4, 4)
    out = lowtide.checkpoint(lambda: (x.sin() @ x).exp())
    with switch.changed():
        out.sum().backward()


@pytest.mark.usefixtures("accelerated")
def test_a_replay_leaves_what_precisions_are_taken_from() -> None:
    """That of products is the one for all until it is set itself: a replay must not set it."""
    precisions = torch.backends
    precisions.cuda.matmul.fp32_precision = "none"  # as it was before other tests set it
    before = switches.ambient()
    x = leaf(5, 5)
    try:
        precisions.fp32_precision = "ieee"
        y = lowtide.checkpoint(lambda x: (x @ x).exp().sin(), x)
        precisions.fp32_precision = "tf32"
        y.sum().backward()
        assert precisions.cuda.matmul.fp32_precision == "tf32"
    finally:
        precisions.fp32_precision = "none"
    assert switches.ambient() == before

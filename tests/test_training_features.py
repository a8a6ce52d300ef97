"""Usual features around a step: autocast and GradScaler, hooks, optimizers in backward, replicas.

Bit for bit equal to the plain step, in every way of applying lowtide. Rules of docs/semantics.md
are cited by number.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from by_hand import same
from lowtide.errors import ReplayError, UnsupportedError

WAYS = ("budget", "fit", "checkpoint", "modules")


class Part(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.second(nn.functional.gelu(self.first(self.norm(x)))))
        return out


class Net(nn.Module):
    def __init__(self, call: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.head = nn.Linear(16, 1)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x) if self.call is None else self.call(part, x)
        out: Tensor = self.head(x)
        return out


def made(way: str) -> tuple[Net, Any]:
    """A model prepared in that way, and the context for its forward and loss."""
    model = Net(lowtide.checkpoint if way == "checkpoint" else None)
    if way == "fit":
        lowtide.fit(model, 0.75)
    if way == "modules":
        lowtide.checkpoint_modules(model, Part)
    return model, lowtide.budget(0.75) if way == "budget" else contextlib.nullcontext()


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(128, 16, generator=generator) for _ in range(count)]


def left_by(model: nn.Module, *more: Any) -> list[Tensor]:
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    state = [t.clone() for t in model.state_dict().values()]
    return [*gradients, *state, *map(torch.as_tensor, more), torch.get_rng_state()]


Training = Callable[[str], list[Tensor]]


def check(training: Training, way: str, replayed: Callable[[], int]) -> None:
    expected = training("")
    assert replayed() == 0
    found = training(way)
    assert replayed() > 0, "nothing was recomputed"
    assert same(found, expected)


# --- mixed precision --------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_scaler(
    dtype: torch.dtype, inside: bool, way: str, replayed: Callable[[], int]
) -> None:
    """Scaled, unscaled, clipped, and one step that the scaler skips because of an infinity."""

    def training(how: str) -> list[Tensor]:
        model, limit = made(how)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        torch.manual_seed(1)
        left: list[Any] = []
        scales = []
        for number, batch in enumerate(batches(5)):
            optimizer.zero_grad()
            cast = torch.autocast("cpu", dtype)
            with limit if inside else cast, cast if inside else limit:
                loss = model(batch).square().mean()
                if number == 2:
                    loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            left.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            left.append(loss.detach())
        assert scales[2] == scales[1] / 2, "the infinity went unnoticed"
        return [torch.nan_to_num(tensor) for tensor in left_by(model, *left, *scales)]

    check(training, way, replayed)


@pytest.mark.parametrize("way", WAYS)
def test_a_part_out_of_autocast(way: str, replayed: Callable[[], int]) -> None:
    class Careful(Part):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

    def training(how: str) -> list[Tensor]:
        model, limit = made(how)
        torch.manual_seed(5)
        careful = Careful()
        for batch in batches(3):
            with limit, torch.autocast("cpu", torch.bfloat16):
                loss = careful(model(batch) * batch).square().mean()
            loss.backward()
        return left_by(model, loss.detach())

    check(training, way, replayed)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision(
    dtype: torch.dtype, way: str, replayed: Callable[[], int]
) -> None:
    def training(how: str) -> list[Tensor]:
        model, limit = made(how)
        model.to(dtype)
        torch.manual_seed(1)
        for batch in batches(3):
            with limit:
                loss = model(batch.to(dtype)).square().mean()
            loss.backward()
        return left_by(model, loss.detach())

    check(training, way, replayed)


# --- hooks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_activation_and_gradient_hooks_fire_once(way: str, replayed: Callable[[], int]) -> None:
    """Forward, pre-forward, full backward, tensor and parameter hooks, including those that change
    values."""

    def training(how: str) -> list[Tensor]:
        model, limit = made(how)
        fired: list[str] = []
        kept: list[Tensor] = []

        def forward(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            fired.append("forward")
            kept.append(out.detach().mean())
            out.register_hook(lambda grad: fired.append("tensor") or grad * 0.5)
            return out * 1.5

        def before(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            fired.append("before")
            return (args[0] + 1,)

        def backward(module: nn.Module, into: Any, out: Any) -> tuple[Tensor | None, ...]:
            fired.append("backward")
            return tuple(None if g is None else g * 2 for g in into)

        def parameter(grad: Tensor) -> Tensor:
            fired.append("parameter")
            return grad.clamp(-0.1, 0.1)

        part = model.parts[1]
        part.register_forward_pre_hook(before)
        part.first.register_forward_hook(forward)
        part.register_full_backward_hook(backward)
        part.second.weight.register_hook(parameter)
        torch.manual_seed(1)
        for batch in batches(3):
            with limit:
                loss = model(batch).square().mean()
            loss.backward()
        assert [fired.count(kind) for kind in ("before", "forward", "tensor", "backward",
                                               "parameter")] == [3] * 5, fired  # fmt: skip
        return left_by(model, loss.detach(), *kept)

    check(training, way, replayed)


@pytest.mark.parametrize("way", WAYS)
def test_activations_taken_out_by_a_hook(way: str, replayed: Callable[[], int]) -> None:
    """Feature extraction: the taken activations are part of the loss."""

    def training(how: str) -> list[Tensor]:
        model, limit = made(how)
        taken: list[Tensor] = []
        model.parts[1].register_forward_hook(lambda module, args, out: taken.append(out))
        torch.manual_seed(1)
        for batch in batches(3):
            taken.clear()
            with limit:
                loss = model(batch).square().mean() + taken[0].abs().mean()
            loss.backward()
        return left_by(model, loss.detach(), taken[0].detach())

    check(training, way, replayed)


# --- optimizers in backward -------------------------------------------------------------------


def in_backward(way: str) -> list[Tensor]:
    """Each parameter is updated and its gradient freed as soon as the gradient is complete."""
    model, limit = made(way)
    optimizers = {p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in model.parameters()}

    def update(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    torch.manual_seed(1)
    losses = []
    for batch in batches(4):
        with limit:
            loss = model(batch).square().mean()
        loss.backward()
        losses.append(loss.detach())
    assert all(p.grad is None for p in model.parameters())
    return left_by(model, *losses)


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_in_backward(way: str, replayed: Callable[[], int]) -> None:
    """A parameter's gradient is complete only when nothing that reads the parameter is left."""
    check(in_backward, way, replayed)


def test_a_parameter_that_is_still_read_when_it_is_updated() -> None:
    """A use without a gradient is not waited for, and would be replayed with the new values, as in
    torch's checkpoint, silently. It is refused (rule 4)."""
    weight = nn.Parameter(torch.full((4, 4), 0.5))
    other = torch.ones(4, 4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        read = (other * weight.detach()).exp().exp()
        return read.sum() + (x @ weight).sum()  # the product's backward comes first

    def update(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.add_(1)

    lowtide.checkpoint(function, torch.ones(4, 4)).backward()
    weight.register_post_accumulate_grad_hook(update)
    out = lowtide.checkpoint(function, torch.ones(4, 4))
    with pytest.raises(ReplayError, match="modified by an in-place operation"):
        out.backward()


# --- replicas ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["fit", "modules"])
def test_data_parallel_without_devices(way: str, replayed: Callable[[], int]) -> None:
    """On a machine without a GPU, DataParallel just calls its module."""

    def training(how: str) -> list[Tensor]:
        model, _ = made(how)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallel = nn.DataParallel(model)
        torch.manual_seed(1)
        for batch in batches(3):
            loss = parallel(batch).square().mean()
            loss.backward()
        return left_by(model, loss.detach())

    check(training, way, replayed)


def test_data_parallel_replicas() -> None:
    """Replicas as for several devices, called by hand: regions are copied, a budget cannot be."""
    model, _ = made("fit")
    replica = model._replicate_for_data_parallel()
    with pytest.raises(UnsupportedError, match=r"nn\.DataParallel runs copies of this model on"):
        replica(batches(1)[0])
    with torch.no_grad():
        replica(batches(1)[0])  # rule 12
    model.eval()
    model._replicate_for_data_parallel()(batches(1)[0])


# --- CUDA graphs ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_capture_is_refused(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake, as nothing can be captured without a GPU."""
    model, limit = made(way)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    refused = pytest.raises(UnsupportedError, match="cannot record while a CUDA graph is captured")
    with refused, limit:
        model(batches(1)[0])
    with torch.no_grad():
        model(batches(1)[0])  # rule 12
    monkeypatch.undo()
    with limit:
        loss = model(batches(1)[0]).square().mean()
    loss.backward()

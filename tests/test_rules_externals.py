"""Rule 4: a replay never writes externals, and never reads changed ones.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from against_plain import WAYS, Way, bits, check, counted, gradients, leaf, plainly
from lowtide import replay
from lowtide.tape.values import Ref

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def trains_on() -> None:
    """Whatever happened before, the process can still run a right step."""

    def scenario(way: Way) -> list[Tensor | None]:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh())
        x = leaf(3, 4)
        return gradients(way(model, x).square().sum(), x, *model.parameters())

    assert check(scenario).operations > 0


def test_a_backward_writes_no_external() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    x = torch.randn(6, 4)
    shift = torch.randn(6, 4)
    y = lowtide.checkpoint(lambda x: (model(x) + shift).sin().exp(), x)
    state = {**model.state_dict(keep_vars=True), "x": x, "shift": shift}
    before = {name: (bits(t), t._version) for name, t in state.items()}
    with counted() as replayed:
        y.sum().backward()
    assert replayed["native_batch_norm"] == 2
    assert {name: (bits(t), t._version) for name, t in state.items()} == before


def flat(*tensors: nn.Parameter) -> None:
    """Make parameters pieces of one memory, each with its version counter."""
    memory = torch.cat([tensor.detach().flatten() for tensor in tensors])
    parts = memory.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.data = part.view_as(tensor)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_change_of_any_piece_of_a_flat_buffer_is_noticed(changed: int) -> None:
    pieces = [nn.Parameter(torch.randn(4)) for _ in range(3)]
    flat(*pieces)

    def forward(x: Tensor) -> Tensor:
        for piece in pieces:
            x = (x * piece).sin()
        return x

    y = lowtide.checkpoint(forward, leaf(3, 4))
    with torch.no_grad():
        pieces[changed].add_(1)
    with pytest.raises(lowtide.ReplayError, match=r"modified by an in-place operation.*version 1"):
        y.sum().backward()
    trains_on()


@every_way
def test_pieces_of_a_flat_buffer_change_inside_and_between_steps(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        pieces = [nn.Parameter(torch.randn(4), requires_grad=False) for _ in range(3)]
        flat(*pieces)
        x = leaf(3, 4)

        def forward(x: Tensor) -> Tensor:
            pieces[1].mul_(0.5)
            for piece in (*pieces, *pieces):
                x = (x * piece.sin()).tanh()
                pieces[2].add_(0.25)
            return x

        found = []
        for _ in range(2):
            found += gradients(way(forward, x).square().sum(), x)
            pieces[0].sub_(0.1)
        return [*found, *pieces]

    assert check(scenario).operations > 0


@pytest.mark.parametrize("way", [lowtide.checkpoint], ids=["checkpoint"])
def test_an_optimizer_step_before_backward_is_an_error(way: Way) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = way(model, torch.randn(3, 4)).square().sum()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(lowtide.ReplayError) as caught:
        loss.backward()
    text = str(caught.value)
    assert "modified by an in-place operation after the forward read it" in text
    assert re.search(
        r"shape \(4,.*float32 \(the parameter [02]\.(weight|bias) of Sequential\)", text
    )
    assert "is optimizer.step() called before backward()?" in text
    trains_on()


def test_an_optimizer_step_before_backward_is_an_error_under_a_budget() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowtide.budget(0.5):
        loss = model(torch.randn(64, 8)).square().sum()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    named = r"the parameter [0-5]\.0\.(weight|bias) of Sequential\).*expected version"
    with pytest.raises(lowtide.ReplayError, match=named):
        loss.backward()
    trains_on()


@every_way
def test_what_is_no_module_s_has_no_name(way: Way) -> None:
    x, mask = leaf(16), torch.ones(16)
    loss = way(lambda v: (v * mask).sin().cos(), x).sum()
    mask.zero_()
    with pytest.raises(
        lowtide.ReplayError, match=r"shape \(16,\) and dtype torch.float32 that was"
    ):
        loss.backward()


class Unmade(nn.Module):
    def __init__(self) -> None:
        """Does not call that of `Module`."""


class Proxy(Unmade):
    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # which is not there yet: RecursionError


@every_way
def test_a_changed_buffer_is_named_from_the_top_of_its_model(way: Way) -> None:
    class Masked(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(16))
            self.also = [self]  # no submodule

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.mask).sin().cos()

    model = nn.ModuleDict({"body": nn.Sequential(nn.Identity(), Masked())})
    loss = way(model["body"], leaf(16)).sum()
    model["body"][1].mask.zero_()
    others = [Unmade(), Proxy(), nn.LazyLinear(4), torch.jit.script(nn.Linear(2, 2))]
    with pytest.raises(lowtide.ReplayError, match=r"the buffer body\.1\.mask of ModuleDict\)"):
        loss.backward()
    del others


@every_way
def test_a_model_that_contains_itself_has_names_too(way: Way) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh())
    loss = way(model, leaf(4)).sum()
    model[0].weight.data.mul_(1)
    with torch.no_grad():
        model[0].weight.mul_(2)
    model[1].around = model
    with pytest.raises(
        lowtide.ReplayError, match=r"the parameter (around\.)?0\.weight of (Tanh|Seq)"
    ):
        loss.backward()


@dataclass
class Parcel:
    extra: dict[str, Tensor]


# Each reads `shift` in the region in a way that no argument list shows.
READERS: dict[str, Callable[[Way, Tensor, Tensor], Tensor]] = {
    "closure": lambda way, x, shift: way(lambda x: (x + shift).sin().exp(), x),
    "kwarg": lambda way, x, shift: way(lambda x, *, by: (x + by).sin().exp(), x, by=shift),
    "positional": lambda way, x, shift: way(lambda x, by: (x + by).sin().exp(), x, shift),
    "dict": lambda way, x, shift: way(lambda x, d: (x + d["by"]).sin().exp(), x, {"by": shift}),
    "dataclass": lambda way, x, shift: way(
        lambda x, p: (x + p.extra["by"]).sin().exp(), x, Parcel({"by": shift})
    ),
    "view": lambda way, x, shift: way(lambda x: (x + shift.view(2, 4)[1, 2]).sin().exp(), x),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_an_external_changed_before_backward_is_an_error(
    read: Callable[[Way, Tensor, Tensor], Tensor],
) -> None:
    x, shift = leaf(8), torch.randn(8)
    y = read(lowtide.checkpoint, x, shift)
    shift.mul_(2)
    with pytest.raises(lowtide.ReplayError, match="modified by an in-place operation after"):
        y.sum().backward()
    trains_on()


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_an_external_left_alone_is_read(read: Callable[[Way, Tensor, Tensor], Tensor]) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x, shift = leaf(8), torch.randn(8)
        return gradients(read(way, x, shift).sum(), x)

    assert check(scenario)["add"] == 1


def test_an_external_changed_after_backward_is_no_matter() -> None:
    x, shift = leaf(8), torch.randn(8)
    y = lowtide.checkpoint(lambda x: (x + shift).sin().exp(), x)
    y.sum().backward()
    shift.mul_(2)


def test_an_external_saved_as_it_is_and_changed_is_an_error_as_in_autograd() -> None:
    """Hooks disable autograd's own check, so the handle makes it (rule 4)."""
    x, other = leaf(8), torch.randn(8)
    y = lowtide.checkpoint(lambda x: x * other, x)
    other.add_(1)
    with pytest.raises(lowtide.ReplayError, match="is at version 1, expected version 0"):
        y.sum().backward()


def test_a_change_that_no_version_counter_shows_is_not_seen() -> None:
    """A documented limit: `.data` bypasses autograd's checks, and so this one."""

    def scenario(way: Way) -> list[Tensor | None]:
        x, other = leaf(8), torch.randn(8)
        y = way(lambda x: x * other, x)
        other.data.mul_(2)
        return gradients(y.sum(), x)

    check(scenario)  # saved as it is: changed in the plain step as well
    x, shift = torch.zeros(8, requires_grad=True), torch.zeros(8)
    y = lowtide.checkpoint(lambda x: (x + shift).sin(), x)
    shift.data.add_(1)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(8).cos())  # of the changed tensor


@every_way
def test_a_rebound_name_is_not_a_change(way: Way) -> None:
    """`closure = other` leaves the tensor alone, so the plain result must come out."""

    def scenario(way: Way) -> list[Tensor | None]:
        x, shift = leaf(8), torch.randn(8)
        extra = {"by": shift}

        def region(x: Tensor) -> Tensor:
            return (x + shift * extra["by"]).sin().exp()

        y = way(region, x)
        extra["by"] = torch.zeros(8)
        shift = torch.zeros(8)
        return gradients(y.sum(), x)

    check(scenario, way)


def test_an_output_changed_in_place_after_the_region() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8)
        y = way(lambda x: x.sin() * 2, x)
        y.mul_(3)
        return gradients(way(lambda y: y.cos().exp(), y).sum(), x)

    check(scenario)


# Where plain PyTorch works, lowtide works: buffers that move between forward and backward.


def discriminator(norm: bool) -> nn.Module:
    wrap = (lambda m: m) if norm else nn.utils.parametrizations.spectral_norm
    layers: list[nn.Module] = [wrap(nn.Linear(6, 8)), nn.LeakyReLU(0.2)]
    layers += [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(*layers, wrap(nn.Linear(8, 1)))


@every_way
@pytest.mark.parametrize("norm", [False, True], ids=["spectral", "batch"])
def test_a_gan_runs_its_discriminator_twice_before_one_backward(way: Way, norm: bool) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        model = discriminator(norm)
        fake = leaf(5, 6)
        on_real = way(model, torch.randn(5, 6))
        on_fake = way(model, fake)
        loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        return [*gradients(loss, fake, *model.parameters()), *model.buffers()]

    check(scenario, way)


def test_a_gan_whose_second_forward_is_not_in_a_region() -> None:
    """The buffers move where nothing records; what the region read of them can be replayed."""

    def scenario(way: Way) -> list[Tensor | None]:
        model = discriminator(norm=False)
        fake = leaf(5, 6)
        loss = way(model, fake).exp().sum() + model(torch.randn(5, 6)).sum()
        return [*gradients(loss, fake, *model.parameters()), *model.buffers()]

    assert check(scenario).operations > 0


@pytest.mark.parametrize("seen", [False, True])
def test_a_frozen_norm_whose_statistics_move_between(seen: bool) -> None:
    """They move without a new version, so a replay reads them from a copy."""

    def scenario(way: Way) -> list[Tensor | None]:
        norm = nn.BatchNorm1d(4)
        x = leaf(6, 4)
        norm.eval()
        first = way(lambda x: norm(x).sin().exp(), x)
        norm.train()
        again = way if seen else plainly
        second = again(lambda x: norm(x).sin().exp(), x)
        return [*gradients((first + second).sum(), x, *norm.parameters()), *norm.buffers()]

    check(scenario)


def test_the_statistics_of_a_frozen_norm_stand_where_they_stand_among_its_arguments() -> None:
    """What is known of the arguments (whose gradients backward makes) is matched by order."""
    norm, x = nn.BatchNorm1d(4).eval(), leaf(6, 4)
    met: list[Any] = []
    replay.listeners.append(met.extend)
    try:
        lowtide.checkpoint(lambda x: norm(x.sin()).exp(), x).sum().backward()
    finally:
        replay.listeners.remove(met.extend)
    (op,) = [op for op in met if "batch_norm" in op.facts.name]
    assert [ref.value for ref in op.refs] == [
        argument.value for argument in op.args if isinstance(argument, Ref)
    ]
    assert [ref.value.number >= 0 for ref in op.refs] == [True, False, False, False, False]


def test_statistics_that_are_saved_and_read_and_then_move() -> None:
    """Autograd reads saved statistics as they are at backward; a replay, as they were."""

    def scenario(way: Way) -> list[Tensor | None]:
        frozen, trained = nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4)
        frozen.running_mean = trained.running_mean = torch.rand(4)
        scale = leaf(4)
        x = leaf(6, 4)

        def region(x: Tensor) -> Tensor:
            assert frozen.running_mean is not None
            y = frozen(x) * (frozen.running_mean.tanh() * scale).exp()
            return trained(y).sin().exp()

        loss = way(region, x).sum()
        return [*gradients(loss, x, scale, *frozen.parameters()), *trained.buffers()]

    check(scenario)


def test_a_parameter_changed_inside_the_region_is_seen() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        layer = nn.Linear(4, 4)
        x = leaf(3, 4)

        def region(x: Tensor) -> Tensor:
            with torch.no_grad():
                layer.weight.clamp_(-0.2, 0.2)
            return layer(x).sin().exp()

        return gradients(way(region, x).sum(), x, *layer.parameters())

    check(scenario)


@every_way
@pytest.mark.parametrize("where", ["inference", "between", "backward"])
def test_statistics_that_move_where_nothing_is_recorded(where: str, way: Way) -> None:
    """In inference mode, between two backwards of a context, and in a backward inside of it."""

    def scenario(way: Way) -> list[Tensor | None]:
        norm, x = nn.BatchNorm1d(64), leaf(512, 64)

        def forward() -> tuple[Tensor, Tensor]:
            y = x.sin()
            if where == "backward":
                y = torch_checkpoint(norm, x, use_reentrant=False)
            assert norm.running_mean is not None
            z = x * (norm.running_mean + 1)
            for _ in range(6):
                z = z.tanh().sin()
            return z.exp().sum(), y.sum()

        def step() -> None:
            z, y = forward()
            if where == "inference":
                with torch.inference_mode():
                    norm(x)
            else:
                y.backward(retain_graph=True)
            if where == "between":
                with torch.no_grad():
                    norm(x)
            z.backward()

        way(step)
        return [x.grad, *norm.buffers()]

    assert check(scenario, way).operations > 0


@every_way
def test_externals_that_are_written_in_inference_mode(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x, average = leaf(64), torch.rand(64)

        def region(x: Tensor) -> Tensor:
            y = (x * average.sqrt()).tanh().sin()
            z = (y + average).sin().exp()
            with torch.inference_mode():
                average.mul_(0.9).add_(y.mean())
            return z

        return [*gradients(way(region, x).sum(), x), average]

    check(scenario, way)


@every_way
def test_a_fused_optimizer_between_forward_and_backward_shows_no_version(way: Way) -> None:
    """Autograd does not notice it, and reads the new weights. What is replayed has read the old."""

    def scenario(way: Way) -> list[Tensor | None]:
        model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()), leaf(4, 6)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

        def region(x: Tensor) -> Tensor:
            y: Tensor = model(x).exp().sum()
            optimizer.step()
            return y

        return gradients(way(region, x), x, *model.parameters())

    check(scenario, way)


class WritesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return x.mul_(grad * 3)


@pytest.mark.parametrize(
    "view", [lambda x: x, lambda x: x.t(), lambda x: x[2:], torch.view_as_real]
)
def test_a_custom_backward_that_writes_what_it_has_saved(view: Callable[[Tensor], Tensor]) -> None:
    """What else is made from it is replayed from its old content."""

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(6, 6, dtype=torch.complex64 if view is torch.view_as_real else torch.float32)

        def region(x: Tensor) -> Tensor:
            y = x + 1
            z = (y * 2).tanh()
            return z.abs().sum() + WritesInBackward.apply(view(y))  # its backward comes first

        return gradients(way(region, x), x)

    assert check(scenario)["add"] > 1


def test_a_custom_backward_that_writes_an_external() -> None:
    x = leaf(6, 6)
    given = x + 1

    def region(y: Tensor) -> Tensor:
        z = (y * 2).tanh()
        return z.sum() + WritesInBackward.apply(y.t())

    loss = lowtide.checkpoint(region, given)
    with pytest.raises(lowtide.ReplayError, match="modified by an in-place operation"):
        loss.backward()


@pytest.mark.parametrize("read", [False, True])
def test_a_write_to_a_part_of_a_buffer_copies_nothing(read: bool) -> None:
    """A cache of positions, or a queue: rule 13 has no room for a copy of all of it."""
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
    x = torch.randn(512, 32)

    def step(cache: Tensor, way: Way) -> list[Tensor | None]:
        def forward(x: Tensor) -> Tensor:
            for layer in layers:
                x = layer(x).sin()
                if layer is layers[2]:
                    cache[:16] = x.detach()[:16]
                if layer is layers[4] and read:
                    x = x + cache[:16].sum(0)
            return x.square().sum()

        layers.zero_grad()
        return gradients(way(forward, x), cache, *layers.parameters())

    plain_cache, cache = torch.zeros(1 << 14, 32), torch.zeros(1 << 14, 32)
    limit = lowtide.measure(lambda: step(plain_cache, plainly)).peak_bytes * 4 // 5
    expected = [None if t is None else bits(t) for t in step(plain_cache, plainly)]
    budget = lowtide.budget(limit)

    def inside(function: Any, *args: Any) -> Any:
        with budget:
            return function(*args)

    with counted() as replayed:
        found = [None if t is None else bits(t) for t in step(cache, inside)]
    assert found == expected
    assert bits(cache) == bits(plain_cache)
    assert replayed.operations
    measured = budget.report().measured_peak
    assert measured is not None
    assert measured <= limit


def in_memory_while_used(net: nn.Module, elsewhere: Callable[[Tensor], Tensor]) -> None:
    """Have the leaf modules' parameters in memory during their own forward and backward alone, as
    DeepSpeed's ZeRO 3 does; `elsewhere`: what their data is in between."""
    for module in net.modules():
        own = list(module.parameters(recurse=False))
        kept = [parameter.detach().clone() for parameter in own]

        def gather(*_: object, own: list[nn.Parameter] = own, kept: list[Tensor] = kept) -> None:
            for parameter, data in zip(own, kept, strict=True):
                parameter.data = data.clone()

        def let_go(*_: object, own: list[nn.Parameter] = own) -> None:
            for parameter in own:
                parameter.data = elsewhere(parameter)

        if own:
            module.register_forward_pre_hook(gather)
            module.register_forward_hook(let_go)
            module.register_full_backward_pre_hook(gather)


def normalized() -> nn.Module:
    torch.manual_seed(0)
    parts = (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(4))
    return nn.Sequential(*parts)


def test_parameters_that_are_out_of_memory_between_forward_and_backward_are_said_once() -> None:
    def steps(budget: lowtide.Budget | None) -> list[Any]:
        net = normalized()
        in_memory_while_used(net, lambda parameter: torch.empty(0))
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        for _ in range(2):
            with budget or nullcontext():
                loss = net(x).square().mean()
            loss.backward()
        return [bits(parameter.grad) for parameter in net.parameters()]

    plain = steps(None)
    with pytest.warns(lowtide.KeptWarning) as said, counted() as replayed:
        assert steps(lowtide.budget(0.7)) == plain
    assert replayed.operations
    assert [str(warning.message).split(" as it ends")[0] for warning in said] == [
        "16 parameters that the forward has read have no memory any more"
    ]
    parameters = sum(parameter.numel() * 4 for parameter in normalized().parameters())
    assert lowtide.limits.format_bytes(parameters) in str(said[0].message)


def test_parameters_with_other_memory_of_their_own_size_are_nothing_to_be_said() -> None:
    net = normalized()
    in_memory_while_used(net, torch.clone)
    budget = lowtide.budget(0.7)
    with budget:
        loss = net(torch.randn(64, 8, requires_grad=True)).square().mean()
    loss.backward()
    assert budget.report().steps == 1

"""What the tests of PyTorch, fairscale and MONAI require of checkpointing, tested with lowtide.

The ideas of their tests, rewritten: nested and selective checkpointing (PyTorch), normalization,
lists and several outputs (fairscale), the checkpointed U-Net in many shapes (MONAI). Where a peer
counts forward calls, replayed operations are counted here. Rules of docs/semantics.md are cited by
number.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import lowtide
from against_plain import Way, check, counted, gradients, leaf
from by_hand import same

# --- PyTorch: nested --------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("early", ["first", "last"])
def test_nested_regions_each_around_the_last(depth: int, early: str) -> None:
    """An operation runs again at most once for each region around it (rule 9)."""

    def scenario(way: Way) -> Any:
        x = leaf(4, 4)

        def level(left: int, y: Tensor) -> Tensor:
            if not left:
                return y.sin().exp()
            inner = functools.partial(level, left - 1)
            return way(inner, y).cos().tanh() if early == "first" else way(inner, y.cos().tanh())

        return gradients(way(functools.partial(level, depth), x).sum(), x)

    replayed = check(scenario)
    assert replayed.operations > 0
    assert replayed["cos"] <= depth * (depth + 1) // 2  # there is one `cos` at each level
    assert replayed["sin"] <= depth + 1


def test_regions_beside_each_other_in_a_region() -> None:
    def scenario(way: Way) -> Any:
        x = leaf(4, 4)

        def outer(y: Tensor) -> Tensor:
            one, two = way(lambda z: z.sin().exp(), y), way(lambda z: z.cos().tanh(), y)
            return way(lambda a, b: (a * b).sigmoid(), one, two)

        return gradients(way(outer, x).sum(), x)

    replayed = check(scenario)
    assert max(replayed.names().values()) == 1


def test_a_region_in_a_region_without_gradients() -> None:
    """Grad is switched off around the inner one, and on again inside it."""

    def scenario(way: Way) -> Any:
        x = leaf(4, 4)

        def outer(y: Tensor) -> Tensor:
            with torch.no_grad():
                seen = way(lambda z: z.sin().exp(), y)
                with torch.enable_grad():
                    again = way(lambda z: z.cos().exp(), y)
            return (seen * again).sin() + y

        return gradients(way(outer, x).sum(), x)

    assert check(scenario).operations > 0


@pytest.mark.parametrize("outer", [True, False])
def test_double_backward_through_nested_regions(outer: bool) -> None:
    def scenario(way: Way) -> Any:
        x = leaf(3, 3)
        inner = lambda y: way(lambda z: z.sin() * z.exp(), y).square()  # noqa: E731
        out = way(inner, x) if outer else inner(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return [slope, *gradients(slope.square().sum(), x)]

    assert check(scenario).operations > 0


def test_several_backwards_through_one_region() -> None:
    """With `retain_graph`, then through parts of the graph in turn."""

    def scenario(way: Way) -> Any:
        x, y = leaf(3, 3), leaf(3, 3)
        one, two = way(lambda a, b: (a.sin() * b.exp(), (a * b).cos()), x, y)
        one.sum().backward(retain_graph=True)
        one.sum().backward()
        two.sum().backward()
        return [x.grad, y.grad]

    assert check(scenario).operations > 0


def test_saved_tensors_may_be_read_twice_and_in_any_order() -> None:
    """`ctx.saved_tensors` twice in one backward, which torch's checkpoint refuses."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward(a.exp(), b.sin())
            return a.exp() * b.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            one, two = ctx.saved_tensors
            three, four = ctx.saved_tensors
            assert torch.equal(one, three)
            assert torch.equal(two, four)
            return grad * three * four, grad * one

    def scenario(way: Way) -> Any:
        x, y = leaf(3, 3), leaf(3, 3)
        return gradients(way(lambda a, b: Twice.apply(a.cos(), b.tanh()).sin(), x, y).sum(), x, y)

    check(scenario)


# --- PyTorch: selective -----------------------------------------------------------------------


def blocks(way: Way, x: Tensor, weights: list[Tensor], **keywords: Any) -> Tensor:
    for weight in weights:
        x = way(lambda y, w: torch.sin(y @ w).sigmoid() @ w, x, weight, **keywords)
    return x


@pytest.mark.parametrize(
    ("policy", "products", "others"),
    [
        (CheckpointPolicy.MUST_SAVE, 0, True),
        (CheckpointPolicy.PREFER_SAVE, 0, True),
        (CheckpointPolicy.MUST_RECOMPUTE, 2, False),
    ],
)
def test_a_policy_function_of_torch(policy: Any, products: int, others: bool) -> None:
    """The named operator is kept and the others are replayed, or the other way round."""
    rest = CheckpointPolicy.MUST_RECOMPUTE if others else CheckpointPolicy.MUST_SAVE

    def decide(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        return policy if func is torch.ops.aten.mm.default else rest

    contexts = functools.partial(create_selective_checkpoint_contexts, decide)

    def scenario(way: Way) -> Any:
        x, weights = leaf(4, 4), [leaf(4, 4), leaf(4, 4)]
        keywords = {} if way is not lowtide.checkpoint else {"context_fn": contexts}
        return gradients(blocks(way, x, weights, **keywords).sum(), x, *weights)

    replayed = check(scenario)
    assert replayed["mm"] == products
    assert bool(replayed["sin"] or replayed["sigmoid"]) is others


def test_a_list_of_operators_instead_of_a_policy() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def scenario(way: Way) -> Any:
        x, weights = leaf(4, 4), [leaf(4, 4), leaf(4, 4)]
        keywords = {} if way is not lowtide.checkpoint else {"context_fn": contexts}
        return gradients(blocks(way, x, weights, **keywords).sum(), x, *weights)

    replayed = check(scenario)
    assert replayed["mm"] == 0
    assert replayed["sin"] + replayed["sigmoid"] > 0


def test_one_random_operation_kept_and_a_later_one_recomputed() -> None:
    """torch's selective checkpoint draws different numbers in this case."""

    def decide(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        decide.calls += func is torch.ops.aten.native_dropout.default  # type: ignore[attr-defined]
        first = decide.calls == 1 and "dropout" in str(func)  # type: ignore[attr-defined]
        return CheckpointPolicy.MUST_SAVE if first else CheckpointPolicy.MUST_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, decide)

    def scenario(way: Way) -> Any:
        decide.calls = 0  # type: ignore[attr-defined]
        x = leaf(8, 8)
        keywords = {} if way is not lowtide.checkpoint else {"context_fn": contexts}

        def function(y: Tensor) -> Tensor:
            one = torch.native_dropout(y.sin(), 0.5, True)[0]
            return torch.native_dropout(one.exp().sin(), 0.5, True)[0].sin()

        return gradients(way(function, x, **keywords).sum(), x)

    replayed = check(scenario)
    assert replayed["native_dropout"] <= 1


# --- fairscale --------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("half", [False, True])
def test_normalization_layers(norm: Any, track: bool, half: bool) -> None:
    """Running statistics and counters after three steps are those of the plain net."""
    if norm is nn.LayerNorm:
        make = functools.partial(nn.LayerNorm, 8)
    else:
        make = functools.partial(norm, 8, track_running_stats=track)

    def scenario(way: Way) -> Any:
        model = nn.Sequential(nn.Linear(8, 8), make(), nn.ReLU(), make(), nn.Linear(8, 1))
        left: list[Tensor | None] = []
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = way(model, torch.randn(6, 8)).float().square().mean()
            left += gradients(loss, *model.parameters())
            left += [buffer.clone() for buffer in model.buffers()]
        return left

    assert check(scenario).operations > 0


def test_lists_dictionaries_and_things_that_are_no_tensors() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, pair: list[Tensor], *, mask: Any = None, label: str) -> Any:
            a, b = pair
            a, b = self.one(a).relu(), self.two(b).tanh()
            if mask is not None:
                a = a.masked_fill(mask["where"], 0.0)
            return {"out": [a * b, (a + b).sin()], "label": label, "count": 2, "none": None}

    def scenario(way: Way) -> Any:
        model, x, y = Model(), leaf(3, 4), leaf(3, 4)
        found = way(model, [x, y], mask={"where": x.detach() > 0}, label="name")
        assert (found["label"], found["count"], found["none"]) == ("name", 2, None)
        return gradients(sum(t.sum() for t in found["out"]), x, y, *model.parameters())

    assert check(scenario).operations > 0


def test_a_region_whose_inputs_need_no_gradient() -> None:
    """Only its parameters do (rule 7); and a frozen model, where only the inputs do."""

    def scenario(way: Way) -> Any:
        model, frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        x, y = torch.randn(3, 4), leaf(3, 4)
        one = way(lambda z: model(z).sin().exp(), x)
        two = way(lambda z: frozen(z).sin().exp(), y)
        three = way(lambda z: frozen(z).sin().exp(), x)
        assert one.requires_grad
        assert two.requires_grad
        assert not three.requires_grad
        return gradients((one * two * three).sum(), y, *model.parameters())

    assert check(scenario).operations > 0


def test_a_copied_wrapper_trains_its_own_weights() -> None:
    model = lowtide.ActivationCheckpointWrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    copied = copy.deepcopy(model)
    copied(torch.randn(2, 4)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in copied.parameters())


# --- MONAI ------------------------------------------------------------------------------------

CASES = [
    {"spatial_dims": dims, "channels": channels, "strides": (2,) * (len(channels) - 1),
     "num_res_units": units, "kernel_size": kernel, **options}
    for dims, (channels, units, kernel, options) in itertools.product((2, 3), [
        ((4, 8), 0, 3, {}),
        ((4, 8, 8), 1, 3, {"act": ("LeakyReLU", {"negative_slope": 0.2})}),
        ((4, 8, 8), 2, 5, {"norm": ("group", {"num_groups": 1}), "up_kernel_size": 3}),
        ((4, 4, 8), 1, 3, {"norm": "batch", "dropout": 0.2, "adn_ordering": "NA", "bias": False}),
    ])
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['spatial_dims']}d")
def test_checkpointed_unets_of_many_shapes(case: dict[str, Any]) -> None:
    """The same shapes, results, gradients and statistics as `UNet`, in training and in eval."""
    pytest.importorskip("monai")
    from monai.networks.nets import UNet

    from lowtide.monai import CheckpointUNet

    left = []
    for kind in (UNet, CheckpointUNet):
        torch.manual_seed(0)
        model = kind(in_channels=2, out_channels=3, **case)
        x = torch.randn(2, 2, *[16] * case["spatial_dims"])
        with counted() as replayed:
            out = model(x)
            out.square().mean().backward()
        assert out.shape == (2, 3, *x.shape[2:])
        assert bool(replayed.operations) is (kind is CheckpointUNet)
        found = [out.detach(), *(p.grad for p in model.parameters()), *model.buffers()]
        model.eval()
        with counted() as replayed:
            found.append(model(x).detach())
        assert not replayed.operations
        left.append(found)
    assert same(*left)

"""torch.compile around and inside regions and budgets: right, with a warning if something is lost.

Compiled code cannot be recorded, so a compiled function runs eagerly inside a recording; that must
not raise, change its results, or last after the recording, and there must be a warning.
docs/status.md lists the combinations.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
import lowtide.step
from apart import ran_apart
from by_hand import counted_replays, same
from lowtide import _compat
from lowtide.errors import CompiledWarning, UncountedWarning, UsageError
from lowtide.policies import KeepNamed, KeepOperators, KeepProducts, Policy
from once import on_one_recorder

# torch's own warnings, while it compiles
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled frames"),
]


NEW = _compat.torch_has((2, 12))  # its compiler treats a policy as a constant
needs_new = pytest.mark.skipif(not NEW, reason="refused on this torch")


class Net(nn.Module):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 4)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: float = 1.0, *, mask: Tensor | None = None) -> Tensor:
        hidden = lowtide.name(self.first(self.norm(x)), "hidden")
        hidden = self.drop(nn.functional.gelu(hidden))
        out: Tensor = self.second(hidden if mask is None else hidden * mask)
        return out * scale


X = torch.randn(256, 8, generator=torch.Generator().manual_seed(3))


def step(model: nn.Module, call: Callable[[Tensor], Tensor], around: Any = None) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    with nullcontext() if around is None else around:
        loss = call(X).square().mean()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(gradients) == 6
    return [loss.detach(), *gradients, torch.get_rng_state()]


class Backend:
    """A backend that returns the graph as it is, and counts how often it runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: Any, examples: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(lowtide.step, "_warned", False)
    yield
    torch._dynamo.reset()


def inside_budget(call: Any) -> tuple[Any, Any]:
    return call, lowtide.budget(0.9)


def inside_region(call: Any) -> tuple[Any, Any]:
    return functools.partial(lowtide.checkpoint, call), None


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("inside", [inside_budget, inside_region])
def test_compiled_module_inside(inside: Any, warm: bool, fullgraph: bool) -> None:
    plain = Net()
    expected = step(plain, plain)
    model, backend = Net(), Backend()
    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
    if warm:
        assert same(expected, step(model, compiled))
    before = backend.runs
    assert before == warm
    call, around = inside(compiled)
    with counted_replays() as count:
        with pytest.warns(CompiledWarning, match="runs eagerly there"):
            assert same(expected, step(model, call, around))
        assert count() > 0
    assert same(expected, step(model, call, around)), "and says so once only"
    assert backend.runs == before
    assert same(expected, step(model, compiled))
    assert backend.runs == before + 1, "compiled again outside of the recording"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_inside_the_recording(backend: str) -> None:
    """The first call, which compiles, is inside the recording."""
    plain, model = Net(), Net()
    expected = step(plain, plain)

    def compile_and_call(x: Tensor) -> Tensor:
        out: Tensor = torch.compile(model, backend=backend)(x)
        return out

    with pytest.warns(CompiledWarning):
        assert same(expected, step(model, functools.partial(lowtide.checkpoint, compile_and_call)))


def test_other_threads_stay_compiled() -> None:
    backend = Backend()
    compiled = torch.compile(lambda x: (x * 2).sin(), backend=backend)
    compiled(X)
    with lowtide.budget(0.9):
        thread = threading.Thread(target=compiled, args=(X,))
        thread.start()
        thread.join()
    assert backend.runs == 2


def test_exempt_functions_are_not_warned_about() -> None:
    exempt = torch.compiler.disable(lambda x: (x * 2).sin())
    with torch.compiler.set_stance("force_eager"):
        eager = torch.compile(lambda x: x.cos(), backend="eager")
        x = X.clone().requires_grad_()
        with warnings.catch_warnings(action="error"):
            lowtide.checkpoint(lambda v: exempt(eager(v)), x).sum().backward()


def test_a_stance_that_is_set_inside_a_recording() -> None:
    backend = Backend()
    compiled = torch.compile(lambda x: (x * 2).sin(), backend=backend)
    compiled(X)

    def region(x: Tensor) -> Tensor:
        with torch.compiler.set_stance("default"):
            return compiled(x).exp()  # type: ignore[no-any-return]

    x = X.clone().requires_grad_()
    with pytest.warns(CompiledWarning):
        lowtide.checkpoint(region, x).sum().backward()
    assert backend.runs == 1
    with torch.compiler.set_stance("default"):
        compiled(X)
    assert backend.runs == 2


@on_one_recorder
def test_dynamo_first_imported_inside_a_recording() -> None:
    """Nothing in this process has imported Dynamo before the region is entered."""
    code = (
        "import sys, torch, lowtide\n"
        "def f(x):\n"
        "    assert 'torch._dynamo' not in sys.modules, 'recording imports Dynamo'\n"
        "    return torch.compile(lambda v: (v * 2).sin(), backend='eager')(x.cos()).exp()\n"
        "x = torch.randn(8, requires_grad=True)\n"
        "lowtide.checkpoint(f, x).sum().backward()\n"
        "y = x.detach().requires_grad_()\n"
        "(y.cos() * 2).sin().exp().sum().backward()\n"
        "assert torch.equal(x.grad, y.grad)\n"
    )
    ran_apart(code)


# ------------------------------------------------------------------------------------- fit


def test_fit_of_a_compiled_model() -> None:
    plain, model = Net(), Net()
    expected = step(plain, plain)
    backend = Backend()
    compiled = torch.compile(model, backend=backend)
    budget = lowtide.fit(compiled, 0.9)  # type: ignore[arg-type]
    with pytest.warns(CompiledWarning, match=r"runs eagerly there.*lowtide\.CompileBudget"):
        assert same(expected, step(model, compiled))
    assert budget.report().steps == 1
    assert backend.runs == 0
    budget.remove()
    assert same(expected, step(model, compiled))
    assert backend.runs == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_a_fitted_model_compiled_later_says_that_it_has_no_budget(in_place: bool) -> None:
    plain, model = Net(), Net()
    expected = step(plain, plain)
    budget = lowtide.fit(model, 0.9)
    backend = Backend()
    if in_place:
        model.compile(backend=backend, fullgraph=True)
    call = model if in_place else torch.compile(model, backend=backend, fullgraph=True)
    with pytest.warns(CompiledWarning, match=r"no budget.*lowtide\.CompileBudget"):
        assert same(expected, step(model, call))
    assert backend.runs == 1
    assert budget.report().steps == 0


def _step_and_update(model: nn.Module, call: Any) -> None:
    step(model, call)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_another_fitted_model_that_runs_code_compiled_before_is_told() -> None:
    """torch traces nothing for it, so only its optimizer shows that its forward was not called."""
    backend = Backend()
    for kind in (CompiledWarning, UncountedWarning):
        model = Net()
        budget = lowtide.fit(model, 0.9)
        call = torch.compile(model, backend=backend, fullgraph=True)
        with pytest.warns(kind, match=r"torch\.compile.*lowtide\.CompileBudget"):
            _step_and_update(model, call)
        assert budget.report().steps == 0
    assert backend.runs == 2


def test_fit_refuses_a_model_compiled_in_place() -> None:
    model = Net()
    model.compile(backend="eager")
    with pytest.raises(UsageError, match=r"model\.compile\(\).*lowtide\.CompileBudget"):
        lowtide.fit(model, 0.9)


# ----------------------------------------------------------------- regions that are compiled


WITH_POLICIES = [
    pytest.param(None, id="none"),
    pytest.param(KeepProducts(), id="products", marks=needs_new),
    pytest.param(KeepOperators("gelu") | KeepProducts(), id="combined", marks=needs_new),
]


@on_one_recorder
@pytest.mark.parametrize("policy", WITH_POLICIES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_region_in_compiled_code(backend: str, policy: Policy | None) -> None:
    """Traced without a graph break, with the bits of torch's own checkpoint."""
    model, mask = Net(), torch.ones(32)

    def ours(x: Tensor) -> Tensor:
        return lowtide.checkpoint(model, x, 0.5, mask=mask, policy=policy)

    def theirs(x: Tensor) -> Tensor:
        out: Tensor = torch_checkpoint(model, x, 0.5, mask=mask, use_reentrant=False)
        return out

    expected = step(model, torch.compile(theirs, backend=backend, fullgraph=True))
    assert same(expected, step(model, torch.compile(ours, backend=backend, fullgraph=True)))
    if backend == "aot_eager":  # its recomputation draws the same mask
        assert same(step(model, functools.partial(model, scale=0.5, mask=mask)), expected)


@on_one_recorder
@pytest.mark.parametrize("policy", WITH_POLICIES)
def test_structures_and_regions_in_regions_in_compiled_code(policy: Policy | None) -> None:
    """Dictionaries and tuples as arguments and results, nested regions, all in one graph."""
    model = Net()

    def inner(parts: dict[str, Any], *, masks: tuple[Tensor, Tensor]) -> dict[str, Any]:
        hidden = model(parts["x"], parts["scale"], mask=masks[0])
        return {"out": (hidden, hidden.sin()), "same": masks[1]}

    def outer(x: Tensor, masks: tuple[Tensor, Tensor]) -> Tensor:
        made = lowtide.checkpoint(inner, {"x": x, "scale": 0.5}, masks=masks, policy=policy)
        out: Tensor = made["out"][0] + made["out"][1] * made["same"]
        return out

    def ours(x: Tensor) -> Tensor:
        masks = (torch.ones(32), torch.full((4,), 2.0))
        return lowtide.checkpoint(outer, x.cos(), masks=masks)

    def plain(x: Tensor) -> Tensor:
        masks = (torch.ones(32), torch.full((4,), 2.0))
        made = inner({"x": x.cos(), "scale": 0.5}, masks=masks)
        out: Tensor = made["out"][0] + made["out"][1] * made["same"]
        return out

    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert same(step(model, plain), step(model, compiled))


def test_torch_keywords_in_compiled_code() -> None:
    model = Net(0.0)

    def ours(x: Tensor) -> Tensor:
        return lowtide.checkpoint(model, x, use_reentrant=True, preserve_rng_state=False)

    assert same(
        step(model, model), step(model, torch.compile(ours, backend="eager", fullgraph=True))
    )


def test_a_decorated_function_in_compiled_code() -> None:
    model = Net(0.0)

    @lowtide.checkpoint(use_reentrant=False, respect_saved_tensors_hooks=False)
    def ours(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out

    assert same(
        step(model, model), step(model, torch.compile(ours, backend="eager", fullgraph=True))
    )


def test_policies_in_compiled_code_are_refused_on_an_old_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lowtide.traced._POLICIES_ARE_CONSTANTS", False)
    compiled = torch.compile(
        lambda x: lowtide.checkpoint(torch.sin, x, policy=KeepProducts()),
        backend="eager",
        fullgraph=True,
    )
    with pytest.raises(Exception, match=r"needs torch 2\.12 or later. Leave it out, or"):
        compiled(X.clone().requires_grad_())


@needs_new
def test_a_policy_made_while_tracing_is_refused() -> None:
    def ours(x: Tensor) -> Tensor:
        return lowtide.checkpoint(torch.sin, x, policy=KeepNamed("a"))

    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="Make it once outside, and pass it in"):
        compiled(X.clone().requires_grad_())


@needs_new
def test_names_are_not_known_in_compiled_code() -> None:
    def ours(x: Tensor) -> Tensor:
        return lowtide.checkpoint(torch.sin, x, policy=policy)

    policy = KeepOperators("gelu") | KeepNamed("hidden")
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with pytest.warns(CompiledWarning, match="KeepNamed keeps nothing in compiled code"):
        compiled(X.clone().requires_grad_())


def test_checkpointed_modules_in_compiled_code() -> None:
    model = nn.Sequential(Net(0.0))
    plain = step(model, model)
    lowtide.checkpoint_modules(model, Net)
    assert same(plain, step(model, torch.compile(model, backend="aot_eager", fullgraph=True)))


class GivenPartly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(0.0)

    def scaled(self, x: Tensor, by: float, and_more: float = 0.0) -> Tensor:
        return self.net(x) * by + and_more

    forward = functools.partialmethod(scaled, by=0.5)


def test_a_forward_with_arguments_given_is_a_region_in_compiled_code() -> None:
    """Dynamo does not trace how a `partialmethod` is bound."""
    model = nn.Sequential(GivenPartly())
    plain = step(model, model)
    lowtide.checkpoint_modules(model, GivenPartly)
    regions: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        regions.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert same(plain, step(model, compiled))
    assert regions.count("tag_activation_checkpoint") == 1


def test_inductor() -> None:
    """The default compiler. It does not run inside a region, so the bits are eager's."""
    model = Net()
    compiled = torch.compile(model)
    expected = step(model, model)
    with pytest.warns(CompiledWarning):
        assert same(expected, step(model, functools.partial(lowtide.checkpoint, compiled)))


def check_gradient(region: Callable[[Tensor], Tensor], scale: Tensor) -> None:
    """A region's gradient is that without the region."""
    (expected,) = torch.autograd.grad(region(scale), scale)
    (found,) = torch.autograd.grad(lowtide.checkpoint(region, scale), scale)
    assert torch.equal(found, expected)


@on_one_recorder
@pytest.mark.parametrize("kind", ["products", "convolution"])
def test_code_of_inductors_that_is_called_without_dynamo(kind: str) -> None:
    """It writes the results of operators further, by kernels that no recorder sees: kept."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3)

    def features(x: Tensor, weight: Tensor) -> Tensor:
        if kind == "products":
            return (torch.mm(x.flatten(1), x.flatten(1).t()).relu() * 0.3 @ x.flatten(1)).relu()
        return torch.conv2d(x, weight).add(1).relu()

    with torch.no_grad():
        code = torch._inductor.compile(make_fx(features)(x, weight), [x, weight])
    scale = torch.randn_like(code(x, weight)).requires_grad_()

    def region(scale: Tensor) -> Tensor:
        with torch.no_grad():
            made: Tensor = code(x, weight)
        return ((scale * made).sin() * (made * 0.1).exp()).sum()

    check_gradient(region, scale)


@pytest.mark.slow
@on_one_recorder
def test_a_package_of_aotinductors(tmp_path: Path) -> None:
    """Of its products the recorder would see that they copy the bias, and nothing else."""
    torch.manual_seed(0)
    x, net = torch.randn(4, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU())
    with torch.no_grad():
        program = torch.export.export(net, (x,))
        name = str(tmp_path / "net.pt2")
        path = torch._inductor.aoti_compile_and_package(program, package_path=name)
    code = torch._inductor.aoti_load_package(path)
    scale = torch.randn_like(code(x)).requires_grad_()

    def region(scale: Tensor) -> Tensor:
        made: Tensor = code(x * 2)
        return ((scale * made).sin() * (made * 0.1).exp()).sum()

    check_gradient(region, scale)


def test_a_dry_run_is_silent_about_hooks_of_its_own() -> None:
    """torch warns where hooks on all modules are on when a compiled module is called."""
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.GELU()), backend="eager")
    with pytest.warns() as caught:
        plan = lowtide.plan(model, torch.randn(8, 4))
    assert {each.category for each in caught} <= {CompiledWarning}
    assert len(plan.step.graph.ops) == 2

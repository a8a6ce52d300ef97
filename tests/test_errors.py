"""Bad input: each gives a clear error or has a documented behaviour, and training can go on.

Limits that cannot be kept are in test_rules_budget.py, changed externals in
test_rules_externals.py, modules that are already checkpointed also in test_foreign.py.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from against_plain import WAYS, Way, check, gradients, leaf, recorded
from lowtide.errors import UsageError
from lowtide.limits import format_bytes, parse_limit
from lowtide.step import current_recorder


@pytest.fixture(autouse=True)
def trains_on() -> Iterator[None]:
    """After each test here the process is in its former state, and the next step is right."""
    before = (torch.is_grad_enabled(), torch.get_default_dtype())
    yield
    assert current_recorder() is None
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == before

    def scenario(way: Way) -> list[Tensor | None]:
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        x = leaf(3, 4)
        found = gradients(way(net, x).square().sum(), x, *net.parameters())
        return [*found, *net.buffers()]

    assert check(scenario).operations > 0


# Limits.

FORMS = 'bytes (an int), text such as "6 GiB", "800 MB" or "50%", or a float in (0, 1]'
UNITS = "units are B, kB, MB, GB, TB, KiB, MiB, GiB, TiB."
WHOLE = 'Bytes are a whole number, or a number with a unit: "6 GiB", "800 MB".'
BAD_LIMITS: list[tuple[Any, str]] = [
    (0, "a limit in bytes must be positive; got 0."),
    (-5, "a limit in bytes must be positive; got -5."),
    (0.0, "a float limit is a fraction of the plain step's peak, in (0, 1]; got 0.0."),
    (-0.5, "a float limit is a fraction of the plain step's peak, in (0, 1]; got -0.5."),
    (math.nan, "a float limit is a fraction of the plain step's peak, in (0, 1]; got nan."),
    (math.inf, "a float limit is a fraction of the plain step's peak, in (0, 1]; got inf."),
    (math.inf, f"got inf. {WHOLE}"),
    (1.5e9, f"in (0, 1]; got 1500000000.0. {WHOLE}"),
    (1.0001, f"in (0, 1]; got 1.0001. {WHOLE}"),
    (np.float32(1.5), f"in (0, 1]; got {np.float32(1.5)!r}. {WHOLE}"),
    (Fraction(10**400), "a float limit is a fraction of the plain step's peak, in (0, 1]; got "),
    (2**63, "a limit is at most 2**63 - 1 bytes; got more. To limit nothing, leave"),
    (10**5000, "a limit is at most 2**63 - 1 bytes; got more. "),
    (-(10**5000), "a limit in bytes must be positive; got a number too long to show."),
    (Fraction(1, 10**5000), "in (0, 1]; got a number too long to show."),
    ("9" * 400 + " GiB", "at most 2**63 - 1 bytes; '99999999999999999999...999999 GiB' is more. "),
    ("9" * 5000 + " B", "at most 2**63 - 1 bytes; '99999999999999999999...99999999 B' is more. "),
    ("8388608 TiB", "a limit is at most 2**63 - 1 bytes; '8388608 TiB' is more. To limit nothing"),
    ("6 GiBs", f"cannot read the limit '6 GiBs': write a number and a unit, for instance "
               f'"6 GiB" or "800 MB"; {UNITS} A fraction of the plain step\'s peak is written as '
               '"60%" or as a number: 0.6.'),
    ("six GiB", "cannot read the limit 'six GiB': write"),
    ("6G", """cannot read the limit '6G' (did you mean "6 GiB" or "6 GB"?): write a number"""),
    ("512 mi", """(did you mean "512 MiB"?)"""),
    ("6,000 kb", """(did you mean "6000 kB"?)"""),
    ("6_000", """(did you mean "6000"?)"""),
    ("1,5 GB", """(did you mean "1.5 GB"?)"""),
    ("0,5", """(did you mean "0.5"?)"""),
    ("0", "a limit must be positive; '0' is 0 bytes."),
    ("9" * 5000, "at most 2**63 - 1 bytes; '99999999999999999999...9999999999' is more. "),
    ("[]," * 99, "cannot read the limit '[],[],[],[],[],[],[]...,[],[],[],': write a number"),
    ("9," * 99, "cannot read the limit '9,9,9,9,9,9,9,9,9,9,...9,9,9,9,9,': write a number"),
    ("-" * 99 + " %", "at most 100%; got '--------------------...-------- %'."),
    ("0" * 99 + " B", "positive; '00000000000000000000...00000000 B' is 0 bytes."),
    ("", "cannot read the limit ''"),
    ("-6 GiB", "cannot read the limit '-6 GiB'"),
    ("nan GiB", "cannot read the limit 'nan GiB'"),
    ("150%", "a limit in percent is a share of the plain step's peak, above 0% and at most 100%; "),
    ("0 %", "above 0% and at most 100%; got '0 %'."),
    ("nan%", "above 0% and at most 100%; got 'nan%'."),
    ("1.5", f"in (0, 1]; got 1.5. {WHOLE}"),
    ("0 GiB", "a limit must be positive; '0 GiB' is 0 bytes."),
    ("0.2 B", "a limit must be positive; '0.2 B' is 0 bytes."),
    (None, f"a limit is {FORMS}; got None of type NoneType."),
    (True, f"a limit is {FORMS}; got True of type bool."),
    (np.bool_(True), f"a limit is {FORMS}; got {np.True_!r} of type "),
    (torch.tensor(0.5), f"a limit is {FORMS}; got tensor(0.5000) of type Tensor."),
    ([1], f"a limit is {FORMS}; got [1] of type list."),
    (
        nn.Sequential(*(nn.Linear(2, 2) for _ in range(9))),
        f"a limit is {FORMS}; got an object of type Sequential. For a limit on every training "
        "forward of a model: lowtide.fit(model, limit).",
    ),
    (Path("step.plan"), "stored plan: lowtide.budget(lowtide.load_plan(path))."),
    (__file__, "stored plan: lowtide.budget(lowtide.load_plan(path))."),
    (1 + 2j, f"a limit is {FORMS}; got (1+2j) of type complex."),
    (torch.tensor(True), f"a limit is {FORMS}; got tensor(True) of type Tensor."),
    (torch.ones((), dtype=torch.int64, device="meta"), "of type Tensor."),
]  # fmt: skip


@pytest.mark.parametrize(("limit", "text"), BAD_LIMITS, ids=[text[-24:] for _, text in BAD_LIMITS])
def test_bad_limits(limit: Any, text: str) -> None:
    with pytest.raises(lowtide.UsageError) as caught:
        lowtide.budget(limit)
    assert text in str(caught.value)
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="limit"):  # UsageError is a ValueError too
        lowtide.fit(model, limit)
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, 1), (6 << 30, 6 << 30), ("6 GiB", 6 << 30), ("800 MB", 800_000_000), ("1B", 1),
        ("1.5 KiB", 1536), (" 2 mib ", 2 << 20), (".5 kB", 500), ("3 TB", 3 * 10**12),
        (1.0, 1.0), (0.25, 0.25), (2**63 - 1, 2**63 - 1), (np.int64(6 << 30), 6 << 30),
        (np.int32(7), 7), (np.float32(0.5), 0.5), (np.float64(0.6), 0.6),
        (Fraction(1, 2), 0.5), (torch.tensor(5), 5),
        ("50%", 0.5), (" 12.5 % ", 0.125), ("0.6", 0.6), ("1.0", 1.0), ("6442450944", 6 << 30),
        (str(2**53 + 1), 2**53 + 1),
    ],
)  # fmt: skip
def test_good_limits(limit: Any, expected: float) -> None:
    assert parse_limit(limit) == expected
    assert type(parse_limit(limit)) is type(expected)


def test_bytes_for_people() -> None:
    assert [format_bytes(n) for n in (None, 0, 1023, 1536, 5 << 20, 3 << 31, 1101863432)] == [
        "unknown", "0 B", "1023 B", "1.5 KiB", "5.0 MiB", "6.00 GiB", "1.03 GiB",
    ]  # fmt: skip
    # 1024 of a unit are one of the next.
    assert [format_bytes(n) for n in (1 << 40, 5 << 39, (1 << 20) - 1, -(1 << 30) + 9)] == [
        "1.00 TiB", "2.50 TiB", "1.0 MiB", "-1.00 GiB",
    ]  # fmt: skip


# Contexts in the wrong place.


def test_a_budget_entered_twice() -> None:
    limit = lowtide.budget(0.5)
    with limit, pytest.raises(lowtide.UsageError) as caught, limit:
        pass
    assert "this budget is already entered: leave it before entering it again." in str(caught.value)
    x = leaf(4)
    with limit:
        y = x.sin().exp().sum()
    y.backward()


def test_a_budget_entered_twice_without_grad() -> None:
    limit = lowtide.budget(0.5)
    with torch.no_grad(), limit, pytest.raises(lowtide.UsageError, match="already entered"), limit:
        pass
    with limit:
        pass


def test_a_budget_inside_a_budget() -> None:
    x = leaf(4)
    with lowtide.budget(0.5):
        y = x.sin()
        with pytest.raises(lowtide.UsageError) as caught, lowtide.budget(0.4):
            pass
        z = y.exp().cos()  # the outer one still works
    assert "inside another budget or checkpointed region of the same thread" in str(caught.value)
    z.sum().backward()
    (expected,) = torch.autograd.grad(x.sin().exp().cos().sum(), x)
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_a_budget_inside_a_region() -> None:
    def region(x: Tensor) -> Tensor:
        with lowtide.budget(0.5):
            return x.sin()

    with pytest.raises(lowtide.UsageError, match="the outer one already decides"):
        lowtide.checkpoint(region, leaf(3))


def test_a_fitted_model_inside_a_budget_leaves_it_to_the_budget() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fitted = lowtide.fit(model, 0.5)
    outer = lowtide.budget("1 MiB")
    for number in range(2):
        with outer, _no_use_of_a_limit() if not number else nullcontext():
            loss = model(torch.randn(3, 4)).sum()
        loss.backward()
    assert outer.report().steps == 2
    assert fitted.report().steps == 0


@pytest.mark.parametrize("limit", [1, 80])
def test_a_limit_of_few_bytes_was_meant_as_a_fraction(limit: int) -> None:
    """As an argument parser makes 1 of 1.0."""
    with (
        pytest.raises(lowtide.BudgetError, match=r"An int is a number of bytes: .* 0.8 or \"80%\""),
        lowtide.budget(limit),
    ):
        leaf(100).exp().sum().backward()


def test_a_fitted_model_inside_a_region_says_that_its_limit_is_of_no_use() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    lowtide.fit(model, "1 MiB")
    with _no_use_of_a_limit():
        lowtide.checkpoint(model, torch.randn(3, 4)).sum().backward()


class _Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.node = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.node(x).tanh()
        return self(x, depth - 1) if depth else x


def test_a_fitted_model_that_calls_itself_is_inside_of_its_own_limit() -> None:
    """It was told to take it off, which is an error where warnings are."""
    model = _Tree()
    with lowtide.fit(model, "1 MiB") as limit:
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
        assert limit.report().measured_peak is not None


def _no_use_of_a_limit() -> AbstractContextManager[Any]:
    return pytest.warns(
        lowtide.UncountedWarning, match="forward of Sequential runs inside of a budget or a check"
    )


def test_left_without_being_entered() -> None:
    limit = lowtide.budget(0.5)
    limit.__exit__(None, None, None)
    with limit:
        pass


# Models that do not fit the call.


def test_fit_of_what_is_no_module() -> None:
    with pytest.raises(lowtide.UsageError, match=r"lowtide\.fit .*with lowtide\.budget\(limit\):"):
        lowtide.fit(lambda x: x, 0.5)  # type: ignore[arg-type]
    with pytest.raises(lowtide.UsageError, match="a ModuleList has no forward to put a budget"):
        lowtide.fit(nn.ModuleList([nn.Linear(2, 2)]), 0.5)


def test_fit_twice() -> None:
    model = nn.Linear(4, 4)
    first = lowtide.fit(model, 0.5)
    with pytest.raises(lowtide.UsageError) as caught:
        lowtide.fit(model, 0.6)
    assert "this Linear has a budget already. Call remove()" in str(caught.value)
    first.remove()
    first.remove()
    lowtide.fit(model, 0.6).remove()


def test_a_fitted_budget_whose_handle_is_lost_is_found_on_the_model() -> None:
    """As when a cell of a notebook runs twice."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    assert lowtide.FittedBudget.of(model) is None
    lowtide.fit(model, "1 MiB")
    model(x).sum().backward()
    with pytest.raises(lowtide.UsageError, match=r"or lowtide\.FittedBudget\.of\(model\)\.remove"):
        lowtide.fit(model, "2 MiB")
    found = lowtide.FittedBudget.of(model)
    assert found is not None
    assert (found.active, found.report().steps, found.report().limit) == (True, 1, 2**20)
    found.remove()
    assert not found.active
    assert lowtide.FittedBudget.of(model) is None
    assert "forward" not in vars(model)
    with pytest.raises(lowtide.UsageError, match=r"FittedBudget\.of takes a torch\.nn\.Module"):
        lowtide.FittedBudget.of(3)  # type: ignore[arg-type]


def test_what_is_entered_and_what_is_a_backend_are_told_apart() -> None:
    budget = lowtide.budget("1 MiB")
    with pytest.raises(lowtide.UsageError, match=r"not called but entered.*backend=lowtide\.Comp"):
        budget(lambda x: x)
    backend = object.__new__(lowtide.CompileBudget)  # which older versions of torch cannot make
    with (
        pytest.raises(lowtide.UsageError, match=r"a CompileBudget is not entered: write torch\.c"),
        backend,
    ):
        pass


@pytest.mark.parametrize(("mine", "asked", "other"), [
    ("lightning", "on_init_end", "lowtide.transformers.MemoryBudget"),
    ("transformers", "on_exception", "lowtide.lightning.MemoryBudget"),
])  # fmt: skip
def test_the_callback_of_another_library_is_named(mine: str, asked: str, other: str) -> None:
    callback = getattr(lowtide, mine).MemoryBudget(0.5)
    with pytest.raises(AttributeError, match=f"has no '{asked}'.* takes {other}"):
        getattr(callback, asked)
    assert not hasattr(callback, "something else")
    assert copy.deepcopy(callback).limit == 0.5
    assert pickle.loads(pickle.dumps(callback)).limit == 0.5


def test_a_policy_that_names_nothing_is_refused() -> None:
    with pytest.raises(lowtide.UsageError, match=r'KeepNamed\("attn_out"\)'):
        lowtide.policies.KeepNamed()


@pytest.mark.parametrize("function", [lowtide.plan, lowtide.explain, lowtide.verify])
def test_a_limit_that_was_given_by_place_is_told(function: Any) -> None:
    with pytest.raises(TypeError) as caught:
        function(nn.Linear(2, 2), torch.ones(2, 2), "6 GiB")
    assert caught.value.__notes__ == [
        f"lowtide.{function.__name__} takes its limit by name: limit=0.5, limit='6 GiB'."
    ]
    with pytest.raises(TypeError) as caught:
        function(nn.Linear(2, 2))
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("switch_on", [
    lambda model: lowtide.fit(model, 0.5),
    lambda model: lowtide.checkpoint_modules(model, "*"),
    lambda model: lowtide.checkpoint_levels(model, 1),
])  # fmt: skip
def test_a_handle_that_is_taken_for_the_model_says_so(switch_on: Callable[[Any], Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    handle = switch_on(model)
    said = rf"{type(handle).__name__} is not the model, which stays the object it was"
    with pytest.raises(lowtide.UsageError, match=said):
        handle(torch.ones(2, 2))
    with pytest.raises(AttributeError, match=said):
        handle.parameters()
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        handle.nothing  # noqa: B018
    assert not hasattr(handle, "train")
    copied = pickle.loads(pickle.dumps(copy.deepcopy(handle)))
    assert type(copied) is type(handle)
    handle.remove()


def test_a_report_says_why_no_step_was_measured() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    budget = lowtide.budget("1 MiB")

    def step() -> str:
        with budget:
            loss = model(x).sum()
        loss.backward()
        return str(budget.report())

    with torch.profiler.profile():
        told = step()
    assert "no step has been measured yet: a torch profiler is active" in told
    assert budget.report().obstacle == "a torch profiler is active"
    assert "measured yet" not in step()
    assert budget.report().obstacle is None


def test_a_fitted_budget_takes_itself_off_at_the_end_of_a_with() -> None:
    """As what `checkpoint_modules` returns does; it opens no step of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with lowtide.fit(model, "1 MiB") as fitted:
        assert fitted.active
        assert "on a model" in repr(fitted)
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
    assert fitted.report().steps == 2
    assert not fitted.active
    with recorded() as seen:
        model(torch.randn(3, 4)).sum().backward()
    assert seen == []
    with pytest.raises(RuntimeError, match="a fault of the block"), lowtide.fit(model, "1 MiB"):
        raise RuntimeError("a fault of the block")
    lowtide.fit(model, "1 MiB").remove()


def test_a_copy_of_a_fitted_budget_is_on_no_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fitted = lowtide.fit(model, "1 MiB")
    model(torch.randn(3, 4)).sum().backward()
    copied = copy.deepcopy(fitted)
    assert not copied.active
    assert copied.report().steps == 0
    copied.remove()
    assert fitted.active


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.use_checkpoint = True
        self.inside = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.utils.checkpoint.checkpoint(self.inside, x, use_reentrant=False)
        return out


def test_fit_of_a_model_that_checkpoints_itself() -> None:
    model = nn.Sequential(Flagged(), nn.Tanh())
    with pytest.raises(lowtide.UsageError) as caught:
        lowtide.fit(model, 0.5)
    text = str(caught.value)
    assert "lowtide.fit: this Sequential is already checkpointed by other means in 1" in text
    assert "use_checkpoint is True; build the model with use_checkpoint=False" in text
    assert "Switch the other off first" in text
    model(leaf(3, 4)).sum().backward()
    model[0].use_checkpoint = False
    lowtide.fit(model, 0.5).remove()


def test_a_fitted_model_in_the_wrong_mode_is_the_plain_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    budget = lowtide.fit(model, "1 B")  # a limit that no step can keep
    with recorded() as seen:
        model(torch.randn(3, 4)).sum().backward()
    assert seen == []
    assert budget.report().steps == 0


# Tensors on two devices.


def test_a_region_over_two_devices() -> None:
    """Each operation is replayed where it ran."""

    def scenario(way: Way) -> list[Tensor | None]:
        x, ghost = leaf(4), torch.ones(5, device="meta", requires_grad=True)

        def region(x: Tensor, ghost: Tensor) -> tuple[Tensor, Tensor]:
            return x.sin().exp().cos(), ghost.sin().exp().cos()

        one, two = way(region, x, ghost)
        two.sum().backward()
        assert ghost.grad is not None
        assert ghost.grad.device.type == "meta"
        return gradients(one.sum(), x)

    assert check(scenario).operations > 0
    check(scenario, WAYS["budget"])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_operation_over_two_devices_is_torchs_own_error(way: Way) -> None:
    def region(x: Tensor) -> Tensor:
        return x.sin() + torch.ones(4, 4, device="meta")

    with pytest.raises(RuntimeError, match="meta is not on the expected device cpu"):
        way(region, leaf(4, 4))


def test_a_budget_on_a_device_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"device='nowhere' names no device\. Pass 'cpu', 'cuda'"):
        lowtide.budget(0.5, device="nowhere")


def test_a_budget_on_a_device_that_nobody_counts() -> None:
    with pytest.raises(UsageError, match=r"a budget counts bytes on .* not on 'meta'"):
        lowtide.budget(0.5, device="meta")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")
@pytest.mark.parametrize(("device", "kind"), [("cuda", "CUDA"), ("mps", "MPS"), ("xpu:1", "XPU")])
def test_a_budget_on_a_device_that_is_not_there(device: str, kind: str) -> None:
    with pytest.raises(UsageError, match=rf"device='{device}', but torch finds no {kind} here\. P"):
        lowtide.budget(0.5, device=device)


# The errors themselves.


def test_every_error_has_the_root_and_the_builtin_that_torch_would_raise() -> None:
    for name in ("BudgetError", "ReplayError", "UnsupportedError", "UsageError"):
        error = getattr(lowtide, name)
        assert issubclass(error, lowtide.LowtideError)
    assert issubclass(lowtide.UsageError, ValueError)
    for error in (lowtide.BudgetError, lowtide.ReplayError, lowtide.UnsupportedError):
        assert issubclass(error, RuntimeError)
    assert not issubclass(lowtide.LowtideError, RuntimeError)


def test_every_warning_has_the_root_that_one_filter_is_for() -> None:
    own = [found for name, found in vars(lowtide).items() if name.endswith("Warning")]
    assert len(own) == 7
    assert all(issubclass(warning, lowtide.LowtideWarning) for warning in own)
    assert issubclass(lowtide.LowtideWarning, UserWarning)


def test_a_refusal_arrives_where_a_library_adds_to_its_text() -> None:
    """Pyro adds the shapes of its sites: it raises the error's class again, of a text alone. What
    comes from another process is made of the text, too, and keeps its figures."""

    def forward() -> Tensor:
        try:
            return torch.randn(64, requires_grad=True).exp().sum()
        except RuntimeError as error:
            raise type(error)(f"{error}\nshapes: 64") from error

    budget = lowtide.budget("100 B")
    with pytest.raises(lowtide.BudgetError, match="shapes: 64") as caught, budget:
        forward()
    assert isinstance(caught.value.__cause__, lowtide.BudgetError)
    first = caught.value.__cause__
    assert first.limit == 100 < first.minimum
    for other in (pickle.loads(pickle.dumps(first)), copy.copy(first)):
        assert (str(other), other.limit, other.minimum) == (str(first), 100, first.minimum)


def test_a_backward_after_the_parameters_moved() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    loss = lowtide.checkpoint(model, torch.randn(3, 4)).square().sum()
    moved = model[2].weight._version
    with torch.no_grad():
        model[2].weight.mul_(0.5)
    with pytest.raises(lowtide.ReplayError) as caught:
        loss.backward()
    assert str(caught.value) == (
        "backward needs a tensor of shape (4, 4) and dtype torch.float32 (the parameter 2.weight "
        "of Sequential) that was modified by an in-place operation after the forward read it: it "
        f"is at version {moved + 1}, expected version {moved}. "
        "Parameters and inputs must not change between forward and backward (is optimizer.step() "
        "called before backward()? does x += block(x) overwrite what a region was given?); clone "
        "the tensor before changing it, or make the change inside a region or budget that is "
        "around both, so that it is seen."
    )
    model.zero_grad()
    lowtide.checkpoint(model, torch.randn(3, 4)).square().sum().backward()

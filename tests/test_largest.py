"""`lowtide.largest_batch`: the sizes that it finds fit, the next ones do not; nothing is run."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import lowtide
from lowtide import BudgetError, DryRunWarning, UsageError
from lowtide.cli import main
from lowtide.largest import last_within
from once import on_one_recorder, search_less

pytestmark = on_one_recorder

WIDTH = 32


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    search_less(monkeypatch)


def network(blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(blocks)
        )
    )


def loss_on(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


def rows(size: int) -> Tensor:
    return torch.ones(size, WIDTH)


# ---------------------------------------------------------------------------- the search alone

line = st.tuples(st.integers(0, 1000), st.integers(1, 50))


@given(st.lists(line, min_size=1, max_size=3), st.integers(1, 50_000), st.data())
def test_the_last_within_is_found_in_a_few_tries(
    lines: list[tuple[int, int]], limit: int, data: st.DataObject
) -> None:
    """Peaks are the largest of several moments, each a straight line in the number of samples."""
    most = data.draw(st.sampled_from([1, 7, 100, 2**31 - 1]))
    wanted = max(0, min(most, *((limit - at_none) // each for at_none, each in lines)))
    known = data.draw(st.integers(0, wanted))
    tried: list[int] = []

    def peak(count: int) -> int:
        tried.append(count)
        return max(at_none + each * count for at_none, each in lines)

    assert last_within(peak, limit, most, known) == wanted
    assert len(tried) <= 16
    assert wanted == most or wanted + 1 in tried  # that it does not fit was seen
    assert max(tried) <= min(most, max(8 * wanted, known, 1))


@pytest.mark.parametrize("stair", [1, 8, 64])
@pytest.mark.parametrize("square", [0, 3])
def test_stairs_and_squares(stair: int, square: int) -> None:
    """Kernels round sizes up, and contrastive losses compare each sample with each."""
    tried: list[int] = []

    def peak(count: int) -> int:
        tried.append(count)
        return 700 + 40 * -(-count // stair) * stair + square * count**2

    for limit in range(10_000, 3_000_000, 99_991):
        tried.clear()
        found = last_within(peak, limit, 2**31 - 1)
        assert len(tried) <= 24
        assert peak(found) <= limit < peak(found + 1)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 100))
def test_peaks_that_grow_unevenly(steps: list[int], limit: int) -> None:
    peaks = [sum(steps[: place + 1]) for place in range(len(steps))]
    wanted = sum(peak <= limit for peak in peaks)
    assert last_within(lambda count: peaks[count - 1], limit, len(peaks)) == wanted


# ---------------------------------------------------------------------------- the answer


def test_the_largest_runs_inside_the_limit_and_the_next_is_refused() -> None:
    model, limit = network(), 1_000_000
    step = loss_on(model)
    found = lowtide.largest_batch(step, rows, limit)
    assert found.size > 2 * found.plain_size > 0

    def peak(size: int) -> int:
        model.zero_grad()
        batch = rows(size)
        return lowtide.measure(lambda: step(batch).backward(), device="cpu").peak_bytes

    assert peak(found.plain_size) <= limit < peak(found.plain_size + 1)
    model.zero_grad()  # gradients that are there need no room
    with pytest.raises(BudgetError):
        lowtide.plan(step, rows(found.size + 1), limit=limit)
    budget = lowtide.budget(found.plan)
    batch = rows(found.size)

    def planned() -> None:
        with budget:
            loss = step(batch)
        loss.backward()

    assert lowtide.measure(planned, device="cpu").peak_bytes <= limit
    assert budget.report().planned
    assert budget.report().replayed_operations > 0


def test_the_sizes_between_have_the_plans_of_plan() -> None:
    model, limit = network(), 1_000_000
    found = lowtide.largest_batch(loss_on(model), rows, limit)
    sizes = [each.size for each in found.sizes]
    assert sizes[0] == found.plain_size
    assert sizes[-1] == found.size
    assert sizes == sorted(set(sizes))
    assert len(sizes) == 5
    for each in found.sizes:
        plan = lowtide.plan(loss_on(model), rows(each.size), limit=limit)
        assert (each.peak, each.plain_peak) == (plan.peak, plan.plain_peak)
        assert each.overhead == plan.overhead
        seconds = plan.step.seconds * (1 + plan.overhead)
        assert each.samples_per_second == pytest.approx(each.size / seconds)
        assert each.peak <= limit
    assert found.sizes[0].overhead == 0 < found.sizes[1].overhead < found.sizes[-1].overhead
    assert all(parameter.grad is None for parameter in model.parameters())  # nothing was run


def test_the_table_names_both_sizes() -> None:
    found = lowtide.largest_batch(loss_on(network()), rows, "1 MB", on="H100")
    text = str(found)
    assert f"largest  {found.size} samples, {found.plain_size} without recomputation\n" in text
    assert "times    modelled, H100\n" in text
    assert len(text.splitlines()) == 4 + 2 + len(found.sizes)
    assert text in found._repr_html_()
    data = json.loads(json.dumps(found.to_dict()))
    assert (data["size"], data["limit"]) == (found.size, 1_000_000)
    assert [each["size"] for each in data["sizes"]] == [each.size for each in found.sizes]


def test_multiples_and_a_bound() -> None:
    step = loss_on(network())
    free = lowtide.largest_batch(step, rows, "1 MB")
    asked: list[int] = []

    def batch(size: int) -> Tensor:
        asked.append(size)
        return rows(size)

    even = lowtide.largest_batch(step, batch, "1 MB", multiple_of=8)
    assert all(size % 8 == 0 for size in asked)
    assert (even.size, even.plain_size) == (free.size // 8 * 8, free.plain_size // 8 * 8)
    asked.clear()
    bound = free.plain_size + 3
    few = lowtide.largest_batch(step, batch, "1 MB", at_most=bound)
    assert max(asked) == bound
    assert (few.size, few.plain_size, few.more) == (bound, free.plain_size, True)
    assert "more were not asked for" in str(few)
    assert not free.more
    all_plain = lowtide.largest_batch(step, rows, "1 MB", at_most=2)
    assert (all_plain.size, all_plain.plain_size, len(all_plain.sizes)) == (2, 2, 1)


def test_no_plain_batch_fits_but_one_does() -> None:
    step, one = loss_on(network()), lambda size: torch.ones(size, 256, WIDTH)
    plan = lowtide.plan(step, one(1))
    limit = (plan.minimum_peak + plan.plain_peak) // 2
    found = lowtide.largest_batch(step, one, limit)
    assert found.plain_size == 0 < found.size
    assert found.sizes[0].size == 1
    assert "none without it" in str(found)


def test_batches_are_tensors_tuples_or_dictionaries() -> None:
    model = network(1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).square().mean()

    pair = lowtide.largest_batch(step, lambda size: (rows(size), rows(size)), "1 MB")
    named = lowtide.largest_batch(step, lambda size: {"y": rows(size), "x": rows(size)}, "1 MB")
    assert pair.size == named.size > 0
    with pytest.raises(UsageError, match="batch returns a tensor, a tuple of arguments or"):
        lowtide.largest_batch(step, lambda size: size, "1 MB")


# ---------------------------------------------------------------------------- bad input


def test_not_even_one_fits() -> None:
    with pytest.raises(BudgetError) as caught:
        lowtide.largest_batch(loss_on(network()), rows, 1000, multiple_of=4)
    least = lowtide.plan(loss_on(network()), rows(4)).minimum_peak
    assert caught.value.minimum == least
    assert caught.value.__notes__ == ["No batch fits: this is of 4 samples, the smallest."]


def test_a_batch_that_does_not_grow() -> None:
    with pytest.raises(UsageError, match="takes no more memory with a batch of"):
        lowtide.largest_batch(loss_on(network()), lambda size: rows(4), "1 MB")


def test_a_batch_that_does_not_grow_and_fits_with_recomputation_alone() -> None:
    step = loss_on(network())
    plan = lowtide.plan(step, rows(256))
    with pytest.raises(UsageError, match="takes no more memory with a batch of"):
        lowtide.largest_batch(
            step, lambda size: rows(256), (plan.minimum_peak + plan.plain_peak) // 2
        )


def test_small_batches_may_take_the_same() -> None:
    """They are padded, or the peak is in a part of the step that has no samples."""
    step = loss_on(network(1))
    padded = lowtide.largest_batch(step, lambda size: rows(-(-size // 8) * 8), "300 kB")
    free = lowtide.largest_batch(step, rows, "300 kB")
    assert padded.size == free.size // 8 * 8
    weight = nn.Parameter(torch.ones(200, 200))

    def with_a_penalty(x: Tensor) -> Tensor:
        with torch.no_grad():
            penalty = (weight @ weight).square().mean()
        return step(x) + penalty

    one, two = (lowtide.plan(with_a_penalty, rows(size)).plain_peak for size in (1, 2))
    assert one == two
    assert lowtide.largest_batch(with_a_penalty, rows, one).plain_size > 1


def test_a_size_between_that_takes_more_is_left_out() -> None:
    step = loss_on(network())
    free = lowtide.largest_batch(step, rows, "1 MB")
    dear = free.sizes[2].size

    def uneven(x: Tensor) -> Tensor:
        return step(x.repeat(8, 1) if len(x) == dear else x)

    found = lowtide.largest_batch(uneven, rows, "1 MB")
    assert found.size == free.size
    assert [each.size for each in found.sizes] == [
        each.size for each in free.sizes if each.size != dear
    ]


def test_random_states_are_put_back() -> None:
    step = loss_on(network())
    before = torch.get_rng_state(), random.getstate()

    def batch(size: int) -> Tensor:
        return torch.randn(size, WIDTH) * random.random()

    lowtide.largest_batch(step, batch, "1 MB", at_most=4)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_a_forward_that_asks_for_activations_is_not_run() -> None:
    """Real steps of ever larger batches would run out of memory."""
    model = network()

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        return loss if loss.item() < 1e9 else -loss

    with pytest.raises(UsageError, match="cannot run on fake tensors"):
        lowtide.largest_batch(step, rows, "1 MB")


def test_a_step_that_needs_two() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
    with pytest.raises(UsageError, match="Expected more than 1 value per channel") as caught:
        lowtide.largest_batch(loss_on(model), rows, "1 MB")
    assert "That was a batch of 1 sample, the smallest; one of 2" in caught.value.__notes__[0]
    assert lowtide.largest_batch(loss_on(model), rows, "1 MB", multiple_of=2).size > 2
    counts = model.state_dict()["1.num_batches_tracked"]
    assert counts == 0  # the dry runs changed nothing


@pytest.mark.parametrize("where", ["step", "batch"])
def test_a_size_that_cannot_be_is_named(where: str) -> None:
    model = network()

    def of_eight(x: Tensor) -> Tensor:
        assert len(x) <= 8
        return x

    def step(x: Tensor) -> Tensor:
        return model(of_eight(x)).square().mean()

    batch = rows if where == "step" else lambda size: of_eight(rows(size))
    with pytest.raises((UsageError, AssertionError)) as caught:
        lowtide.largest_batch(step, batch, "1 MB")
    note = caught.value.__notes__[0]
    assert re.match(r"That was a batch of \d+ samples; one of \d did not fail.*at_most=\d, s", note)


def test_pairs_need_two() -> None:
    model = network()
    with pytest.raises(UsageError, match="is invalid for input of size") as caught:
        lowtide.largest_batch(
            lambda x: model(x.reshape(len(x) // 2, 2, WIDTH)).mean(), rows, "1 MB"
        )
    assert "one of 2 does not fail. With multiple_of=2, say" in caught.value.__notes__[0]
    with pytest.raises(UsageError, match="same reduction dim") as caught:
        lowtide.largest_batch(loss_on(model), lambda size: torch.ones(size, 3), "1 MB")
    assert not hasattr(caught.value, "__notes__")  # more samples do not help


def test_a_step_without_a_loss_is_told_once() -> None:
    model = network()
    with pytest.warns(DryRunWarning, match="Return the loss itself") as caught:
        lowtide.largest_batch(lambda x: model(x).square().mean().detach(), rows, "1 MB")
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"limit": 0.5}, r"a fraction of the plain peak \(0.5\) grows with the batch"),
        ({"limit": "50%"}, r"a fraction of the plain peak \(0.5\) grows with the batch"),
        ({"limit": "6G"}, "did you mean"),
        ({"batch": rows(3)}, "batch is a function of the number of samples.*; got Tensor"),
        ({"fn": nn.Linear}, "not the class Linear"),
        ({"multiple_of": 0}, "multiple_of is a number of samples, at least 1; got 0"),
        ({"at_most": 2.5}, "at_most is a number of samples, at least 1; got 2.5"),
        ({"at_most": 7, "multiple_of": 8}, r"at_most \(7\) is less than multiple_of \(8\)"),
        ({"multiple_of": 2**31}, r"the most that are looked at, is less than multiple_of"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], text: str) -> None:
    usual: dict[str, Any] = {"fn": loss_on(network()), "batch": rows, "limit": "1 MB"}
    made = {**usual, **change}
    fn, batch, limit = (made.pop(name) for name in ("fn", "batch", "limit"))
    with pytest.raises(UsageError, match=text):
        lowtide.largest_batch(fn, batch, limit, **made)


# ---------------------------------------------------------------------------- the command line

PROGRAM = """
import torch
from torch import nn

built = []

class Net(nn.Sequential):
    def __init__(self, width=32):
        built.append(width)
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(4)
        ]
        super().__init__(*blocks)

def build(batch_size=1):
    return Net(), torch.ones(batch_size, 32)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "sized.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "sized.py"


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(("batch", *arguments, "--json")) == 0
    return json.loads(capsys.readouterr().out)


def test_the_same_answer_as_in_python(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    # The step of a target is its model's output, of which the sum is the loss.
    wanted = lowtide.largest_batch(network(), rows, "1 MB", multiple_of=2, at_most=500).to_dict()
    options = ("--limit", "1 MB", "--multiple-of", "2", "--at-most", "500")
    assert answer(capsys, "sized:Net", "--shape", "Nx32", *options) == wanted
    import sized  # type: ignore[import-not-found]

    assert sized.built == [32, 32]  # once on the meta device, for the size of its parameters
    assert answer(capsys, f"{program}:build", "--set", "batch_size=N", *options) == wanted
    assert main(("batch", f"{program}:build", "--set", "batch_size=N", *options)) == 0
    assert f"largest  {wanted['size']} samples" in capsys.readouterr().out


def test_what_the_command_line_refuses(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("batch", f"{program}:Net", "--shape", "2x32", "--limit", "1 MB")) == 1
    assert "write N where the number of samples stands" in capsys.readouterr().err
    assert main(("batch", f"{program}:Net", "--shape", "Nx32", "--limit", "0.5")) == 1
    assert "grows with the batch" in capsys.readouterr().err
    assert main(("batch", f"{program}:Net", "--shape", "Nx32", "--limit", "1000")) == 1
    error = capsys.readouterr().err
    assert "The smallest limit" in error
    assert "No batch fits: this is of 1 sample, the smallest." in error
    assert len(error.splitlines()) == 1

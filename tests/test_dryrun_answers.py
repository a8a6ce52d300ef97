"""A dry run's answers to questions about data, behind constants and in-place writes."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.errors import DryRunWarning
from once import on_one_recorder

# A dry run has a recorder of its own, whatever the engine is.
pytestmark = on_one_recorder

IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 3, 0]])


def padded(ids: Tensor) -> bool:
    return 0 in ids[:, [-1, 0]]  # as transformers looks for padding without a mask


def of_a_number(ids: Tensor) -> bool:
    return bool((ids == torch.tensor(3)).sum() == 2)


def of_an_array(ids: Tensor) -> bool:
    return bool(ids.index_select(1, torch.from_numpy(np.array([1, 3]))).max() == 8)


def cleared(ids: Tensor) -> bool:
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    return not mask.all() and int(mask.sum()) == 6


def overwritten(ids: Tensor) -> bool:
    copy = ids.clone()
    copy.view(-1)[5:] = 1
    return copy.max().item() == 7 and ids.max().item() == 8


def masked(ids: Tensor) -> bool:
    mask = torch.zeros(ids.shape)
    before = mask.sum()
    mask.masked_fill_(ids == 3, 1.0).mul_(2)
    return before.item() == 0 and mask.sum().item() == 4


def scattered(ids: Tensor) -> bool:
    counts = torch.zeros(9).index_add_(0, ids.flatten(), torch.ones(8))
    return counts.tolist() == [1, 0, 0, 2, 1, 1, 1, 1, 1]


def chosen(ids: Tensor) -> bool:
    keep = torch.tensor([True, False, True, False]).repeat(2, 1)
    keep[0, 1] = True
    return len(ids[keep]) == 5


def masked_after_indices(ids: Tensor) -> bool:
    """One operator, whose result has a size that depends on data for a mask only."""
    columns = [ids[:, [column, 0]] for column in range(3)]
    return len(columns[0][columns[0] > 3]) == 2


def listed(ids: Tensor) -> bool:
    """As Qwen2-VL makes its positions: of numbers that tensors have, which no operator reads."""
    tops = torch.tensor([[row.max() + 1, 3] for row in ids]), torch.as_tensor((ids[0, 0], 0.5))
    return [top.tolist() for top in tops] == [[[7, 3], [9, 3]], [3.0, 0.5]]


QUESTIONS = (
    padded,
    of_a_number,
    of_an_array,
    cleared,
    overwritten,
    masked,
    scattered,
    chosen,
    masked_after_indices,
    listed,
)


class Asks(nn.Module):
    def __init__(self, question: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 16), nn.Linear(16, 16)
        self.norm, self.question = nn.BatchNorm1d(4), question

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return (self.out(x) if self.question(ids) else x).square().mean()


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_follows_from_data_and_constants_needs_no_real_step(
    question: Callable[[Tensor], bool],
) -> None:
    assert question(IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = lowtide.plan(Asks(question), IDS)
    assert plan.source == "fake"
    assert any(operation.name == "aten::addmm" for operation in plan.operations)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_same_of_what_a_closure_has(question: Callable[[Tensor], bool]) -> None:
    model, batch = Asks(question), {"ids": IDS}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = lowtide.plan(lambda: model(batch["ids"]))
    assert plan.source == "fake"
    assert any(operation.name == "aten::addmm" for operation in plan.operations)


@pytest.mark.parametrize("how", ["", ".3f", ">9"])
def test_a_number_in_a_text_is_read_as_the_real_step_reads_it(how: str) -> None:
    """transformers checks the number of image tokens with a message that has it, made in any case:
    a plan without that read would be left by the step that it is for (rule 13)."""
    texts = []

    def step(ids: Tensor) -> Tensor:
        hidden = torch.tanh(model(ids))
        texts.append((format((ids == 3).sum(), how), format(hidden, how)))
        return hidden

    model = Asks(padded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = lowtide.plan(step, IDS, limit=0.9)
    assert plan.source == "fake"
    assert [op.name for op in plan.operations].count("aten::_local_scalar_dense") == 3
    assert texts[0][0] == format(2, how)  # the other number depends on parameters
    budget = lowtide.budget(plan)
    with budget:
        loss = step(IDS)
    loss.backward()
    assert texts[1] == (format(2, how), format(loss.detach().item(), how))
    assert budget.report().planned


def test_a_list_with_an_activation_needs_a_real_step_and_torch_stays_as_it_was() -> None:
    def step(ids: Tensor) -> Tensor:
        return model(ids) * torch.tensor([model.out.weight[0, 0].detach(), 2.0]).mean()

    usual, model = torch.tensor, Asks(padded)
    with pytest.warns(DryRunWarning, match="one real forward"):
        assert lowtide.plan(step, IDS).source == "recorded"
    assert torch.tensor is usual
    with torch.device("meta"):
        assert torch.tensor([1.0]).is_meta


class Counts(Asks):
    """Counts its calls before it looks, as quantizers do that begin with their first batch."""

    steps: Tensor

    def __init__(self, question: Callable[[Tensor], bool]) -> None:
        super().__init__(question)
        self.register_buffer("steps", torch.tensor([2, 0, 0]))

    def forward(self, ids: Tensor) -> Tensor:
        self.steps[0] += 1
        self.steps[1:].fill_(4).sub_(ids[0, 1:3])
        return super().forward(ids)


def test_a_counter_that_moves_first_is_asked_and_stays_as_it_was() -> None:
    model = Counts(lambda ids: model.steps.tolist() == [3, 0, -1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = lowtide.plan(model, IDS)
    assert plan.source == "fake"
    assert any(operation.name == "aten::addmm" for operation in plan.operations)
    assert model.steps.tolist() == [2, 0, 0]


def test_what_a_step_writes_from_parameters_into_a_buffer_is_not_taken_for_what_was_there() -> None:
    def question(ids: Tensor) -> bool:
        with torch.no_grad():
            model.steps.copy_(model.out.bias[:3])
        return bool(model.steps.sum() > -99)

    model = Counts(question)
    with pytest.warns(lowtide.DryRunWarning):
        assert lowtide.plan(model, IDS).source == "recorded"


def of_a_parameter(model: Asks, ids: Tensor) -> Tensor:
    made = torch.zeros(16)
    with torch.no_grad():
        made[2:] = model.out.bias[2:]
    return made


def of_chance(model: Asks, ids: Tensor) -> Tensor:
    return F.dropout(torch.ones(16)).add_(1)


def of_noise(model: Asks, ids: Tensor) -> Tensor:
    return torch.zeros(16).normal_()


def of_statistics(model: Asks, ids: Tensor) -> Tensor:
    model.norm(ids.float())
    assert model.norm.running_mean is not None
    return model.norm.running_mean


@pytest.mark.parametrize("made", [of_a_parameter, of_chance, of_noise, of_statistics])
def test_what_a_real_step_alone_knows_is_not_guessed(
    made: Callable[[Asks, Tensor], Tensor],
) -> None:
    model = Asks(lambda ids: bool(made(model, ids).sum() > -99))
    with pytest.warns(lowtide.DryRunWarning):
        assert lowtide.plan(model, IDS).source == "recorded"


class Averages(Asks):
    """Keeps a running mean by hand, much larger than a counter."""

    mean: Tensor

    def __init__(self, question: Callable[[Tensor], bool]) -> None:
        super().__init__(question)
        self.register_buffer("mean", torch.zeros(1 << 16))

    def forward(self, ids: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(1)
        return super().forward(ids)


def test_a_large_buffer_is_not_read_where_it_is_written() -> None:
    """Rule 4: a step copies what it has read and the program then writes."""
    model = Averages(lambda ids: True)
    plan = lowtide.plan(model, IDS)
    plain = lowtide.measure(lambda: model(IDS).backward(), device="cpu").peak_bytes
    assert plan.source == "fake"
    assert abs(plan.plain_peak - plain) < 4096 < model.mean.nbytes


def test_what_is_in_a_large_buffer_that_was_written_is_not_guessed() -> None:
    model = Averages(lambda ids: bool(model.mean[0] > 0))
    with pytest.warns(lowtide.DryRunWarning):
        assert lowtide.plan(model, IDS).source == "recorded"


def test_a_step_that_cannot_be_traced_says_what_to_do_first() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    with pytest.raises(lowtide.UsageError, match="2 of the step's parameters and buffers have no"):
        lowtide.plan(lazy, torch.ones(2, 3))
    with torch.no_grad():
        lazy(torch.ones(2, 3))
    assert lowtide.plan(lazy, torch.ones(2, 3)).peak > 0
    with pytest.raises(lowtide.UsageError, match=r"not the class Linear: make one of it, Linear\("):
        lowtide.explain(nn.Linear, torch.ones(2, 3))

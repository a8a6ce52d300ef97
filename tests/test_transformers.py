"""lowtide.transformers: models, Trainer and peft adapters, bit for bit equal to the plain run.

All models are built from a configuration; nothing is downloaded. Rules of docs/semantics.md are
cited by number.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from by_hand import absent, same
from lowtide.errors import BudgetError, UsageError
from lowtide.policies import KeepProducts
from once import on_one_recorder

pytest.importorskip("transformers")

import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lowtide.transformers import MemoryBudget, enable, set_checkpointing_function

# peft's warning, about transformers
pytestmark = [
    on_one_recorder,  # what frameworks do differs in no recorder
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning"),
]

VOCABULARY = 32


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "attention_dropout": 0.1,
        **options,
    }
    return LlamaForCausalLM(LlamaConfig(**settings))


def tokens(rows: int = 4, length: int = 48) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


def step(model: nn.Module, **options: Any) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    ids = tokens()
    loss = model(input_ids=ids, labels=ids, **options).loss
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert gradients
    return [loss.detach(), *gradients, torch.get_rng_state()]


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "limit": lambda model: enable(model, limit=0.7),
    "regions": lambda model: enable(model),
    "policy": lambda model: enable(model, policy=KeepProducts()),
    "own function": lambda model: set_checkpointing_function(model),
}


# --- a model by itself ------------------------------------------------------------------------


@pytest.mark.parametrize("way", list(WAYS))
def test_the_bits_of_the_plain_step(way: str, replayed: Callable[[], int]) -> None:
    plain, model = llama().train(), llama().train()
    enabled = WAYS[way](model)
    for _ in range(3):
        assert same(step(model, use_cache=False), step(plain, use_cache=False))
    before = replayed()
    assert before > 0
    enabled.remove()
    enabled.remove()
    assert same(step(model, use_cache=False), step(plain, use_cache=False))
    assert replayed() == before
    assert list(model.state_dict()) == list(plain.state_dict())
    if way != "own function":  # transformers leaves attributes of its own when switched off
        assert [set(vars(m)) for m in model.modules()] == [set(vars(m)) for m in llama().modules()]


def test_regions_and_their_names() -> None:
    model = llama()
    with enable(model, every_n_layers=2) as enabled:
        assert enabled.names == ("model.layers.0", "model.layers.2")
        assert enabled.budget is None
        assert enabled.active
        assert not model.is_activation_checkpointing
    assert not enabled.active
    own = set_checkpointing_function(model, every_n_layers=2)
    assert own.names == ("model.layers.0", "model.layers.2")
    assert model.is_activation_checkpointing
    assert own.active
    model.activation_checkpointing_disable()
    assert not model.is_activation_checkpointing
    assert not own.active
    own.remove()


def test_a_policy_keeps_the_products(replayed: Callable[[], int]) -> None:
    counts = []
    for policy in (None, KeepProducts()):
        model = llama().train()
        before = replayed()
        with enable(model, policy=policy):
            step(model, use_cache=False)
        counts.append(replayed() - before)
    assert 0 < counts[1] < counts[0]


@pytest.mark.parametrize("way", ["limit", "regions"])
def test_the_cache_grows_once(way: str) -> None:
    """In other tools a second forward appends to it again, or the cache is switched off."""
    plain, model = llama().train(), llama().train()
    lengths = []
    with WAYS[way](model):
        for each in (plain, model):
            torch.manual_seed(1)
            ids = tokens()
            out = each(input_ids=ids[:, :32], use_cache=True)
            more = each(input_ids=ids[:, 32:], past_key_values=out.past_key_values, use_cache=True)
            lengths.append([more.past_key_values.get_seq_length()])
            (out.logits.square().mean() + more.logits.square().mean()).backward()
            lengths[-1].append(more.past_key_values.get_seq_length())
    assert lengths == [[48, 48], [48, 48]]
    for one, two in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_generation_between_two_steps(replayed: Callable[[], int]) -> None:
    plain, model = llama().train(), llama().train()
    enabled = enable(model, limit=0.7)
    for _ in range(2):
        assert same(step(model, use_cache=False), step(plain, use_cache=False))
        before = replayed()
        texts = []
        for each in (plain, model):
            torch.manual_seed(5)
            texts.append(
                each.generate(tokens(1, 5), max_new_tokens=6, do_sample=True, pad_token_id=0)
            )
        assert torch.equal(*texts)
        assert replayed() == before  # rule 12
    report = enabled.report()
    assert report.steps == 2
    assert report.replayed_operations > 0


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
        ("BertForMaskedLM", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                             "intermediate_size": 32}),
        ("T5ForConditionalGeneration", {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2,
                                        "num_heads": 2, "decoder_start_token_id": 0}),
        ("MixtralForCausalLM", {"hidden_size": 16, "intermediate_size": 32, "num_local_experts": 4,
                                "num_hidden_layers": 2, "num_attention_heads": 2,
                                "num_key_value_heads": 2}),
    ],
)  # fmt: skip
def test_other_architectures(
    kind: str, options: dict[str, Any], replayed: Callable[[], int]
) -> None:
    base = getattr(transformers, kind)
    # Without the cache: the library disables it when its flag is on, which changes the bits.
    config = base.config_class(vocab_size=VOCABULARY, pad_token_id=0, use_cache=False, **options)

    def build() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = base(config).train()
        return model

    expected = step(build())
    for way in WAYS.values():
        model, before = build(), replayed()
        way(model)
        assert same(step(model), expected)
        assert replayed() > before


# --- what is refused --------------------------------------------------------------------------


def test_what_is_refused() -> None:
    model = llama()
    with pytest.raises(UsageError, match=r"either limit=, .* or policy= and every_n_layers="):
        enable(model, limit=0.5, policy=KeepProducts())
    with pytest.raises(UsageError, match="Sequential has no layers that transformers can checkp"):
        enable(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(
        UsageError, match=r"a model of transformers or peft, not a Linear; for other"
    ):
        set_checkpointing_function(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"takes a torch.nn.Module, not int"):
        enable(3)  # type: ignore[arg-type]
    for switch_on in (enable, set_checkpointing_function):
        name = switch_on.__name__
        with pytest.raises(UsageError, match=f"^{name}: policy is the class KeepProducts, not an"):
            switch_on(model, policy=KeepProducts)  # type: ignore[operator]
        with pytest.raises(UsageError, match=f"^{name}: every_n_layers is an int, 1 or more, not"):
            switch_on(model, every_n_layers=0)  # type: ignore[operator]
    with enable(model), pytest.raises(UsageError, match=r"^enable: 'model.layers.0' .* already"):
        enable(model)
    for way in ({"device": "cpu"}, {"group": True}):
        with pytest.raises(UsageError, match=r"enable got device= or group=.* and no limit"):
            enable(model, **way)  # type: ignore[arg-type]
    assert not model.is_activation_checkpointing


def test_what_is_on_shows_itself() -> None:
    """In a log, where an address says nothing."""
    model = llama()
    enabled = enable(model)
    assert repr(enabled).endswith("Enabled: 3 modules checkpointed>")
    with pytest.raises(UsageError, match="regions and no limit: call enable"):
        enabled.report()
    enabled.remove()
    assert repr(enabled) == "<lowtide.transformers.Enabled: removed>"
    with enable(model, "6 GiB") as enabled:  # by place too, as in lowtide.fit
        assert "6442450944 bytes (6.00 GiB), after 0 steps" in repr(enabled)
    shown = repr(lowtide.transformers.MemoryBudget("6 GiB"))
    assert shown == "<lowtide.transformers.MemoryBudget of '6 GiB'>"


@pytest.mark.parametrize("way", list(WAYS))
def test_the_librarys_own_checkpointing_is_refused(way: str) -> None:
    model = llama()
    model.activation_checkpointing_enable()
    with pytest.raises(UsageError, match=r"call model.activation_checkpointing_disable\(\)"):
        WAYS[way](model)
    model.activation_checkpointing_disable()
    WAYS[way](model)


def test_a_limit_that_cannot_be_met() -> None:
    model = llama().train()
    with enable(model, limit="40 KiB"), pytest.raises(BudgetError, match=r"not fit in 40\.0 KiB"):
        step(model)


# --- peft -------------------------------------------------------------------------------------


def adapted(way: str = "", *, before: bool = False) -> nn.Module:
    """A Llama whose only trained parameters are those of its LoRA adapters."""
    peft = pytest.importorskip("peft")
    model = llama().train()
    if way and before:
        WAYS[way](model)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    torch.manual_seed(4)
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at the start, so that lora_A would get no gradient
            nn.init.normal_(parameter, std=0.1)
    if way and not before:
        WAYS[way](model)
    return model.train()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("way", list(WAYS))
def test_adapters_in_every_layer_get_their_gradients(
    way: str, before: bool, replayed: Callable[[], int]
) -> None:
    """Frozen embeddings: the input of the first region does not require grad (rule 7)."""
    expected = step(adapted(), use_cache=False)
    model = adapted(way, before=before)
    for _ in range(2):
        assert same(step(model, use_cache=False), expected)
    assert replayed() > 0
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 3 * 2 * 2
    assert all(p.grad is not None and p.grad.any() for p in trained.values())


# --- Trainer ----------------------------------------------------------------------------------


def train(
    model: nn.Module, folder: Path, callbacks: tuple[Any, ...] = (), **options: Any
) -> tuple[Trainer, list[Tensor]]:
    """A short training; returns the trainer, and every parameter afterwards."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(0, VOCABULARY, (24, 40), generator=generator)
    settings: dict[str, Any] = {
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        **options,
    }
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, seed=3,
        per_device_train_batch_size=3, learning_rate=0.01, dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data[:6],
        callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train()
    return trainer, [p.detach().clone() for p in model.parameters()]


def losses(trainer: Trainer) -> list[float]:
    return [
        entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss")
        if key in entry
    ]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", list(WAYS))
def test_trainer(
    way: str, options: dict[str, Any], tmp_path: Path, replayed: Callable[[], int]
) -> None:
    """With gradient accumulation, evaluation in between, an optimizer and its schedule."""
    plain, expected = train(llama(), tmp_path, **options)
    model = llama()
    WAYS[way](model)
    trainer, found = train(model, tmp_path, **options)
    assert replayed() > 0
    assert same(found, expected)
    assert losses(trainer) == losses(plain)
    assert len(losses(plain)) == 6


@pytest.mark.parametrize("way", ["limit", "regions"])
def test_trainer_with_adapters(way: str, tmp_path: Path, replayed: Callable[[], int]) -> None:
    plain, expected = train(adapted(), tmp_path)
    trainer, found = train(adapted(way), tmp_path)
    assert replayed() > 0
    assert same(found, expected)
    assert losses(trainer) == losses(plain)


def test_trainer_callback(tmp_path: Path, replayed: Callable[[], int]) -> None:
    plain, expected = train(llama(), tmp_path)
    model = llama()
    callback = MemoryBudget(0.7)
    trainer, found = train(model, tmp_path, (callback,))
    assert replayed() > 0
    assert same(found, expected)
    assert losses(trainer) == losses(plain)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    last = logs[-1]
    assert 0 < last["lowtide/measured_peak"] <= last["lowtide/limit"]
    assert 0 < last["lowtide/planned_peak"] <= last["lowtide/limit"]
    assert set(vars(model)) == set(vars(llama())) | {"_is_accelerate_prepared"}
    trainer.train()  # a second training has a budget of its own
    assert not any(name.startswith("lowtide") for name in vars(model))


def test_trainer_callback_follows_a_plan(tmp_path: Path) -> None:
    """As `lowtide.fit` does, from the first step on."""
    _, expected = train(llama(), tmp_path)
    model = llama()
    row = torch.zeros(3, 40, dtype=torch.int64)
    step = {"input_ids": row, "labels": row, "num_items_in_batch": torch.tensor(240)}
    plan = lowtide.plan(lambda: model(**step, use_cache=False).loss, limit=0.7)
    callback = MemoryBudget(plan)
    assert (callback.report().limit, callback.report().steps) == (plan.limit, 0)
    _, found = train(model, tmp_path, (callback,))
    assert same(found, expected)
    assert callback.budget is not None
    assert callback.report() == callback.budget.report()
    assert callback.report().limit == plan.limit
    assert callback.report().steps > 0


def test_trainer_callback_after_a_training_that_failed(tmp_path: Path) -> None:
    model, callback = llama(), MemoryBudget("50 KiB")
    with pytest.raises(BudgetError):
        train(model, tmp_path, (callback,))
    callback.limit = 0.7
    train(model, tmp_path, (callback,))


def test_trainers_own_checkpointing_beside_the_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gradient_checkpointing is True; call model"):
        train(llama(), tmp_path, (MemoryBudget(0.7),), activation_checkpointing=True)


def test_trainers_own_checkpointing_after_a_limit_is_refused(tmp_path: Path) -> None:
    """Trainer switches it on when training begins, after the model got its budget."""
    model = llama()
    enable(model, limit=0.7)
    with pytest.raises(UsageError, match="gradient_checkpointing is True; call model"):
        train(model, tmp_path, activation_checkpointing=True)


def test_rows_of_different_lengths(tmp_path: Path, replayed: Callable[[], int]) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        for length in (48, 20, 48, 33, 20, 48):
            ids = tokens(length=length)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, model = llama().train(), llama().train()
    peak = lowtide.measure(lambda: run(llama().train()), device="cpu").peak_bytes
    enable(model, limit=int(0.8 * peak))
    assert same(run(model), run(plain))
    assert replayed() > 0


def test_trainer_resumes_where_the_plain_run_would(
    tmp_path: Path, replayed: Callable[[], int]
) -> None:
    _, expected = train(llama(), tmp_path / "plain")
    first = llama()
    train(first, tmp_path, (MemoryBudget(0.7),), save_strategy="steps", save_steps=2)
    model = llama()
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(0, VOCABULARY, (24, 40), generator=generator)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, seed=3,
        per_device_train_batch_size=3, learning_rate=0.01, dataloader_pin_memory=False,
        max_steps=4, gradient_accumulation_steps=2, save_strategy="no",
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(
        model=model, args=arguments, train_dataset=data, callbacks=[MemoryBudget(0.7)]
    )
    before = replayed()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert replayed() > before
    assert same([p.detach() for p in model.parameters()], expected)


# --- the module itself ------------------------------------------------------------------------


def test_a_copy_of_an_enabled_model_is_plain() -> None:
    """Rule 11."""
    model = llama()
    enable(model, limit=0.7)
    copied = copy.deepcopy(model)
    assert set(vars(copied)) == set(vars(llama()))


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        absent("transformers", monkeypatch),
        pytest.raises(ImportError, match=r"pip install 'transformers>=5\.0'"),
    ):
        importlib.import_module("lowtide.transformers")

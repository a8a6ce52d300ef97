"""Regions by module: selection, the way a module is switched on and off, and what stays plain.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide import replay
from lowtide.errors import UsageError
from lowtide.modules import (
    ActivationCheckpointing,
    ActivationCheckpointWrapper,
    checkpoint_modules,
    every,
    find_active_checkpointing,
    is_checkpointed,
    override_forward,
)
from lowtide.selection import name_matches


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.2)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return x + scale * self.drop(self.second(self.first(self.norm(x)).relu()))


class Net(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        out: Tensor = self.head(x)
        return out


def net(depth: int = 4) -> Net:
    torch.manual_seed(0)
    return Net(depth)


def step(model: nn.Module) -> list[Tensor]:
    """Loss, gradients and buffers of one step."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(torch.randn(6, 4)).square().mean()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(b.clone() for b in model.buffers())]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(map(torch.equal, one, two))


@pytest.fixture
def replayed() -> Iterator[Callable[[], int]]:
    """How many operations were replayed since the fixture was set up."""
    counts: list[int] = []

    def listener(operations: list[Any]) -> None:
        counts.append(len(operations))

    replay.listeners.append(listener)
    yield lambda: sum(counts)
    replay.listeners.remove(listener)


# --- selection --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("layers.0", "layers.*", True),
        ("layers.0.first", "layers.*", False),
        ("layers.0.first", "layers.**", True),
        ("layers", "layers.**", True),
        ("features.denseblock2", "features.denseblock*", True),
        ("features.denseblock2.layer", "features.denseblock*", False),
        ("a.b.c.mlp", "**.mlp", True),
        ("mlp", "**.mlp", True),
        ("a.b.c.mlp", "*.mlp", True),
        ("mlp", "*.mlp", False),
        ("head", "*", True),
        ("a.head", "*", False),
        ("layers.3", "layers.[0-2]", False),
        ("layers.2", "layers.[0-2]", True),
        ("layers.12", "layers.?", False),
        ("Layers.1", "layers.*", False),
    ],
)
def test_patterns(name: str, pattern: str, fits: bool) -> None:
    assert name_matches(name, pattern) is fits


@pytest.mark.parametrize(
    ("which", "names"),
    [
        (Block, ("layers.0", "layers.1", "layers.2", "layers.3")),
        ("layers.*", ("layers.0", "layers.1", "layers.2", "layers.3")),
        ((Block, "head"), ("layers.0", "layers.1", "layers.2", "layers.3", "head")),
        (["head", "stem"], ("stem", "head")),
        (lambda name, module: name.endswith("1") and isinstance(module, Block), ("layers.1",)),
        (every(2, "layers.*"), ("layers.0", "layers.2")),
        (every(3, Block, start=1), ("layers.1",)),
        ([every(2, Block), "layers.0"], ("layers.0", "layers.2")),
        (["layers.1", "*.first"], (*(f"layers.{n}.first" for n in range(4)), "layers.1")),
    ],
)
def test_what_is_selected(which: Any, names: tuple[str, ...]) -> None:
    handle = checkpoint_modules(net(), which)
    assert set(handle.names) == set(names)
    assert len(handle.names) == len(names)


def test_names_come_in_the_models_order() -> None:
    assert checkpoint_modules(net(), ["head", Block, "stem"]).names[0] == "stem"


def test_a_container_is_passed_over_where_its_items_match_too() -> None:
    assert checkpoint_modules(net(1), "layers.**").names == (
        "layers.0",
        "layers.0.norm",
        "layers.0.first",
        "layers.0.second",
        "layers.0.drop",
    )


def test_one_module_under_two_names_is_switched_on_once() -> None:
    model = nn.ModuleDict({"a": Block(), "b": Block()})
    model["c"] = model["a"]
    handle = checkpoint_modules(model, ["c", "a"])
    assert len(handle.names) == 1
    handle.remove()
    assert not is_checkpointed(model["a"])
    assert checkpoint_modules(model, "c").names == ("c",)


def fails(which: Any, model: nn.Module | None = None) -> str:
    target = net() if model is None else model
    before = [set(vars(m)) for m in target.modules()]
    with pytest.raises(UsageError) as caught:
        checkpoint_modules(target, which)
    assert [set(vars(m)) for m in target.modules()] == before, "a refusal left something behind"
    return str(caught.value)


def test_a_pattern_that_matches_nothing_lists_near_misses() -> None:
    text = fails("layer.*")
    assert "no module is named 'layer.*': it matches none of the 23 modules of this Net" in text
    assert "Close: layers.*" in text


def test_a_pattern_meant_for_deeper_modules_says_so() -> None:
    assert "'**.first' would match 4" in fails("first")


def test_a_pattern_with_nothing_near_lists_the_top() -> None:
    assert "Its top names are: stem, layers, head." in fails("qqqqqqqq")


def test_a_type_that_matches_nothing_lists_near_misses() -> None:
    text = fails(nn.BatchNorm2d)
    assert "no module is a BatchNorm2d: none of the 23 modules of this Net is one." in text
    assert "Close: BatchNorm1d (4)" in text


def test_a_type_with_nothing_near_lists_what_there_is() -> None:
    assert "It has: Linear (10), Block (4)" in fails(nn.LSTM)


def test_another_class_of_the_same_name_is_told() -> None:
    other = type("Block", (nn.Module,), {})
    text = fails(other)
    assert "4 are " in text
    assert "another class than" in text


def test_every_entry_of_a_list_must_match() -> None:
    assert "no module is named 'nope'" in fails([Block, "nope"])


def test_a_predicate_that_is_never_true() -> None:
    text = fails(lambda name, module: None)
    assert "returned a false value for every one of the 23 modules" in text
    assert "predicate(name, module)" in text


@pytest.mark.parametrize("which", ["layers", nn.ModuleList])
def test_only_containers(which: Any) -> None:
    text = fails(which)
    assert "matches only containers, which hold modules but are never called" in text
    assert "layers (ModuleList)" in text
    assert "'layers.*'" in text


@pytest.mark.parametrize("which", [3, None, nn.Linear(1, 1)])
def test_a_selection_of_the_wrong_kind(which: Any) -> None:
    assert "cannot select modules by" in fails(which)


def test_an_empty_selection() -> None:
    assert "the selection is empty" in fails([])


def test_every_beyond_the_end() -> None:
    assert "takes nothing: there are 4 such modules" in fails(every(2, Block, start=4))


@pytest.mark.parametrize(("n", "start"), [(0, 0), (-1, 0), (2.0, 0), (True, 0), (2, -1)])
def test_every_with_bad_numbers(n: Any, start: Any) -> None:
    with pytest.raises(UsageError, match=r"is a whole number, [01] or more; every\(2, 'layers"):
        every(n, "layers.*", start)


def test_a_model_without_modules() -> None:
    assert "none of the 0 modules of this ReLU" in fails(nn.Linear, nn.ReLU())


def test_the_model_must_be_a_module() -> None:
    with pytest.raises(UsageError, match=r"takes a torch.nn.Module, not function"):
        checkpoint_modules(fails, "x")  # type: ignore[arg-type]


def test_a_policy_must_be_callable() -> None:
    with pytest.raises(UsageError, match="policy must be callable"):
        checkpoint_modules(net(), Block, policy="save")


# --- on and off -------------------------------------------------------------------------------


def test_the_step_has_the_same_bits_and_something_is_replayed(replayed: Callable[[], int]) -> None:
    """Rules 1 and 2."""
    model, plain = net(), net()
    checkpoint_modules(model, Block)
    for _ in range(3):
        assert same(step(model), step(plain))
    assert replayed() > 0
    assert [layer.calls for layer in model.layers] == [3] * 4
    assert all(layer.norm.num_batches_tracked == 3 for layer in model.layers)


def test_nested_selections(replayed: Callable[[], int]) -> None:
    """Rule 9."""
    model, plain = net(), net()
    handle = checkpoint_modules(model, ["layers.*", "layers.*.first", nn.BatchNorm1d])
    assert len(handle.names) == 12
    assert same(step(model), step(plain))
    assert replayed() > 0


def test_nothing_runs_as_a_region_in_eval_or_without_grad(replayed: Callable[[], int]) -> None:
    """Rule 12."""
    model, plain = net().eval(), net().eval()
    checkpoint_modules(model, Block)
    assert same(step(model), step(plain))
    model.train()
    with torch.no_grad():
        assert not model(torch.randn(6, 4)).requires_grad
    with torch.inference_mode():
        model(torch.randn(6, 4))
    assert replayed() == 0
    step(model)
    assert replayed() > 0


def test_a_part_in_eval_is_no_region_of_a_training_model(replayed: Callable[[], int]) -> None:
    model = net(1)
    checkpoint_modules(model, Block)
    model.layers[0].eval()
    step(model)
    assert replayed() == 0


def test_remove_leaves_nothing(replayed: Callable[[], int]) -> None:
    model = net()
    before = [dict(vars(m)) for m in model.modules()]
    handle = checkpoint_modules(model, Block)
    assert handle.active
    handle.remove()
    handle.remove()
    assert not handle.active
    assert [dict(vars(m)) for m in model.modules()] == before
    step(model)
    assert replayed() == 0


def test_the_handle_as_a_context_manager() -> None:
    model = net()
    with pytest.raises(KeyError), checkpoint_modules(model, Block) as handle:
        assert is_checkpointed(model.layers[0])
        raise KeyError
    assert not handle.active
    assert not is_checkpointed(model.layers[0])


def test_the_handle_prints_well() -> None:
    model = net(6)
    handle = checkpoint_modules(model, Block)
    assert repr(handle) == (
        "<lowtide.Handle: 6 modules checkpointed: "
        "layers.0, layers.1, layers.2, layers.3, and 2 more>"
    )
    assert handle.describe().splitlines()[5] == "layers.5"
    handle.remove()
    assert "6 modules checkpointed no longer" in repr(handle)
    assert repr(checkpoint_modules(model, "head")) == (
        "<lowtide.Handle: 1 module checkpointed: head>"
    )


def test_twice_on_one_module_is_refused() -> None:
    model = net()
    handle = checkpoint_modules(model, "layers.1")
    text = fails(Block, model)
    assert "'layers.1' (Block) is already checkpointed by lowtide" in text
    assert "call .remove() on the handle" in text
    assert is_checkpointed(model.layers[1])
    assert not is_checkpointed(model.layers[0])
    handle.remove()
    checkpoint_modules(model, Block)


def test_a_deleted_model_is_freed_at_once() -> None:
    model = net()
    handle = checkpoint_modules(model, Block)
    step(model)
    gone = weakref.ref(model.layers[0])
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    handle.remove()


def test_a_forward_that_outlives_its_module_says_so() -> None:
    model = net(1)
    checkpoint_modules(model, Block)
    forward = model.layers[0].forward
    del model
    with pytest.raises(ReferenceError, match="belongs to a module that was deleted"):
        forward(torch.zeros(2, 8))


def test_a_forward_with_checkpoints_own_keywords() -> None:
    class Odd(nn.Linear):
        def forward(self, input: Tensor, policy: int = 0, debug: int = 0) -> Tensor:
            return super().forward(input).relu() * policy * debug

    model = nn.Sequential(Odd(4, 4))
    checkpoint_modules(model, Odd)
    x = torch.randn(2, 4)
    expected = nn.Linear.forward(model[0], x).relu() * 6
    assert torch.equal(model[0](x, policy=2, debug=3), expected)


def test_hooks_fire_once() -> None:
    """Rule 2."""
    model = net(1)
    checkpoint_modules(model, Block)
    fired: list[str] = []
    model.layers[0].register_forward_hook(lambda *_: fired.append("forward"))
    model.layers[0].first.register_forward_hook(lambda *_: fired.append("inner"))
    model.layers[0].register_full_backward_hook(lambda *_: fired.append("backward"))
    step(model)
    assert sorted(fired) == ["backward", "forward", "inner"]


def test_policies_reach_the_region(replayed: Callable[[], int]) -> None:
    model, plain = net(), net()
    checkpoint_modules(model, Block, policy=lambda info: True)
    assert same(step(model), step(plain))
    assert replayed() == 0


# --- what stays plain (rule 11) ---------------------------------------------------------------


def test_names_and_types_are_those_of_the_plain_model() -> None:
    model, plain = net(), net()
    checkpoint_modules(model, Block)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [(n, type(m)) for n, m in model.named_modules()] == [
        (n, type(m)) for n, m in plain.named_modules()
    ]
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())


def copies(model: nn.Module) -> Iterator[nn.Module]:
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    yield pickle.loads(pickle.dumps(model, protocol=0))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    yield torch.load(buffer, weights_only=False)
    yield copy.deepcopy(copy.deepcopy(model))


def test_copies_are_plain_and_train(replayed: Callable[[], int]) -> None:
    model, plain = net(), net()
    checkpoint_modules(model, [Block, "head"])
    expected = step(plain)
    for each in copies(model):
        for one, two in zip(each.modules(), net().modules(), strict=True):
            assert set(vars(one)) == set(vars(two))
            assert not is_checkpointed(one)
        assert same(step(each), expected)
    assert replayed() == 0
    assert is_checkpointed(model.head)
    assert same(step(model), expected)


def test_a_shallow_copy_is_plain() -> None:
    model = net(1)
    checkpoint_modules(model, Block)
    each = copy.copy(model.layers[0])
    assert set(vars(each)) == set(vars(Block()))
    assert each.first is model.layers[0].first


def test_a_pickle_names_lowtide_nowhere() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    checkpoint_modules(model, nn.Linear)
    assert b"lowtide" not in pickle.dumps(model)


class OwnCopy(nn.Linear):
    """Copies and pickles its dictionary by hand."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnCopy:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for key, value in vars(self).items():
            new.__dict__[key] = copy.deepcopy(value, memo)
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {"inside": dict(vars(self))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["inside"])


def test_a_class_that_copies_by_hand_gets_a_copy_that_runs_itself() -> None:
    model = nn.Sequential(OwnCopy(3, 3))
    checkpoint_modules(model, OwnCopy)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not is_checkpointed(each[0])
        with torch.no_grad():
            each[0].weight.zero_()
            each[0].bias.zero_()
        assert torch.equal(each(torch.ones(1, 3)), torch.zeros(1, 3))
        assert each[0].forward.__self__ is each[0]


def test_a_copied_method_belongs_to_a_copied_module() -> None:
    block = Block()
    ActivationCheckpointWrapper(block)
    forward = copy.deepcopy(block.forward)
    assert forward.__self__ is not block
    assert type(forward.__self__) is Block


def test_a_traced_graph_module_copies() -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    ActivationCheckpointWrapper(graph)
    x = torch.randn(3, 2)
    assert torch.equal(copy.deepcopy(graph)(x), graph(x))


def test_signature_and_unwrapping_see_the_plain_forward() -> None:
    block = Block()
    expected = inspect.signature(block.forward)
    ActivationCheckpointWrapper(block)
    assert inspect.signature(block.forward) == expected
    assert block.forward.__self__ is block
    assert block.forward.__func__ is Block.forward
    assert block.forward.__name__ == "forward"
    assert repr(block.forward) == "<forward of Block, checkpoint>"


def test_somebody_elses_patched_forward_is_kept(replayed: Callable[[], int]) -> None:
    model = net(1)
    block = model.layers[0]
    calls: list[int] = []
    own = block.forward

    def patched(x: Tensor, **kwargs: Any) -> Tensor:
        calls.append(1)
        out: Tensor = own(x, **kwargs)
        return out

    block.forward = patched
    handle = checkpoint_modules(model, Block)
    step(model)
    assert len(calls) == 1
    assert replayed() > 0
    handle.remove()
    assert vars(block)["forward"] is patched


def test_a_patch_put_over_ours_is_left_alone(replayed: Callable[[], int]) -> None:
    import functools

    model = net(1)
    block = model.layers[0]
    handle = checkpoint_modules(model, Block)
    ours = block.forward

    @functools.wraps(ours)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    block.forward = patched
    assert is_checkpointed(block)
    assert "already checkpointed" in fails(Block, model)
    handle.remove()
    assert vars(block)["forward"] is patched
    assert not is_checkpointed(block)
    step(model)
    assert replayed() == 0
    checkpoint_modules(model, Block)
    step(model)
    assert replayed() > 0


def test_layers_of_overrides_come_off_in_any_order() -> None:
    block = Block().eval()
    seen: list[str] = []

    def layer(label: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                seen.append(label)
                return forward(*args, **kwargs)

            return call

        return make

    inner = override_forward(block, layer("inner"))
    outer = override_forward(block, layer("outer"))
    x = torch.zeros(2, 8)
    block(x)
    assert seen == ["outer", "inner"]
    inner.remove()
    seen.clear()
    block(x)
    assert seen == ["outer"]
    outer.remove()
    outer.remove()
    assert set(vars(block)) == set(vars(Block()))
    assert not outer.active


def test_an_override_that_fails_to_build_leaves_nothing() -> None:
    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        raise KeyError("no")

    block = Block()
    with pytest.raises(KeyError):
        override_forward(block, make)
    assert set(vars(block)) == set(vars(Block()))


def test_a_data_parallel_replica_runs_its_own_forward(replayed: Callable[[], int]) -> None:
    linear = nn.Linear(2, 2)
    handle = checkpoint_modules(nn.Sequential(linear), "0")
    replica = linear._replicate_for_data_parallel()
    replica.weight = torch.zeros(2, 2)
    replica.bias = torch.ones(2)
    assert torch.equal(replica(torch.randn(1, 2)), torch.ones(1, 2))
    assert is_checkpointed(replica)
    handle.remove()
    assert not is_checkpointed(linear)


# --- other people's checkpointing, compiled and scripted modules ------------------------------


class Flagged(nn.Module):
    def __init__(self, **flags: Any) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 2)
        self.__dict__.update(flags)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x)
        return out


@pytest.mark.parametrize(
    "flag", ["use_checkpoint", "use_checkpointing", "memory_efficient", "grad_checkpointing"]
)
def test_flags_are_found(flag: str) -> None:
    assert find_active_checkpointing(nn.Sequential(Flagged(**{flag: False}))) == []
    assert find_active_checkpointing(nn.Sequential(Flagged(**{flag: "auto"}))) == []
    model = nn.Sequential(Flagged(), Flagged(**{flag: True}))
    assert find_active_checkpointing(model) == [
        ("1", f"{flag} is True; build the model with {flag}=False or set it to False")
    ]
    text = fails("0", model)
    assert "this Sequential is already checkpointed by other means in 1 of its modules" in text
    assert f"{flag} is True" in text
    assert text.endswith(": 1")


def test_transformers_flag_is_found_and_can_be_switched_off() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=20,
    )
    model = transformers.BertModel(config)
    assert find_active_checkpointing(model) == []
    model.activation_checkpointing_enable()
    names = [name for name, _ in find_active_checkpointing(model)]
    assert "encoder.layer.1" in names
    assert "call model.activation_checkpointing_disable()" in fails("encoder.layer.*", model)
    model.activation_checkpointing_disable()
    checkpoint_modules(model, "encoder.layer.*")


def test_transformers_flag_with_lowtide_behind_it_is_no_conflict() -> None:
    import functools

    import lowtide

    function = functools.partial(lowtide.checkpoint)
    model = Flagged(gradient_checkpointing=True, _gradient_checkpointing_func=function)
    assert find_active_checkpointing(model) == []


def test_monais_flag_and_wrapper_are_found() -> None:
    pytest.importorskip("monai")
    from monai.networks.nets.swin_unetr import SwinTransformerBlock
    from monai.networks.nets.unet import CheckpointUNet

    block = SwinTransformerBlock(8, 2, (2, 2), (0, 0), use_checkpoint=True)
    assert [name for name, _ in find_active_checkpointing(block)] == [""]
    found = find_active_checkpointing(CheckpointUNet(2, 1, 1, (2, 2), (2,)))
    assert [name for name, _ in found] == ["model.0", "model.1.submodule", "model.2"]
    assert "monai's ActivationCheckpointWrapper" in found[0][1]


def test_torchs_wrappers_are_found() -> None:
    from torch.distributed._composable import checkpoint
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    checkpoint(model[1])
    found = dict(find_active_checkpointing(model))
    assert set(found) == {"0", "1"}
    assert "torch's CheckpointWrapper" in found["0"]
    assert "composable checkpoint()" in found["1"]


def test_a_script_module_is_refused() -> None:
    model = net()
    with pytest.warns(DeprecationWarning):
        model.head = torch.jit.script(nn.Linear(8, 2))
    assert "'head' is a TorchScript module" in fails("head", model)
    checkpoint_modules(model, "stem")


def test_compiled_modules_are_refused() -> None:
    model = net()
    compiled = torch.compile(model, backend="eager")
    text = fails("_orig_mod.layers.*", compiled)
    assert "inside the model, which is already compiled with torch.compile" in text
    assert "apply lowtide first, then compile" in text
    model.layers[0].compile(backend="eager")
    assert "'layers.0.first' is inside 'layers.0'" in fails("layers.0.first", model)
    checkpoint_modules(model, "layers.1")


def test_compiling_after_lowtide_has_no_graph_break() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 8)
            self.second = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x).relu())
            return out

    torch.manual_seed(0)
    model = nn.Sequential(Plain(), Plain())
    plain = copy.deepcopy(model)
    checkpoint_modules(model, Plain)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for each in (compiled, plain):
        torch.manual_seed(1)
        each(torch.randn(3, 4)).square().sum().backward()
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


# --- the wrapper ------------------------------------------------------------------------------


def test_the_wrapper_gives_back_the_module_switched_on(replayed: Callable[[], int]) -> None:
    model, plain = net(), net()
    for at, layer in enumerate(model.layers):
        model.layers[at] = ActivationCheckpointWrapper(layer)
        assert model.layers[at] is layer
    assert same(step(model), step(plain))
    assert replayed() > 0
    assert list(model.state_dict()) == list(plain.state_dict())
    assert isinstance(model.layers[0], Block)
    assert isinstance(model.layers[0], ActivationCheckpointWrapper)
    assert not isinstance(plain.layers[0], ActivationCheckpointWrapper)
    assert not isinstance(3, ActivationCheckpointWrapper)
    assert issubclass(ActivationCheckpointWrapper, nn.Module)
    assert all(layer.norm.num_batches_tracked == 1 for layer in model.layers)


def test_the_wrapper_recomputes_nothing_in_eval(replayed: Callable[[], int]) -> None:
    model = nn.Sequential(ActivationCheckpointWrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
    model.eval()
    step(model)
    assert replayed() == 0


def test_the_wrapper_twice_is_the_wrapper_once(replayed: Callable[[], int]) -> None:
    block = Block()
    assert ActivationCheckpointWrapper(ActivationCheckpointWrapper(block)) is block
    ActivationCheckpointWrapper.remove(block)
    assert not is_checkpointed(block)
    assert set(vars(block)) == set(vars(Block()))
    ActivationCheckpointWrapper.remove(block)


@pytest.mark.parametrize("prefix", ["", "module.", "module.module.", "_checkpoint_wrapped_module."])
def test_the_wrapper_loads_plain_and_wrapped_weights(prefix: str) -> None:
    torch.manual_seed(0)
    source = Block()
    model = nn.Sequential(ActivationCheckpointWrapper(Block()))
    weights = {f"0.{prefix}{key}": value for key, value in source.state_dict().items()}
    assert not any(model.load_state_dict(weights))
    assert torch.equal(model[0].first.weight, source.first.weight)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**weights, "0.module.nothing": torch.zeros(1)})


def test_a_child_that_is_called_module_keeps_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.module(x)
            return out

    holder, source = ActivationCheckpointWrapper(Holder()), Holder()
    holder.load_state_dict(source.state_dict())
    assert torch.equal(holder.module.weight, source.module.weight)  # type: ignore[union-attr]


def test_what_the_wrapper_refuses() -> None:
    with pytest.raises(UsageError, match="ModuleList has no forward; wrap the modules it holds"):
        ActivationCheckpointWrapper(nn.ModuleList())
    with pytest.raises(UsageError, match=r"takes a torch.nn.Module, not int"):
        ActivationCheckpointWrapper(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="use_checkpoint is True"):
        ActivationCheckpointWrapper(Flagged(use_checkpoint=True))
    with pytest.raises(UsageError, match="cannot be subclassed"):
        type("Mine", (ActivationCheckpointWrapper,), {})


# --- levels of single calls -------------------------------------------------------------------


@pytest.mark.parametrize("own", range(6))
@pytest.mark.parametrize("training", range(6))
def test_a_call_is_a_region_up_to_the_training_level(
    own: int, training: int, replayed: Callable[[], int]
) -> None:
    call = ActivationCheckpointing(own, training)
    weight = torch.ones(3, requires_grad=True)

    def function(x: Tensor, *, power: int) -> Tensor:
        return (weight * x).exp().pow(power)

    call(function, torch.ones(3), power=2).sum().backward()
    assert (replayed() > 0) is (own <= training)
    assert call.perform_checkpointing is (own <= training)
    assert weight.grad is not None
    assert torch.allclose(weight.grad, 2 * torch.ones(3).exp() ** 2)


def test_the_calls_follow_their_model_into_eval(replayed: Callable[[], int]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.level2 = ActivationCheckpointing(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.level2(self.block, x, scale=2.0)
            return out

    model = Model()
    assert list(model.state_dict()) == [f"block.{key}" for key in Block().state_dict()]
    model.eval()
    model(torch.randn(4, 8)).sum().backward()
    assert replayed() == 0
    model.train()
    copy.deepcopy(model)(torch.randn(4, 8)).sum().backward()
    assert replayed() > 0
    model.level2.training_checkpoint_level = 1
    assert not model.level2.perform_checkpointing
    assert repr(model.level2) == "ActivationCheckpointing(2, 1)"


def test_a_call_takes_torchs_keyword_and_the_functions_own() -> None:
    call = ActivationCheckpointing(1, 1)
    assert call(lambda x: x + 1, torch.zeros(1), use_reentrant=False) == 1
    assert call(lambda fn, policy: fn + policy, fn=1, policy=2) == 3


@pytest.mark.parametrize("level", [-1, 6, 100])
def test_levels_out_of_range(level: int) -> None:
    with pytest.raises(UsageError, match=rf"fn_checkpoint_level is {level}, outside 0 to 5: 0 not"):
        ActivationCheckpointing(level, 0)
    call = ActivationCheckpointing(0, 0)
    with pytest.raises(UsageError, match=rf"training_checkpoint_level is {level}, outside 0 to 5"):
        call.training_checkpoint_level = level


@pytest.mark.parametrize("level", [True, 1.0, "2", None, torch.tensor(2)])
def test_levels_of_the_wrong_type(level: Any) -> None:
    with pytest.raises(UsageError, match="is a whole number from 0 to 5, not"):
        ActivationCheckpointing(1, level)
    with pytest.raises(UsageError, match="fn_checkpoint_level is a whole number"):
        ActivationCheckpointing(level, 1)


def test_importing_modules_loads_no_integration() -> None:
    code = (
        "import sys, lowtide.modules, lowtide.levels; "
        "print([m for m in ('monai', 'transformers', 'lightning', 'torch._dynamo') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""Regions by module: selection, and switching on and off.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import copy
import gc
import operator
import pickle
import weakref
from collections.abc import Callable
from typing import Any, Union

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from by_hand import Block, fails, net, same, step
from lowtide.errors import UncountedWarning, UsageError
from lowtide.modules import checkpoint_modules, is_checkpointed
from lowtide.selection import every, name_matches

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
        (every(2, ["layers.3", "layers.0"]), ("layers.0",)),
        (every(np.int64(2), "layers.*", np.int64(1)), ("layers.1", "layers.3")),  # type: ignore
        ({Block}, ("layers.0", "layers.1", "layers.2", "layers.3")),
        ({"head": None}.keys(), ("head",)),
        (nn.Conv1d | nn.Dropout, tuple(f"layers.{n}.drop" for n in range(4))),
        (Union[nn.Conv1d, nn.Dropout], tuple(f"layers.{n}.drop" for n in range(4))),  # noqa: UP007
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


def test_a_pattern_that_matches_nothing_lists_near_misses() -> None:
    text = fails("layer.*")
    assert "no module is named 'layer.*': it matches none of the 23 modules of this Net" in text
    assert "Close: layers.*" in text


def test_a_pattern_meant_for_deeper_modules_says_so() -> None:
    assert "'**.first' would match 4" in fails("first")


def test_a_pattern_with_nothing_near_lists_the_top() -> None:
    assert "Its top-level names are: stem, layers, head." in fails("qqqqqqqq")


def test_a_type_that_matches_nothing_lists_near_misses() -> None:
    text = fails(nn.BatchNorm2d)
    assert "no module is a BatchNorm2d: none of the 23 modules of this Net is one." in text
    assert "Close: BatchNorm1d (4)" in text


def test_a_type_with_nothing_near_lists_what_there_is() -> None:
    assert "It has: Linear (10), Block (4)" in fails(nn.LSTM)


def test_a_union_of_types_that_matches_nothing() -> None:
    text = fails(nn.Conv1d | nn.Conv2d)
    assert text.startswith("no module is a Conv1d or Conv2d: none of the ")


def test_another_class_of_the_same_name_is_told() -> None:
    other = type("Block", (nn.Module,), {})
    text = fails(other)
    assert "4 are " in text
    assert "another class than" in text


def test_the_name_of_a_type_is_told_from_the_name_of_a_module() -> None:
    told = fails("LayerNorm", nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    assert "1 of its modules are of a type of this name: give the type" in told


def test_a_class_is_no_model() -> None:
    with pytest.raises(UsageError, match=r"not the class Linear: make one of it, Linear"):
        checkpoint_modules(nn.Linear, "*")  # type: ignore[arg-type]


def test_every_entry_of_a_list_must_match() -> None:
    assert "no module is named 'nope'" in fails([Block, "nope"])


def test_a_predicate_that_is_never_true() -> None:
    text = fails(lambda name, module: None)
    assert "returned a false value for each of the 23 modules" in text
    assert "predicate(name, module)" in text


def test_a_predicate_of_the_module_alone_is_told_what_it_is_called_with() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(
        UsageError, match=r"predicate\(name, module\): too many positional.* f\(mod"
    ):
        checkpoint_modules(model, lambda module: True)  # type: ignore[arg-type,misc]


@pytest.mark.parametrize("which", ["layers", nn.ModuleList, operator.attrgetter("layers")])
def test_only_containers(which: Any) -> None:
    model = net()
    text = fails(which(model) if isinstance(which, operator.attrgetter) else which, model)
    assert "matches only containers, which hold modules but are never called" in text
    assert "layers (ModuleList)" in text
    assert "'layers.*'" in text


@pytest.mark.parametrize("which", [3, None, 1.5, b"layers", {"layers.0": True}, list[Block]])
def test_a_selection_of_the_wrong_kind(which: Any) -> None:
    assert "cannot select modules by" in fails(which)


def test_modules_are_selected_by_themselves() -> None:
    model = net()
    handle = checkpoint_modules(model, [model.layers[1], model.head])
    assert handle.names == ("layers.1", "head")


def test_a_module_of_another_model_is_none_of_this() -> None:
    text = fails(nn.Linear(1, 1))
    assert "the given Linear is not a module of this" in text
    assert "but of another model or of a copy" in text


def test_a_slice_of_a_model_says_what_it_is() -> None:
    model = net()
    text = fails(model.layers[1:], model)
    assert "all that it holds are (slicing makes a new one): give these as a list" in text
    assert checkpoint_modules(model, [*model.layers[2:]]).names == ("layers.2", "layers.3")


def test_an_empty_selection() -> None:
    assert "the selection is empty" in fails([])
    assert "the selection is empty" in fails(iter(()))


def test_every_beyond_the_end() -> None:
    assert "selects nothing: there are 4 such modules" in fails(every(2, Block, start=4))


@pytest.mark.parametrize(("n", "start"), [(0, 0), (-1, 0), (2.0, 0), (True, 0), (2, -1)])
def test_every_with_bad_numbers(n: Any, start: Any) -> None:
    with pytest.raises(UsageError, match=r"must be an int, [01] or more; every\(2, 'layers"):
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
    with pytest.warns(UncountedWarning, match="in eval mode, where it is a plain module"):
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
    with pytest.warns(UncountedWarning, match="through a Block"):
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
    handle = checkpoint_modules(model, Block)

    def inside() -> None:
        with handle:
            assert is_checkpointed(model.layers[0])
            raise KeyError

    with pytest.raises(KeyError):
        inside()
    assert not handle.active
    assert not is_checkpointed(model.layers[0])


def test_the_handle_prints_well() -> None:
    model = net(6)
    handle = checkpoint_modules(model, Block)
    assert repr(handle) == (
        "<lowtide.CheckpointedModules: 6 modules checkpointed: "
        "layers.0, layers.1, layers.2, layers.3, and 2 more>"
    )
    assert handle.describe().splitlines()[5] == "layers.5"
    handle.remove()
    assert "6 modules no longer checkpointed" in repr(handle)
    assert repr(checkpoint_modules(model, "head")) == (
        "<lowtide.CheckpointedModules: 1 module checkpointed: head>"
    )


class Holding(nn.Module):
    """Checkpoints its own parts, and keeps the handle."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.handle = checkpoint_modules(self.net, Block)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_that_holds_the_handle_is_copied_and_pickled(
    copied: Callable[[Holding], Holding],
) -> None:
    """Rule 11: the copy is plain, and its handle is on nothing, as that of a budget."""
    model = Holding()
    other = copied(model)
    assert model.handle.active
    assert other.handle.names == model.handle.names
    assert other.handle.describe() == model.handle.describe()
    assert not other.handle.active
    assert not any(is_checkpointed(module) for module in other.modules())
    other.handle.remove()
    assert model.handle.active
    assert same(step(other.net), step(model.net))


def test_twice_on_one_module_is_refused() -> None:
    model = net()
    handle = checkpoint_modules(model, "layers.1")
    text = fails(Block, model)
    assert "'layers.1' (Block) is already checkpointed by lowtide" in text
    assert "call .remove() on the handle" in text
    assert "ActivationCheckpointWrapper.remove(module)" in text
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
        def forward(self, x: Tensor, policy: int = 0, debug: int = 0) -> Tensor:
            return super().forward(x).relu() * policy * debug

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

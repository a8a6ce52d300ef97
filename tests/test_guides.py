"""The code in the guides runs as printed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lowtide import _compat
from once import on_one_recorder
from pages import BLOCK, agrees, comments, run

pytestmark = on_one_recorder

GUIDES = Path(__file__).parents[1] / "docs" / "guides"


def blocks() -> Iterator[object]:
    for name in ("densenet", "unet", "levels", "transformers", "lightning", "distributed"):
        text = (GUIDES / f"{name}.md").read_text(encoding="utf-8")
        for number, code in enumerate(BLOCK.findall(text), 1):
            yield pytest.param(code, id=f"{name}-{number}")
    for name in ("planning", "compile"):  # each code block builds on the last
        text = (GUIDES / f"{name}.md").read_text(encoding="utf-8")
        yield pytest.param("\n".join(BLOCK.findall(text)), id=name)


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps one state per process, and refuses a second precision."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


# peft's, of transformers; Lightning's own
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning")
# torch's own warning, while it compiles
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("code", list(blocks()))
def test_a_code_block_runs(code: str) -> None:
    for library in ("monai", "transformers", "peft", "accelerate", "lightning.pytorch"):
        if f"from {library}" in code:
            pytest.importorskip(library)
    if "vision_architectures" in code:
        pytest.importorskip("vision_architectures")
    if "torch.compile(" in code and not _compat.torch_has((2, 13)):
        pytest.skip("CompileBudget needs torch 2.13")
    if "monai.engines" in code:
        pytest.importorskip("ignite")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run(code)
    finally:
        torch.set_num_threads(threads)


def test_each_comment_is_compared_with_its_own_print() -> None:
    with pytest.raises(AssertionError, match="line 2 printed 'False"):
        run("print(1 == 1)  # True\nprint(1 == 2)  # True\n")
    with pytest.raises(AssertionError, match="line 2 did not run"):
        run("def never():\n    print(3)  # 3\n")
    run("for n in range(2):\n    print(n < 2)  # True\nprint(\n    'é', 3\n)  # é ...\nprint(4)\n")
    assert comments("print('# 3', 3)  # 3\nprint(len('print'))\nx = 5  # five\n") == {1: "3"}
    assert agrees("<Plan: 3>\n", "<Plan...>")
    assert not agrees("<Plan: 3>\n", "<Plan")


def test_the_listing_in_the_levels_guide_is_what_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (GUIDES / "levels.md").read_text(encoding="utf-8")
    exec(compile(BLOCK.findall(text)[0], "<guide>", "exec"), {"__name__": "guide"})
    listing = re.search(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert listing is not None
    assert listing.group(1) in capsys.readouterr().out

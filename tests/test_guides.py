"""The code in the guides runs as it stands there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lowtide import _compat
from once import on_one_recorder

pytestmark = on_one_recorder

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> Iterator[object]:
    for name in ("densenet", "unet", "levels", "transformers", "lightning", "distributed"):
        text = (GUIDES / f"{name}.md").read_text(encoding="utf-8")
        for number, code in enumerate(BLOCK.findall(text), 1):
            yield pytest.param(code, id=f"{name}-{number}")
    for name in ("planning", "compile"):  # each builds on the last
        text = (GUIDES / f"{name}.md").read_text(encoding="utf-8")
        yield pytest.param("\n".join(BLOCK.findall(text)), id=name)


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps one state a process, and refuses a second precision."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


# peft's, of transformers; Lightning's own
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning")
# torch's own, while it compiles
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("code", list(blocks()))
def test_a_code_block_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
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
        exec(compile(code, "<guide>", "exec"), {"__name__": "guide"})
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    for line in re.findall(r"^\s*(?:print\(.*)?\)  # (.*)$", code, re.MULTILINE):
        assert line.split("...")[0].strip() in printed


def test_the_listing_in_the_levels_guide_is_what_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (GUIDES / "levels.md").read_text(encoding="utf-8")
    exec(compile(BLOCK.findall(text)[0], "<guide>", "exec"), {"__name__": "guide"})
    listing = re.search(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert listing is not None
    assert listing.group(1) in capsys.readouterr().out

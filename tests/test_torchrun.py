"""Under torchrun: the example, and ranks that fail.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from once import on_one_recorder

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [
    on_one_recorder,
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(),
        reason="torch was built without gloo",
    ),
]

# A DDP loop in which rank 1 has a limit that its first step cannot keep.
PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import lowtide

dist.init_process_group("gloo")
rank, group = dist.get_rank(), True if sys.argv[1] == "alike" else None
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
                        for _ in range(4)))
model = nn.parallel.DistributedDataParallel(model)
# A fraction is refused only once a step was measured, bytes in the step itself.
small = 0.05 if group else 200_000
budget = lowtide.budget(small if rank == 1 else 1.0, group=group)
for _ in range(4):
    with budget:
        loss = model(torch.randn(512, 32)).square().mean()
    loss.backward()
print("rank", rank, "came to the end")
"""


def torchrun(processes: int, *arguments: str | Path) -> tuple[int, str]:
    """The exit code and the output of a run, which has less time than a collective's half hour."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(processes), *map(str, arguments)],
        capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_the_example() -> None:
    """With FSDP2; the frameworks below train with DDP."""
    pytest.importorskip("sklearn")
    example = ROOT / "examples" / "train_distributed.py"
    code, said = torchrun(2, example, "--by", "fsdp2", "--steps", "4", "--depth", "3")
    assert code == 0, said
    for what in ("losses", "gradients and weights"):
        assert f"{what + ' identical on every rank:':50}yes" in said
    assert f"{'peaks within the limit on every rank:':50}yes" in said


@pytest.mark.parametrize(
    ("library", "name", "arguments"),
    [
        ("transformers", "train_llama.py", ("--layers", "2")),
        ("lightning", "fit_lightning.py", ("--devices", "2", "--batches", "3", "--epochs", "1")),
    ],
)
def test_frameworks_on_two_ranks(library: str, name: str, arguments: tuple[str, ...]) -> None:
    pytest.importorskip(library)
    code, said = torchrun(2, ROOT / "examples" / name, *arguments)
    assert code == 0, said
    assert said.count("losses identical:          yes") == 2
    assert said.count("all final weights identical:   yes") == 2
    assert said.count("peak within the limit:         yes") == 2


def test_a_rank_that_is_refused_ends_the_others_with_its_own_error(tmp_path: Path) -> None:
    """It is refused in the middle of a step, while the other rank waits for it in backward."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    code, said = torchrun(2, program, "apart")
    assert code != 0
    assert "came to the end" not in said
    assert said.count("lowtide.errors.BudgetError: the step does not fit in 195.3 KiB") == 1


def test_the_ranks_of_a_group_are_refused_with_one_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    code, said = torchrun(2, program, "alike")
    assert code != 0
    assert "came to the end" not in said
    error = "lowtide.errors.BudgetError: 1 of 2 ranks cannot keep their limit, so all of them stop"
    assert said.count(error) >= 1  # torchrun may end the second before it prints its own
    assert "Connection closed" not in said
    assert "Rank 1 needs most: the step does not fit in" in said

"""Under torchrun: the example, and ranks that fail.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from once import made_once, on_one_recorder

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


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def torchrun(processes: int, *arguments: str | Path) -> tuple[int, str]:
    """The exit code and the output of a run, which has less time than a collective's half hour."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(processes), *map(str, arguments)],
        capture_output=True, text=True, timeout=240,
        env=environment(),
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


# torchrun's agent, with ranks that are forked instead of started: what they all need is imported
# once.
EXAMPLES = """
import json, os, runpy, sys
from pathlib import Path

import torch._dynamo, torch.distributed.fsdp
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

examples, folder, needs, given = Path(sys.argv[1]), sys.argv[2], *map(json.loads, sys.argv[3:])
for name in needs:
    __import__(name)
sys.path.insert(0, str(examples))


def rank(name, *arguments):
    sys.argv = [name, *arguments]
    try:
        runpy.run_path(str(examples / name), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise


for name, *arguments in given:
    said = os.open(f"{folder}/{name}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, start_method="fork", monitor_interval=0.1,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
    )
    elastic_launch(config, rank)(name, *arguments)
    os.write(said, b"all ranks came to the end")
"""
# With what to import before, and their arguments. The first trains with FSDP2, the frameworks with
# DDP.
BY_LIBRARY = {
    "sklearn": (
        ["sklearn.datasets"],
        ("train_distributed.py", "--by", "fsdp2", "--steps", "4", "--depth", "3"),
    ),
    "transformers": (
        ["transformers.trainer", "transformers.models.llama.modeling_llama"],
        ("train_llama.py", "--layers", "2", "--length", "64", "--width", "32", "--steps", "4"),
    ),
    "lightning": (
        ["lightning.pytorch"],
        ("fit_lightning.py", "--devices", "2", "--batches", "3", "--epochs", "1"),
    ),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the examples said whose libraries are there."""
    folder = tmp_path_factory.mktemp("examples")

    def run() -> dict[str, str]:
        found = [name for name in BY_LIBRARY if importlib.util.find_spec(name)]
        needs = [module for name in found for module in BY_LIBRARY[name][0]]
        given = [BY_LIBRARY[name][1] for name in found]
        done = subprocess.run(
            [sys.executable, "-c", EXAMPLES, ROOT / "examples", folder,
             json.dumps(needs), json.dumps(given)],
            capture_output=True, text=True, timeout=540, env=environment(),
        )  # fmt: skip
        texts = {path.name: path.read_text() for path in folder.glob("*.txt")}
        return {name: texts.get(f"{name}.txt", done.stderr) for name, *_ in given}

    texts: dict[str, str] = made_once(tmp_path_factory, "examples", run)
    return texts


def test_the_example(said: dict[str, str]) -> None:
    """With FSDP2."""
    pytest.importorskip("sklearn")
    text = said["train_distributed.py"]
    assert "all ranks came to the end" in text, text
    for what in ("losses", "gradients and weights"):
        assert f"{what + ' identical on every rank:':50}yes" in text
    assert f"{'peaks within the limit on every rank:':50}yes" in text


@pytest.mark.parametrize(
    ("library", "name"), [("transformers", "train_llama.py"), ("lightning", "fit_lightning.py")]
)
def test_frameworks_on_two_ranks(said: dict[str, str], library: str, name: str) -> None:
    pytest.importorskip(library)
    text = said[name]
    assert "all ranks came to the end" in text, text
    assert text.count("losses identical:          yes") == 2
    assert text.count("all final weights identical:   yes") == 2
    assert text.count("peak within the limit:         yes") == 2


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

"""Processes of a gloo group that run the scenarios of a test file, one after the other.

A test file that is run as a program is one rank of such a group: it calls `run_as_rank`. Every
scenario returns something JSON can hold; one that raises returns its traceback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from once import made_once, search_less

Outcome = dict[str, Any]
Scenario = Callable[[], Outcome]
Scenarios = Iterator[tuple[str, Scenario]]


def outcomes_of(
    script: str, world: int, factory: pytest.TempPathFactory
) -> list[dict[str, Outcome]]:
    """What each rank found, by the name of the scenario. The groups of a run are started once, not
    once for each process that runs tests."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    folder = factory.mktemp("ranks")
    return made_once(
        factory, Path(script).stem, lambda: _ran(Path(script).resolve(), world, folder)
    )


def _ran(script: Path, world: int, folder: Path) -> list[dict[str, Outcome]]:
    paths = [
        str(script.parent),
        str(script.parent.parent / "src"),
        os.environ.get("PYTHONPATH", ""),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world), str(folder)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    said: list[str] = []
    try:
        for process in ranks:
            said.append(process.communicate(timeout=300)[0])
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert all(p.returncode == 0 for p in ranks), "\n".join(said)[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def run_as_rank(*groups: Callable[[], Scenarios]) -> None:
    """Run the scenarios of all these, as the arguments of this program say."""
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    search_less(pytest.MonkeyPatch())
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    outcomes: dict[str, Outcome] = {}
    for scenarios in groups:
        for name, scenario in scenarios():
            try:
                outcomes[name] = scenario()
            except Exception:
                outcomes[name] = {"error": "unexpected", "text": traceback.format_exc()}
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    sys.stdout.flush()
    os._exit(0)  # a refused step may leave a collective that nobody will answer

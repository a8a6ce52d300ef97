"""Processes of a gloo group that run the scenarios of a test file, one after the other.

A test file that is run as a program is such a group: it calls `run_ranks`, which forks once what
all ranks need has been imported. Every scenario returns something JSON can hold; one that raises
returns its traceback.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from once import made_once, search_less

Outcome = dict[str, Any]
Scenario = Callable[[], Outcome]
Scenarios = Iterator[tuple[str, Scenario]]
SHARDING = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel")


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
    group = subprocess.Popen(
        [sys.executable, str(script), str(world), str(folder)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said = group.communicate(timeout=300)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group.pid, signal.SIGKILL)  # ranks that wait for one that ended
        group.wait()
    assert group.returncode == 0, said[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def run_ranks(*groups: Callable[[], Scenarios], needs: Sequence[str] = ()) -> None:
    """Run the scenarios of all these on as many ranks as the arguments of this program say. `needs`
    are modules that they would import on the way."""
    world, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    # The first operation under a dispatch mode imports torch._dynamo.
    for name in ("torch._dynamo", *needs):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each rank's collections look through all that, and copy its pages
    ranks: list[int] = []
    for rank in range(world):
        forked = os.fork()
        if not forked:
            _run(groups, rank, world, folder)
        ranks.append(forked)
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status:  # the others would wait for it
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
            sys.exit(1)


def _run(
    groups: tuple[Callable[[], Scenarios], ...], rank: int, world: int, folder: Path
) -> NoReturn:
    code = 1
    try:
        _run_scenarios(groups, rank, world, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a refused step may leave a collective that nobody will answer


def _run_scenarios(
    groups: tuple[Callable[[], Scenarios], ...], rank: int, world: int, folder: Path
) -> None:
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

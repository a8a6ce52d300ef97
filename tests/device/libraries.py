"""How people train on a device: libraries' own loops, prefetching, kernels that are tried out.

Problem: a loop that one writes by hand shows nothing of what a Trainer, autocast's scaler and
pinned batches do around it. Invariant: each check runs the loop without and with lowtide, in the
library's own way, and compares every parameter and loss by bits; none passes if nothing was
recomputed. Imports place, nets, checks. Rejected: the suite's tests of these libraries, which ask
for the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from device.checks import Check, equal, replayed
from device.nets import clear, differing
from device.place import MIB, Place, Skipped, peak, settle
from lowtide.tape import trials

SHARE = 0.75
STEPS = 6
WIDTH = 64
Train = Callable[[bool], list[Tensor]]
"""A whole training, within a budget or not; everything that it leaves behind."""


def compared(train: Train) -> str:
    with contextlib.redirect_stdout(io.StringIO()), replayed() as operations:  # of what they log
        plain, again = train(False), train(False)
        assert not operations
        found = train(True)
    if differing(plain, again):
        raise AssertionError("the plain training is not deterministic here: nothing to compare")
    return equal(plain, found, operations)


def imported(what: str) -> Any:
    try:
        return __import__(what, fromlist=["_"])
    except ImportError as error:
        raise Skipped(f"{what} cannot be imported ({error})") from error


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.inside = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1))
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.out(self.inside(self.norm(x)))
        return out


def parts() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Part(), Part(), Part(), nn.Linear(WIDTH, 1))


def rows() -> Any:
    data: Any = torch.randn(STEPS * 512, WIDTH, generator=torch.Generator().manual_seed(3))
    return torch.utils.data.DataLoader(data, batch_size=512, pin_memory=True)


def left_of(losses: list[Tensor], net: nn.Module) -> list[Tensor]:
    return [t.detach().cpu() for t in (*losses, *net.state_dict().values())]


# ------------------------------------------------------------------------------ libraries


def transformers(place: Place, precision: str) -> str:
    place.need("cuda", "the Trainer's choice of a device")
    library = imported("transformers")
    callback = imported("lowtide.transformers").MemoryBudget

    def train(within: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = library.LlamaForCausalLM(
            library.LlamaConfig(
                vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
                num_attention_heads=4, attention_dropout=0.1,
            )
        )  # fmt: skip
        words = torch.randint(256, (48, 128), generator=torch.Generator().manual_seed(7))
        with tempfile.TemporaryDirectory() as folder:
            arguments = library.TrainingArguments(
                output_dir=folder, report_to="none", disable_tqdm=True, seed=3, logging_steps=1,
                per_device_train_batch_size=4, max_steps=4, gradient_accumulation_steps=2,
                save_strategy="no", **{precision: True},
            )  # fmt: skip
            trainer = library.Trainer(
                model=model, args=arguments, callbacks=[callback(SHARE)] if within else [],
                train_dataset=[{"input_ids": row, "labels": row} for row in words],
            )  # fmt: skip
            trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if next(model.parameters()).device.type != place.kind or len(losses) != 4:
            raise AssertionError(f"the Trainer did not train on the device: {losses}")
        return left_of([torch.tensor(losses)], model)

    return compared(train)


def lightning(place: Place, precision: str) -> str:
    place.need("cuda", "Lightning's accelerator")
    library = imported("lightning.pytorch")
    callback = imported("lowtide.lightning").MemoryBudget

    class Net(library.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts()
            self.seen: list[Tensor] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.parts(batch).square().mean()
            self.seen.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train(within: bool) -> list[Tensor]:
        net = Net()
        torch.manual_seed(1)
        with tempfile.TemporaryDirectory() as folder:
            library.Trainer(
                accelerator="gpu", devices=1, precision=precision, max_epochs=2, logger=False,
                accumulate_grad_batches=2, enable_checkpointing=False, default_root_dir=folder,
                enable_progress_bar=False, enable_model_summary=False,
                callbacks=[callback(SHARE)] if within else [],
            ).fit(net, rows())  # fmt: skip
        return left_of(net.seen, net)

    return compared(train)


def accelerate(place: Place, precision: str) -> str:
    place.need("cuda", "Accelerate's choice of a device")
    library = imported("accelerate")

    def train(within: bool) -> list[Tensor]:
        library.state.AcceleratorState._reset_state(reset_partial_state=True)
        around = library.Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
        net = parts()
        if within:
            lowtide.fit(net, SHARE)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        wrapped, optimizer, loader = around.prepare(net, optimizer, rows())
        torch.manual_seed(1)
        losses = []
        for batch in loader:
            with around.accumulate(wrapped):
                loss = wrapped(batch).square().mean()
                around.backward(loss)
                if around.sync_gradients:
                    around.clip_grad_norm_(wrapped.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss)
        return left_of(losses, around.unwrap_model(wrapped, keep_fp32_wrapper=False))

    return compared(train)


# ------------------------------------------------------------------------------ prefetching


def prefetched(place: Place) -> str:
    """Each batch is copied from pinned memory by a stream of its own while a step runs."""
    place.need("cuda", "copying from pinned memory beside a step")

    def train(within: bool) -> list[Tensor]:
        net = parts().to(place.device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        budget = lowtide.budget(SHARE) if within else contextlib.nullcontext()
        side = torch.cuda.Stream()
        torch.manual_seed(1)
        losses = []

        def ahead(batch: Tensor) -> Tensor:
            with torch.cuda.stream(side):
                return batch.to(place.device, non_blocking=True)

        batches = iter(rows())
        coming = ahead(next(batches))
        while coming is not None:
            torch.cuda.current_stream().wait_stream(side)
            x = coming
            x.record_stream(torch.cuda.current_stream())
            batch = next(batches, None)
            coming = None if batch is None else ahead(batch)
            with budget:
                loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return left_of(losses, net)

    return compared(train)


# ------------------------------------------------------------------------------ cudnn.benchmark


@contextlib.contextmanager
def tried_out() -> Iterator[None]:
    """cuDNN times its kernels at the first call of each shape, which takes their workspaces too."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark, trials.seen = True, False
    try:
        yield
    finally:  # its shapes are those of no other check, in which convolutions are to be replayed
        torch.backends.cudnn.benchmark, trials.seen = before, False


def tried_bits(place: Place, how: str) -> str:
    """Shapes that no other check uses: a kernel that a thread has chosen once stays chosen."""
    place.need("cuda", "cudnn.benchmark")

    def train(within: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = blocks().to(place.device)
        call = lowtide.checkpoint if within and how == "checkpoint" else lambda f, x: f(x)
        limit = lowtide.budget(SHARE) if within and how == "budget" else contextlib.nullcontext()
        losses = []
        for _ in range(3):
            clear(net)
            x = torch.randn(24, 3, 56, 56, device=place.device)
            with limit:
                loss = functools.reduce(lambda x, part: call(part, x), net, x).square().mean()
            loss.backward()
            losses += [loss, *(p.grad for p in net.parameters() if p.grad is not None)]
        return left_of(losses, net)

    with tried_out(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = compared(train)
    if not any(issubclass(each.category, lowtide.KeptWarning) for each in said):
        raise AssertionError("no warning says that convolutions are kept")
    return found


def blocks() -> nn.Sequential:
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(True), nn.Dropout(0.1)
            )
            for a, b in itertools.pairwise((3, 40, 40, 72, 72))
        )
    )


def tried_limit(place: Place) -> str:
    """Limits hold in the step in which kernels are tried out, and after it."""
    place.need("cuda", "cudnn.benchmark")
    net = blocks().to(place.device)
    x = torch.randn(24, 3, 72, 72, device=place.device)

    def run(limit: Any) -> None:
        with limit or contextlib.nullcontext():
            loss = net(x).square().mean()
        loss.backward()

    def took(limit: Any = None) -> int:
        clear(net)
        found = peak(place, lambda: run(limit))
        settle()
        return found

    found: list[int] = []
    # On another thread, so that this one has chosen no kernel for these shapes before the limit.
    other = threading.Thread(target=lambda: found.extend(took() for _ in range(3)))
    other.start()
    other.join()
    plain = max(found)
    allowed = int(SHARE * plain)
    limit = lowtide.budget(allowed)
    with tried_out():
        peaks = [took(limit) for _ in range(STEPS)]
        tried = took()
    said = f"limit {allowed / MIB:.2f}, measured {', '.join(f'{p / MIB:.2f}' for p in peaks)} MiB"
    said += f"; plain {plain / MIB:.2f}, with the kernels that were chosen {tried / MIB:.2f}"
    if max(peaks) > allowed:
        raise AssertionError(said)
    return said


def all_checks() -> dict[str, Check]:
    """Checks by name, in the order in which they run."""
    found: dict[str, Check] = {}
    for how in ("checkpoint", "budget"):
        found[f"bits: conv net, {how}, cudnn.benchmark"] = functools.partial(tried_bits, how=how)
    found["limit: conv net, cudnn.benchmark"] = tried_limit
    found["bits: batches copied ahead"] = prefetched
    for precision in ("bf16", "fp16"):
        run = functools.partial(transformers, precision=precision)
        found[f"bits: transformers Trainer, {precision}"] = run
        run = functools.partial(lightning, precision=f"{precision.removeprefix('fp')}-mixed")
        found[f"bits: Lightning, {precision}"] = run
        run = functools.partial(accelerate, precision=precision)
        found[f"bits: Accelerate, {precision}"] = run
    return found

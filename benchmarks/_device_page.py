"""What `accelerator.py --check` finds out besides its figures, and the page that it writes."""

from __future__ import annotations

import gc
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import _trained
import torch
from torch import Tensor, nn

from chainring import __version__
from chainring.datasets import TupleDataset
from chainring.iterators import SerialIterator
from chainring.nn import Classifier
from chainring.training import StandardUpdater, Trainer
from chainring.training.extensions import LogReport, ProgressBar

ROOT = Path(__file__).parents[1]
KILLED_AT = 8
VIRTUAL_RANKS = 4


@dataclass
class Check:
    """A question, and its answer.

    Attributes:
        name: what should hold.
        holds: ``None`` where it could not be found out.
        text: what was seen.
    """

    name: str
    holds: bool | None
    text: str


def checks_of(device: str, out: Path) -> list[Check]:
    """All of them, in minutes."""
    return [
        tests(device),
        killed_and_resumed(device, out),
        same_bits(device, out),
        waits(device, out),
        peak_memory(device, out),
    ]


def tests(device: str) -> Check:
    """Run tests/gpu, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "--device", device, str(ROOT / "tests" / "gpu")]
    if torch.device(device).type != "cuda":
        return Check("the tests of tests/gpu pass", None, "they are for CUDA")
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if re.match(r"FAILED|ERROR|SKIPPED|=* ?\d+ (passed|failed)", line)]
    return Check(
        "the tests of tests/gpu pass", done.returncode == 0, "\n".join(lines) or done.stdout[-2000:] + done.stderr[-2000:]
    )


def train(out: Path, device: str, virtual_ranks: int = 0, kill: int = 0, ranks: int = 1) -> str:
    """Run `_trained` to its end, or until it is killed; returns the digest of its parameters, or what went wrong."""
    program = [str(Path(_trained.__file__)), str(out), device, str(virtual_ranks), str(kill)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run([sys.executable, *launcher, *program], capture_output=True, text=True, check=False)
    if kill:
        return "killed" if done.returncode == -signal.SIGKILL else ended(done)
    digests = [line for line in done.stdout.splitlines() if line.startswith("parameters:")]
    return digests[0] if done.returncode == 0 and digests else ended(done)


def ended(done: subprocess.CompletedProcess[str]) -> str:
    errors = re.findall(r"^.*Error: .*$", done.stderr, re.MULTILINE)  # not those of the launcher, which come last
    return f"exit status {done.returncode}: {errors[0] if errors else done.stderr[-2000:]}"


def killed_and_resumed(device: str, out: Path) -> Check:
    """By SIGKILL, two iterations after a snapshot; with dropout, whose numbers the device draws."""
    whole = train(out / "whole", device)
    end = train(out / "killed", device, kill=KILLED_AT)
    again = train(out / "killed", device)
    holds = whole.startswith("parameters:") and end == "killed" and again == whole
    text = f"uninterrupted {whole}\nthe first part {end}\nresumed {again}"
    return Check(f"a run that is killed after iteration {KILLED_AT} and started again ends with the same bits", holds, text)


def same_bits(device: str, out: Path) -> Check:
    """Of virtual ranks on one device and on two."""
    name = f"{VIRTUAL_RANKS} virtual ranks compute the same bits on one device and on two"
    alone = train(out / "alone", device, virtual_ranks=VIRTUAL_RANKS)
    if torch.accelerator.device_count() < 2:
        again = train(out / "again", device, virtual_ranks=VIRTUAL_RANKS)
        return Check(
            name, None if again == alone else False, f"one device {alone}\nonce more {again}\nthere is no second one"
        )
    both = train(out / "both", "auto", virtual_ranks=VIRTUAL_RANKS, ranks=2)
    return Check(name, alone.startswith("parameters:") and alone == both, f"one device {alone}\ntwo devices {both}")


def small_trainer(out: Path, device: str, iterations: int) -> Trainer:
    data = TupleDataset(torch.zeros(800, 8).numpy(), torch.zeros(800, dtype=torch.int64).numpy())
    model = Classifier(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))
    updater = StandardUpdater(SerialIterator(data, 8), torch.optim.Adam(model.parameters()), model, device=device)
    return Trainer(updater, (iterations, "iteration"), str(out))


def waits(device: str, out: Path) -> Check:
    """Operations that wait for the device, as PyTorch warns of them, in iterations in which no row is written."""
    name = "an iteration waits for nothing"
    if torch.device(device).type != "cuda":
        return Check(name, None, "PyTorch tells it of CUDA")
    trainer, count = small_trainer(out / "waits", device, 190), 0
    trainer.extend(LogReport())
    with (out / "bar").open("w") as bar, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.extend(ProgressBar(out=bar))

        def watch(trainer: Trainer) -> None:
            within = 10 <= trainer.updater.iteration % 100 < 60
            torch.cuda.set_sync_debug_mode("warn" if within else "default")

        trainer.extend(watch, trigger=(1, "iteration"), priority=-1000)
        try:
            trainer.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    count = sum("called a synchronizing" in str(warning.message) for warning in caught)
    return Check(name, count == 0, f"{count} waits in 100 iterations")


def peak_memory(device: str, out: Path) -> Check:
    """Of the parameters and of the batches: beside that of a loop by hand."""
    memory, trained = torch.get_device_module(device), list[float]()
    for run in (by_hand, by_trainer):
        gc.collect()
        before = memory.memory_allocated()
        memory.reset_peak_memory_stats()
        run(device, out)
        trained.append((memory.max_memory_allocated() - before) / 2**20)
    hand, ours = trained
    text = f"{hand:.2f} MiB by hand, {ours:.2f} MiB through Chainring"
    return Check("the peak of memory is that of a loop by hand, within 1 percent", ours <= 1.01 * hand, text)


class Wide(nn.Module):
    """Large enough for its memory to be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


def by_hand(device: str, out: Path) -> None:
    model, rows = Wide().to(device), torch.ones(64 * 6, 512)
    optimizer = torch.optim.Adam(model.parameters())
    for batch in rows.split(64):
        loss = model(batch.to(device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def by_trainer(device: str, out: Path) -> None:
    model = Wide()
    data = SerialIterator(torch.ones(64 * 6, 512), 64)
    updater = StandardUpdater(data, torch.optim.Adam(model.parameters()), model, device=device)
    Trainer(updater, (6, "iteration"), str(out / "peak")).run()


def facts_of(device: str) -> dict[str, object]:
    """Describe the device, and what computes on it."""
    facts: dict[str, object] = {"device": device, "devices": torch.accelerator.device_count()}
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(torch.device(device))
        facts |= {"name": properties.name, "capability": f"{properties.major}.{properties.minor}"}
        facts |= {"memory": f"{properties.total_memory / 2**30:.0f} GiB", "CUDA": torch.version.cuda or torch.version.hip}
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
    return facts | {"Chainring": f"{__version__} {commit}"}


def page_of(facts: Mapping[str, object], checks: Sequence[Check], tables: Mapping[str, str], over: Sequence[str]) -> str:
    """Return the page, in Markdown."""
    words = {True: "yes", False: "**no**", None: "not found out"}
    answers = {check.name: words[check.holds] for check in checks}
    lines = ["# Chainring on an accelerator", "", "Written by `python benchmarks/accelerator.py --check`.", ""]
    lines += rows_of(facts)
    lines += ["## What holds", "", *rows_of(answers)]
    for name, text in {**{check.name: check.text for check in checks}, **tables}.items():
        lines += [f"### {name[0].upper()}{name[1:]}", "", "```", text, "```", ""]
    lines += ["## Over their limits", "", *(f"- {line}" for line in over or ["nothing"])]
    return "\n".join(lines) + "\n"


def rows_of(values: Mapping[str, object]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items()), ""]

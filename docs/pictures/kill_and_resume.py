"""Draw `kill-and-resume.svg`: the losses of a run that is killed and continues, over those of a run that is not.

    python docs/pictures/kill_and_resume.py

Both are real: the second process ends itself by SIGKILL, and a third one continues from its last snapshot.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
import torch
from torch import nn

import chainring
from chainring import datasets, iterators, training
from chainring.nn import Classifier
from chainring.training import extensions

HERE = Path(__file__).parent
SCHEMES = {"light": "--paper:#ffffff;--ink:#333333", "dark": "--paper:#131416;--ink:#cfd0d0"}
LENGTH, INTERVAL, KILLED = 120, 20, 73  # iterations


def train(out: str, kill: bool) -> None:
    """Train, or continue, and let the process die after iteration `KILLED` if asked to."""
    chainring.deterministic(0)
    layers = [nn.Linear(64, 100), nn.ReLU(), nn.Dropout(0.5), nn.Linear(100, 10)]
    model = Classifier(nn.Sequential(*layers))
    digits, _ = datasets.get_digits()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    updater = training.StandardUpdater(iterators.SerialIterator(digits, 50), optimizer, model)
    trainer = training.Trainer(updater, (LENGTH, "iteration"), out=out)
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(extensions.snapshot(autoload=True), trigger=(INTERVAL, "iteration"))
    trainer.extend(
        lambda _: os.kill(os.getpid(), signal.SIGKILL), "kill", trigger=lambda t: kill and t.updater.iteration == KILLED
    )
    trainer.run()


def losses(out: str) -> list[float]:
    """Return the losses that a log has."""
    return [row["main/loss"] for row in json.loads(Path(out, "log").read_text())]


def run() -> tuple[list[float], list[float], list[float]]:
    """Return the losses of the uninterrupted run, of the killed one until then, and of that at its end."""
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = f"{folder}/whole", f"{folder}/killed"
        start = [sys.executable, __file__]
        subprocess.run([*start, whole], check=True)
        subprocess.run([*start, killed, "kill"], check=False)
        before = losses(killed)
        subprocess.run([*start, killed], check=True)
        return losses(whole), before, losses(killed)


def draw(whole: list[float], before: list[float], after: list[float]) -> None:
    """Write the picture; its colours follow the reader's scheme."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "chainring", "font.family": "sans-serif", "font.size": 11})
    figure, axes = plt.subplots(figsize=(5.8, 3.8), facecolor="#fffffe")
    axes.set_facecolor("#fffffe")
    axes.plot(range(1, LENGTH + 1), whole, color="#f2a65a", linewidth=6, solid_capstyle="round", label="never stopped")
    first = KILLED // INTERVAL * INTERVAL
    axes.plot(range(1, KILLED + 1), before, color="#2a6fbb", linewidth=1.6, label=f"killed after iteration {KILLED}")
    axes.plot(range(first + 1, LENGTH + 1), after[first:], color="#2a6fbb", linewidth=1.6, linestyle=(0, (2, 1.4)),
              label=f"started again: from iteration {first}")  # fmt: skip
    axes.plot(KILLED, before[-1], "X", color="#d1495b", markersize=10, markeredgecolor="#fffffe")
    axes.annotate("SIGKILL", (KILLED, before[-1]), (KILLED + 4, before[-1] + 0.5), color="#d1495b", weight="bold",
                  arrowprops={"arrowstyle": "-", "color": "#d1495b"})  # fmt: skip
    axes.axvline(first, color="#8a8f98", linewidth=0.8, linestyle=":")
    axes.text(first - 1, 0.02, "snapshot", transform=axes.get_xaxis_transform(), color="#333332", ha="right")
    axes.set_xlabel("iteration", color="#333332")
    axes.set_ylabel("training loss", color="#333332")
    difference = max(abs(a - b) for a, b in zip(whole, after, strict=True))
    axes.set_title(f"Largest difference of the {LENGTH} losses: {difference:g}", color="#333332", fontsize=12)
    axes.tick_params(colors="#333332")
    for side, spine in axes.spines.items():
        spine.set_color("#8a8f98")
        spine.set_visible(side in ("left", "bottom"))
    axes.legend(labelcolor="#333332", frameon=False, fontsize=10)
    axes.set_ylim(bottom=0)
    figure.tight_layout()
    place = HERE / "kill-and-resume.svg"
    figure.savefig(place, metadata={"Date": None, "Creator": None})
    place.write_text(follow_scheme(place.read_text()))
    for scheme, colours in SCHEMES.items():  # for pages that choose by a scheme of their own
        (HERE / f"kill-and-resume-{scheme}.svg").write_text(keep_to(place.read_text(), colours))


def follow_scheme(svg: str) -> str:
    """Make paper and ink variables, which the reader's preference sets, and give the picture a title."""
    style = (
        f"<style>svg{{{SCHEMES['light']}}}@media(prefers-color-scheme:dark){{svg{{{SCHEMES['dark']}}}}}</style>"
        '<title id="title">The losses of two runs. One was never stopped. The other was killed and continued from its last '
        "snapshot; its curve lies exactly on the first.</title>"
    )
    svg = svg.replace("#fffffe", "var(--paper)").replace("#333332", "var(--ink)")
    at = svg.index(">", svg.index("<svg")) + 1
    return svg[: at - 1] + ' role="img" aria-labelledby="title"' + svg[at - 1 : at] + style + svg[at:]


def keep_to(svg: str, colours: str) -> str:
    """Return the picture in the colours of one scheme, whatever the reader prefers."""
    return re.sub("<style>svg.*?</style>", f"<style>svg{{{colours}}}</style>", svg, count=1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], kill="kill" in sys.argv[2:])
    else:
        draw(*run())

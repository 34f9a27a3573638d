"""Take the pictures of the report: train some runs on handwritten digits and open their pages in Chromium.

    python docs/pictures/report.py          # writes docs/_static/report-*.png; needs playwright, Pillow and chromium

The runs have seeds, so that the curves are the same each time; times and the use of the machine are those of the day.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

import torch
from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from torch import nn

import chainring
from chainring import datasets, iterators, report_histogram, report_image, training
from chainring.cli import main
from chainring.nn import Classifier
from chainring.training import extensions

OUT = Path(__file__).parent.parent / "_static"
SIZE = {"width": 1280, "height": 820}
COLOURS = 128  # of a picture; enough for lines on a plain ground


def train(out: Path, lr: float, dropout: float = 0.0, lower_at: int | None = None) -> None:
    """Train a perceptron, with a learning rate that may be lowered at an iteration."""
    chainring.deterministic(0)
    train, test = datasets.get_digits()
    layers = [nn.Linear(64, 50), nn.ReLU(), nn.Dropout(dropout), nn.Linear(50, 10)]
    model = Classifier(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    updater = training.StandardUpdater(iterators.SerialIterator(train, 32, seed=0), optimizer, model)
    config = {"lr": lr, "dropout": dropout, "units": 50}
    trainer = training.Trainer(updater, (20, "epoch"), out=str(out), config=config)
    trainer.extend(extensions.Evaluator(iterators.SerialIterator(test, 200, repeat=False, shuffle=False), model))
    trainer.extend(extensions.SystemMetrics(trigger=(10, "iteration")))
    trainer.extend(extensions.Recorder())
    trainer.extend(extensions.snapshot(), trigger=(5, "epoch"))
    trainer.extend(extensions.Profiler())
    trainer.extend(show_weights, trigger=(1, "epoch"))
    if lower_at is not None:
        trainer.extend(extensions.StepShift("lr", 0.1, lower_at))
    trainer.extend(extensions.observe_lr(), trigger=(10, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(10, "iteration")))
    trainer.run()


def show_weights(trainer: training.Trainer) -> None:
    """Report the weights of the first layer as an image and as a histogram."""
    weight = trainer.updater.get_model("main").predictor[0].weight.detach()
    tiles = weight[:10].reshape(2, 5, 8, 8).permute(0, 2, 1, 3).reshape(16, 40)
    report_image("first layer", (2 * tiles).sigmoid())
    report_histogram("weights", weight)


def take(browser: Browser, file: Path, name: str) -> None:
    """Take a picture of a page, light and dark."""
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport=SIZE, color_scheme=scheme)
        page = context.new_page()
        page.goto(file.as_uri())
        page.locator("canvas").first.wait_for()
        page.get_by_role("slider", name="Smoothing").fill("0.6")
        page.wait_for_timeout(300)
        box = page.locator(".u-over").first.bounding_box()
        if box is not None:
            page.mouse.move(box["x"] + 0.47 * box["width"], box["y"] + 0.55 * box["height"])
        page.wait_for_timeout(300)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(COLOURS)
        picture.save(OUT / f"{name}-{scheme}.png", optimize=True)
        context.close()


def make() -> None:
    """Train the runs and take all pictures."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        place = Path(folder)
        for lr in (0.003, 0.01, 0.03, 0.1):
            train(place / f"lr-{lr}", lr)
        train(place / "lr-0.1-dropout", 0.1, dropout=0.3)
        runs = sorted(map(str, place.iterdir()))
        train(place / "lr-0.03-lowered", 0.03, lower_at=400)
        main(["report", str(place / "lr-0.03"), "--out", str(place / "one.html")])
        main(["report", str(place / "lr-0.03"), str(place / "lr-0.03-lowered"), "--out", str(place / "two.html")])
        main(["report", *runs, "--out", str(place / "several.html")])
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        take(browser, place / "one.html", "report-one")
        take(browser, place / "two.html", "report-two")
        take(browser, place / "several.html", "report-several")
        browser.close()


if __name__ == "__main__":
    make()

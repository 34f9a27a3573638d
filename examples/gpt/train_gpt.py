"""Trains a small GPT on Python's own documentation, as nanoGPT trains one on Shakespeare.

    python train_gpt.py --out result

Warm-up and cosine schedule, gradient accumulation, bfloat16 where the accelerator has it, the loss of both splits from
before the first update on, and the best model in ``result/best``. The same command again continues a run that was stopped.
"""

import argparse
import math
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import chainring
from chainring import iterators, report, serializers, training
from chainring.training import UpdateCallbacks, clip_grad_norm, extensions, triggers


class GPT(nn.Module):
    """Predicts each character from the ``block`` before it."""

    def __init__(self, characters: int, block: int, layers: int, heads: int, units: int, dropout: float) -> None:
        super().__init__()
        self.block = block
        self.characters, self.positions = nn.Embedding(characters, units), nn.Embedding(block, units)
        layer = nn.TransformerEncoderLayer(units, heads, 4 * units, dropout, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(units), enable_nested_tensor=False)
        self.scores = nn.Linear(units, characters, bias=False)
        self.scores.weight = self.characters.weight  # tied, and saved once
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def read(self, text: Tensor) -> Tensor:
        """Return scores (batch, length, characters) of the character after each of (batch, length)."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        hidden = self.characters(text) + self.positions.weight[:length]
        return self.scores(self.layers(hidden, mask, is_causal=True))

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss in nats a character over (batch, length + 1), which is reported."""
        loss = cross_entropy(self.read(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        report({"loss": loss}, self)
        return loss

    @torch.no_grad()
    def write(self, text: Tensor, count: int) -> Tensor:
        """Return a text (length,) and as many characters after it, drawn one by one."""
        self.eval()
        for _ in range(count):
            scores = self.read(text[None, -self.block :])[0, -1]
            text = torch.cat([text, torch.multinomial(scores.softmax(-1), 1)])
        return text


def schedule(warmup: int, last: int, least: float):
    """Make a function from the iteration to the part of the learning rate: up in a line, then down in half a cosine."""

    def part(iteration: int) -> float:
        if iteration < warmup:
            return (iteration + 1) / (warmup + 1)
        progress = min((iteration - warmup) / (last - warmup), 1)
        return least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2

    return part


def windows(text: Tensor, block: int, count: int) -> Tensor:
    """Return rows of block + 1 characters at equal distances, at most ``count``."""
    return text.unfold(0, block + 1, max(block, (len(text) - block) // count))[:count]


def has_bf16() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches in an update (default: %(default)s)")
    parser.add_argument("--batchsize", "-b", type=int, default=12, help="rows in a micro-batch (default: %(default)s)")
    parser.add_argument("--block", type=int, default=64, help="characters that it looks back (default: %(default)s)")
    parser.add_argument("--characters", type=int, help="of the text to be used; by default all")
    parser.add_argument("--device", "-g", type=int, default=-1, help="number of the accelerator; negative is the host")
    parser.add_argument("--dropout", type=float, default=0.1, help="(default: %(default)s)")
    parser.add_argument("--evaluate", type=int, default=250, help="iterations between evaluations (default: %(default)s)")
    parser.add_argument("--iteration", "-i", type=int, default=2000, help="updates to make (default: %(default)s)")
    parser.add_argument("--layer", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--out", "-o", default="result", help="directory of the results (default: %(default)s)")
    parser.add_argument("--precision", default="bf16" if has_bf16() else "fp32", help="(here: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and dropout (default: %(default)s)")
    parser.add_argument("--unit", "-u", type=int, default=128, help="units of a layer (default: %(default)s)")
    args = parser.parse_args()

    chainring.deterministic(args.seed)
    text = "\n\n".join(dict.fromkeys("\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")))[: args.characters]
    alphabet = sorted(set(text))
    numbers = torch.from_numpy(np.searchsorted(alphabet, list(text)))
    splits = dict(zip(("train", "val"), numbers.split([len(text) * 9 // 10, len(text) - len(text) * 9 // 10]), strict=True))

    def draw(index: int) -> Tensor:
        starts = torch.randint(len(splits["train"]) - args.block, (args.batchsize, 1))
        return splits["train"][starts + torch.arange(args.block + 1)]

    model = GPT(len(alphabet), args.block, args.layer, 4, args.unit, args.dropout)
    decayed = {True: [], False: []}
    for parameter in model.parameters():
        decayed[parameter.ndim > 1].append(parameter)
    groups = [{"params": decayed[True], "weight_decay": 0.1}, {"params": decayed[False], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 2e-3, betas=(0.9, 0.99))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(args.iteration // 20, args.iteration, 0.1))
    updater = training.StandardUpdater(
        iterators.FunctionIterator(draw, seed=args.seed), optimizer, model, device=args.device, precision=args.precision,
        accumulate=args.accumulate, callbacks=UpdateCallbacks(update_on_start=clip_grad_norm(1.0)),
    )  # fmt: skip

    trainer = training.Trainer(updater, (args.iteration, "iteration"), out=args.out, config=vars(args))
    every = (args.evaluate, "iteration")
    for name, split in splits.items():
        rows = iterators.SerialIterator(windows(split, args.block, 200), 50, repeat=False, shuffle=False)
        evaluator = extensions.Evaluator(rows, model, device=args.device)
        trainer.extend(evaluator, name=name, trigger=every, invoke_before_training=True)
    trainer.extend(extensions.LRScheduler(scheduler), trigger=(1, "iteration"))
    trainer.extend(extensions.observe_lr(), trigger=every)
    trainer.extend(extensions.snapshot_object(model, "best"), trigger=triggers.MinValueTrigger("val/main/loss", every))
    trainer.extend(extensions.LogReport(trigger=every))
    entries = ["iteration", "main/loss", "train/main/loss", "val/main/loss", "lr", "elapsed_time"]
    trainer.extend(extensions.PrintReport(entries))
    trainer.extend(extensions.ProgressBar(update_interval=10))
    trainer.extend(extensions.snapshot(autoload=True, n_retains=2), trigger=every)
    trainer.run()

    serializers.load(f"{args.out}/best", model)
    written = model.write(torch.tensor([alphabet.index("\n")], device=updater.device), 500)
    print("".join(alphabet[number] for number in written))


if __name__ == "__main__":
    main()

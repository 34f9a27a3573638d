"""Trains a small language model on sentences of a grammar, on any number of processes.

    python train_language_model.py
    torchrun --nproc-per-node 2 train_language_model.py
    torchrun --nproc-per-node 2 train_language_model.py --parallel ddp
    torchrun --nproc-per-node 2 train_language_model.py --parallel fsdp
    torchrun --nproc-per-node 4 train_language_model.py --parallel fsdp --tensor 2

The perplexity of the text that is not trained on comes close to ``lowest``, that of the grammar which has made the text.
The same command again continues a run that was stopped, also with another number of processes or another ``--parallel``.
"""

import argparse
import functools
import math

import torch
from distribute import distribute
from grammar import PADDING, VOCABULARY, make_sentences
from language_model import SIZES, LanguageModel
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import chainring
from chainring import iterators, training
from chainring.converters import concat_examples
from chainring.training import UpdateCallbacks, clip_grad_norm, extensions


def add_perplexity(row: dict[str, float], lowest: float) -> None:
    row["perplexity"] = math.exp(row["validation/main/loss"])
    row["lowest"] = lowest


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", choices=["none", "ddp", "fsdp"], default="none", help="who exchanges gradients")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that compute the model together, on the same rows")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the model (default: %(default)s)")
    parser.add_argument("--checkpoint", action="store_true", help="compute blocks again in the backward, for less memory")
    parser.add_argument("--batchsize", "-b", type=int, default=100, help="sentences in a part of an update, over all ranks")
    parser.add_argument("--accumulate", "-a", type=int, default=1, help="parts of an update (default: %(default)s)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of the forward")
    parser.add_argument("--epoch", "-e", type=int, default=5, help="epochs to train (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="after the warm-up (default: %(default)s)")
    parser.add_argument("--sentences", type=int, default=20_000, help="to train on (default: %(default)s)")
    parser.add_argument("--out", "-o", default="result", help="directory of the results (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    args = parse()
    chainring.deterministic(args.seed)
    train, _ = make_sentences(args.sentences, seed=1)
    test, lowest = make_sentences(max(args.sentences // 10, 1), seed=2)
    model = LanguageModel(len(VOCABULARY), args.size, PADDING, args.checkpoint)
    model, comm = distribute(model, args.parallel, model.blocks, args.tensor)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.01)
    updates = math.ceil(args.epoch * len(train) / (args.batchsize * args.accumulate))
    warm_up = max(updates // 10, 1)
    schedules = [LinearLR(optimizer, 0.1, total_iters=warm_up), CosineAnnealingLR(optimizer, max(updates - warm_up, 1))]
    schedule = SequentialLR(optimizer, schedules, milestones=[warm_up])

    padded = functools.partial(concat_examples, padding=PADDING)
    train_iter = iterators.SerialIterator(train, args.batchsize, seed=args.seed)
    test_iter = iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)
    updater = training.StandardUpdater(
        train_iter, optimizer, model, converter=padded, precision=args.precision, accumulate=args.accumulate,
        callbacks=UpdateCallbacks(update_on_start=clip_grad_norm(1.0)), device=comm.device, comm=comm,
    )  # fmt: skip
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out, config=vars(args))
    trainer.extend(extensions.LRScheduler(schedule), trigger=(1, "iteration"))
    trainer.extend(extensions.Evaluator(test_iter, model, padded, device=comm.device))
    trainer.extend(extensions.Throughput())
    trainer.extend(extensions.LogReport(postprocess=functools.partial(add_perplexity, lowest=lowest)))
    columns = ["epoch", "main/loss", "validation/main/loss", "perplexity", "lowest", "grad_norm"]
    trainer.extend(extensions.PrintReport([*columns, "throughput/tokens_per_second", "elapsed_time"]))
    trainer.extend(extensions.snapshot(autoload=True, n_retains=2))
    with loss_parallel():  # of scores that are divided among ranks; no others change
        trainer.run()


if __name__ == "__main__":
    main()

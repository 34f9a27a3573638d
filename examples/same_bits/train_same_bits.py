"""Trains on the digits, with dropout, BatchNorm and augmentation, to the same bits on any number of processes.

    python train_same_bits.py -o one
    torchrun --nproc-per-node 2 train_same_bits.py -o two
    torchrun --nproc-per-node 3 train_same_bits.py -o three --parallel ddp
    torchrun --nproc-per-node 4 train_same_bits.py -o four --parallel fsdp

Each prints the same table and the same SHA-256 of the parameters and running statistics that it has learned. The same
command continues from the last snapshot, also with another number of processes and another ``--parallel``.
"""

import argparse
import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import chainring
from chainring import datasets, iterators, serializers, training
from chainring.nn import Classifier
from chainring.parallel import create_communicator
from chainring.training import UpdateCallbacks, clip_grad_norm, extensions


def moved(example: tuple[np.ndarray, int]) -> tuple[np.ndarray, int]:
    """Return the image moved by a pixel or not, to any side."""
    image, label = example
    return np.roll(image, np.random.randint(-1, 2, size=2), (1, 2)), label


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--virtual-ranks", "-v", type=int, default=8, help="parts of an update (default: %(default)s)")
    parser.add_argument("--parallel", choices=["none", "ddp", "fsdp"], default="none", help="who exchanges gradients")
    parser.add_argument("--batchsize", "-b", type=int, default=200, help="examples in a batch (default: %(default)s)")
    parser.add_argument("--epoch", "-e", type=int, default=20, help="epochs to train (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of a process, on which bits depend (default: %(default)s)")
    parser.add_argument("--out", "-o", default="result", help="directory of the results (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and noise (default: %(default)s)")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    chainring.deterministic(args.seed)
    comm = create_communicator()
    train, test = datasets.get_digits(ndim=3)
    layers = [nn.Flatten(), nn.Linear(64, 100), nn.BatchNorm1d(100), nn.ReLU(), nn.Dropout(0.3), nn.Linear(100, 10)]
    model = Classifier(nn.Sequential(*layers)).to(comm.device)
    if args.parallel == "ddp" and comm.size > 1:
        model = DistributedDataParallel(model)
    if args.parallel == "fsdp" and comm.size > 1:
        fully_shard(model, mesh=init_device_mesh(comm.device.type, (comm.size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_iter = iterators.SerialIterator(datasets.TransformDataset(train, moved), args.batchsize, seed=args.seed)
    test_iter = iterators.SerialIterator(test, 100, repeat=False, shuffle=False)

    updater = training.StandardUpdater(
        train_iter,
        optimizer,
        model,
        device=comm.device,
        comm=comm,
        callbacks=UpdateCallbacks(update_on_start=clip_grad_norm(1.0)),
        virtual_ranks=args.virtual_ranks,
    )
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out, config=vars(args))
    trainer.extend(extensions.Evaluator(test_iter, model, device=comm.device))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/loss", "validation/main/accuracy"]))
    trainer.extend(extensions.snapshot(autoload=True, n_retains=2), trigger=(10, "iteration"))
    trainer.run()

    learned = Path(args.out, "digits.model")
    serializers.save(learned, model)
    if comm.rank == 0:
        print(hashlib.sha256(learned.read_bytes()).hexdigest())


if __name__ == "__main__":
    main()

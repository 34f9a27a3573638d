"""Trains a small GPT on two texts, mixed by weights that change and packed into rows, to the same bits on any ranks.

    torchrun --nproc-per-node 3 train_packed.py --out packed

The texts are the topics of Python's documentation, and the docstrings of its library, of which there are more from batch to
batch. No token of one document sees one of another. Killed, the same command goes on, also on another number of processes;
the last line is a SHA-256 of what was learned.
"""

import argparse
import hashlib
import importlib
import inspect
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import chainring
from chainring import iterators, report, serializers, training
from chainring.parallel import create_communicator
from chainring.training import UpdateCallbacks, clip_grad_norm, extensions

MODULES = (
    "builtins",
    "argparse",
    "collections",
    "datetime",
    "itertools",
    "math",
    "os",
    "random",
    "re",
    "statistics",
    "string",
)


class PackedGPT(nn.Module):
    """Predicts each character of a document from those before it in the same document."""

    def __init__(self, characters: int, longest: int, layers: int, heads: int, units: int) -> None:
        super().__init__()
        self.heads = heads
        self.characters, self.positions = nn.Embedding(characters, units), nn.Embedding(longest, units)
        layer = nn.TransformerEncoderLayer(units, heads, 4 * units, 0.1, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(units), enable_nested_tensor=False)
        self.scores = nn.Linear(units, characters, bias=False)

    def forward(self, input_ids: Tensor, document_ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """Return the mean loss of (batch, length) tokens, and how many were predicted, by which means are weighted."""
        is_seen = (document_ids[:, :, None] == document_ids[:, None]).tril()
        hidden = self.characters(input_ids) + self.positions(positions)
        scores = self.scores(self.layers(hidden, ~is_seen.repeat_interleave(self.heads, 0)))[:, :-1]
        is_target = (document_ids[:, 1:] == document_ids[:, :-1]) & (document_ids[:, 1:] >= 0)
        loss = cross_entropy(scores[is_target], input_ids[:, 1:][is_target])
        report({"loss": loss}, self)
        return {"loss": loss, "weight": is_target.sum()}


def read_texts() -> dict[str, list[str]]:
    """Return the paragraphs of the topics, and the docstrings of some modules, each once."""
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    objects = [item for name in MODULES for _, item in sorted(vars(importlib.import_module(name)).items()) if callable(item)]
    texts = {"topics": paragraphs, "docstrings": [inspect.getdoc(item) or "" for item in objects]}
    return {name: [text for text in dict.fromkeys(documents) if len(text) > 1] for name, documents in texts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batchsize", "-b", type=int, default=16, help="rows in a batch (default: %(default)s)")
    parser.add_argument("--iteration", "-i", type=int, default=500, help="updates to make (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="characters in a row (default: %(default)s)")
    parser.add_argument("--out", "-o", default="packed", help="directory of the results (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and dropout (default: %(default)s)")
    parser.add_argument("--snapshot", type=int, default=50, help="iterations between snapshots (default: %(default)s)")
    parser.add_argument("--unit", "-u", type=int, default=64, help="units of a layer (default: %(default)s)")
    args = parser.parse_args()

    torch.set_num_threads(1)
    chainring.deterministic(args.seed)
    comm = create_communicator()
    texts = read_texts()
    alphabet = ["", *sorted({character for documents in texts.values() for text in documents for character in text})]
    documents = {name: [np.searchsorted(alphabet, list(text)) for text in documents] for name, documents in texts.items()}

    def weights(count: int) -> dict[str, float]:
        """Of ten documents one is a docstring at first, and half of them from the 4,000th on."""
        return {"topics": 0.9 - 0.4 * min(count / 4000, 1), "docstrings": 0.1 + 0.4 * min(count / 4000, 1)}

    mixture = iterators.MixtureIterator(documents, 32, weights=weights, seed=args.seed)
    rows = iterators.PackingIterator(mixture, args.length, args.batchsize, separator=0)
    longest = max(len(document) for of_text in documents.values() for document in of_text) + 1
    model = PackedGPT(len(alphabet), longest, 2, 4, args.unit).to(comm.device)
    updater = training.StandardUpdater(
        rows, torch.optim.AdamW(model.parameters(), 2e-3), model, device=comm.device, comm=comm, virtual_ranks=4,
        callbacks=UpdateCallbacks(update_on_start=clip_grad_norm(1.0)),
    )  # fmt: skip
    trainer = training.Trainer(updater, (args.iteration, "iteration"), out=args.out, config=vars(args))
    every = (args.snapshot, "iteration")
    trainer.extend(extensions.LogReport(trigger=every))
    trainer.extend(extensions.PrintReport(["iteration", "epoch", "main/loss", "elapsed_time"]))
    trainer.extend(extensions.snapshot(autoload=True, n_retains=2), trigger=every)
    trainer.run()

    learned = Path(args.out, "packed.model")
    serializers.save(learned, model)
    if comm.rank == 0:
        print("passes:", mixture.passes)
        print(hashlib.sha256(learned.read_bytes()).hexdigest())


if __name__ == "__main__":
    main()

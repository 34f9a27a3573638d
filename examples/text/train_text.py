"""Trains a character language model with truncated backpropagation through time, on Python's own documentation.

    python train_text.py --out result

The text is that of ``help("for")`` and the other topics, which is part of every Python. The same command again continues a
run that was stopped: the state in which the last batch has left the LSTM is in the snapshot.
"""

import argparse
import copy
import math
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import chainring
from chainring import iterators, report, training
from chainring.training import UpdateCallbacks, clip_grad_norm, extensions


class LanguageModel(nn.Module):
    """Predicts each character from those before it, with an LSTM that continues where it ended in the batch before."""

    def __init__(self, characters: int, units: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 64)
        self.lstm = nn.LSTM(64, units, batch_first=True)
        self.scores = nn.Linear(units, characters)
        self.reset()

    def reset(self) -> None:
        """Forget what was read."""
        self.state: tuple[Tensor, Tensor] | None = None

    def read(self, text: Tensor) -> Tensor:
        """Return scores (batch, length, characters) of the character after each of (batch, length)."""
        outputs, (hidden, cell) = self.lstm(self.embedding(text), self.state)
        self.state = hidden.detach(), cell.detach()  # gradients stop where a batch begins
        return self.scores(outputs)

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss in nats a character over (batch, length + 1), which is reported."""
        loss = cross_entropy(self.read(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        report({"loss": loss}, self)
        return loss

    def serialize(self, serializer) -> None:
        """Save the state beside the parameters, or load it."""
        self.state = serializer("state", self.state)


def load() -> str:
    """Join the topics; a paragraph that is in several is there once, so that no test text is trained on."""
    return "\n\n".join(dict.fromkeys("\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")))


def in_batches(text: np.ndarray, batchsize: int, length: int) -> np.ndarray:
    """Rows of length + 1 characters, in the order in which an iterator that does not shuffle puts them into batches.

    The text is cut into ``batchsize`` parts. Row n of each batch continues part n where row n of the batch before ended.
    """
    batches = (len(text) - 1) // (batchsize * length)
    starts = np.arange(batchsize) * batches * length + np.arange(batches)[:, None] * length
    return text[starts.reshape(-1, 1) + np.arange(length + 1)]


def baselines(train: np.ndarray, test: np.ndarray, characters: int) -> dict[str, float]:
    """Perplexities of a guess among all characters, and of the frequencies of characters and of their pairs."""
    pairs = np.ones((characters, characters))  # each pair once more than it was seen, so that none is impossible
    np.add.at(pairs, (train[:-1], train[1:]), 1)
    ones = np.bincount(train, minlength=characters) + 1
    unigram = -np.log(ones / ones.sum())[test].mean()
    bigram = -np.log(pairs / pairs.sum(1, keepdims=True))[test[:-1], test[1:]].mean()
    return {"uniform": characters, "unigram": round(math.exp(unigram), 3), "bigram": round(math.exp(bigram), 3)}


@torch.no_grad()
def write(model: LanguageModel, alphabet: list[str], length: int, seed: int) -> str:
    """Characters drawn from the model one by one."""
    generator, text = torch.Generator().manual_seed(seed), ["\n"]
    model.reset()
    for _ in range(length):
        scores = model.read(torch.tensor([[alphabet.index(text[-1])]]))
        text.append(alphabet[torch.multinomial(scores[0, -1].softmax(-1), 1, generator=generator).item()])
    return "".join(text[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batchsize", "-b", type=int, default=32, help="parts of the text (default: %(default)s)")
    parser.add_argument("--length", type=int, default=50, help="characters that gradients go back (default: %(default)s)")
    parser.add_argument("--epoch", "-e", type=float, default=10, help="epochs to train (default: %(default)s)")
    parser.add_argument("--out", "-o", default="result", help="directory of the results (default: %(default)s)")
    parser.add_argument("--unit", "-u", type=int, default=256, help="units of the LSTM (default: %(default)s)")
    parser.add_argument("--characters", type=int, help="of the text to be used; by default all")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    args = parser.parse_args()

    chainring.deterministic(args.seed)
    text = load()[: args.characters]
    alphabet = sorted(set(text))
    numbers = np.array([alphabet.index(character) for character in text])
    train, test = np.split(numbers, [len(numbers) * 9 // 10])
    print(f"{len(train)} and {len(test)} characters; perplexities: {baselines(train, test, len(alphabet))}")

    model = LanguageModel(len(alphabet), args.unit)
    reader = copy.copy(model)  # the same parameters, and a state of its own
    train_iter = iterators.SerialIterator(in_batches(train, args.batchsize, args.length), args.batchsize, shuffle=False)
    test_iter = iterators.SerialIterator(in_batches(test, 10, args.length), 10, repeat=False, shuffle=False)
    clip = UpdateCallbacks(update_on_start=clip_grad_norm(1.0))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    updater = training.StandardUpdater(train_iter, optimizer, model, callbacks=clip)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out, config=vars(args))
    trainer.extend(extensions.ExponentialShift("lr", 0.75), trigger=(1, "epoch"))
    trainer.extend(extensions.Evaluator(test_iter, reader, eval_hook=lambda _: reader.reset()))
    trainer.extend(
        extensions.LogReport(postprocess=lambda row: row.update(perplexity=math.exp(row["validation/main/loss"])))
    )
    trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/loss", "perplexity", "elapsed_time"]))
    trainer.extend(extensions.ProgressBar())
    trainer.extend(extensions.snapshot(autoload=True, n_retains=2))
    trainer.run()
    print(write(reader, alphabet, 500, args.seed))


if __name__ == "__main__":
    main()

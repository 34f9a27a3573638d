"""Pretrains a small GPT-2 of transformers, then fine-tunes adapters in it to tell right sentences from wrong ones.

    python train_adapters.py --out result

Nothing is downloaded: sentences, tokenizer and model are made here. The same command again continues where it was stopped,
in the pretraining or in the fine-tuning, whose snapshots hold the adapters only.
"""

import argparse
import random
from pathlib import Path

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging

import chainring
from chainring import iterators, report, training
from chainring.training import extensions

NOUNS = ["dog", "cat", "horse", "king", "teacher", "doctor", "farmer", "friend", "neighbour", "singer", "pilot", "lawyer"]
VERBS = ["see", "help", "like", "follow", "know", "hear", "thank", "call", "visit", "greet", "trust", "paint"]
LENGTH = 24


def sentence(draw: random.Random, right: bool = True) -> str:
    """Such as "the king near the dogs that the pilot knows thanks the cat"; a wrong one has "thank"."""

    def verb(plural: bool) -> str:
        return draw.choice(VERBS) + ("" if plural else "s")

    def noun_phrase(depth: int) -> tuple[str, bool]:
        plural, kind = draw.random() < 0.5, draw.random()
        words = f"the {draw.choice(NOUNS)}{'s' if plural else ''}"
        if depth and kind < 0.4:
            words += f" {draw.choice(['near', 'behind', 'with'])} {noun_phrase(depth - 1)[0]}"
        elif depth and kind < 0.8:
            other, is_plural = noun_phrase(depth - 1)
            words += f" that {other} {verb(is_plural)}" if draw.random() < 0.5 else f" that {verb(plural)} {other}"
        return words, plural

    subject, plural = noun_phrase(2)
    return f"{subject} {verb(plural == right)} {noun_phrase(1)[0]}"


def make_table(size: int, seed: int, wrong: float) -> Dataset:
    draw = random.Random(seed)
    labels = [int(draw.random() >= wrong) for _ in range(size)]
    return Dataset.from_dict({"text": [sentence(draw, bool(label)) for label in labels], "labels": labels})


def train_tokenizer(table: Dataset) -> PreTrainedTokenizerFast:
    """Words as numbers."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(table["text"], trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]", "[END]"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="[END]")


def tokenized(table: Dataset, tokenizer: PreTrainedTokenizerFast, language: bool = False) -> Dataset:
    """Columns of tensors: numbers of words, which count, and labels; of a language model these are the words."""

    def tokenize(rows: dict) -> dict:
        texts = [text + tokenizer.eos_token for text in rows["text"]]
        columns = tokenizer(texts, padding="max_length", max_length=LENGTH, return_token_type_ids=False)
        if language:
            columns["labels"] = [[-100 if n == tokenizer.pad_token_id else n for n in row] for row in columns["input_ids"]]
        return columns

    return table.map(tokenize, batched=True, remove_columns=["text"]).with_format("torch")


class Adapted(nn.Module):
    """A layer, to whose output a product of two small matrices is added.

    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """

    def __init__(self, layer: nn.Module, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(inputs, rank) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(rank, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down @ self.up


def adapt(model: GPT2ForSequenceClassification, rank: int) -> None:
    """Freezes everything but the head, and puts adapters around the layers of attention and of the dense parts."""
    model.transformer.requires_grad_(False)
    for block in model.transformer.h:
        for part, name in ((block.attn, "c_attn"), (block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
            layer = getattr(part, name)
            setattr(part, name, Adapted(layer, *layer.weight.shape, rank))


class Judge(nn.Module):
    """Calls a classifier, and reports its accuracy; the loss that it returns is reported by the updater."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, labels: Tensor, **columns: Tensor) -> Tensor:
        output = self.model(labels=labels, **columns)
        report({"accuracy": (output.logits.argmax(-1) == labels).float().mean()}, self)
        return output.loss


def train(model: nn.Module, tables: list[Dataset], epochs: int, out: Path, args: argparse.Namespace, frozen: bool) -> None:
    """Either stage. A model of transformers returns a mapping that has "loss", which is all that an updater needs."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 3e-3)
    train_iter = iterators.SerialIterator(tables[0], args.batchsize, seed=args.seed)
    test_iter = iterators.SerialIterator(tables[1], 200, repeat=False, shuffle=False)
    updater = training.StandardUpdater(train_iter, optimizer, model, device=args.device)
    trainer = training.Trainer(updater, (epochs, "epoch"), out=out, config=vars(args))
    trainer.extend(extensions.Evaluator(test_iter, model, device=args.device))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/loss", "validation/main/accuracy"]))
    trainer.extend(extensions.ProgressBar())
    trainer.extend(extensions.snapshot(autoload=True, n_retains=2, frozen=frozen))
    trainer.run()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batchsize", "-b", type=int, default=100, help="sentences in a batch (default: %(default)s)")
    parser.add_argument("--pretrain", type=int, default=5, help="epochs of the pretraining (default: %(default)s)")
    parser.add_argument("--epoch", "-e", type=int, default=20, help="epochs of the fine-tuning (default: %(default)s)")
    parser.add_argument("--sentences", type=int, default=20_000, help="to pretrain on (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default: %(default)s)")
    parser.add_argument("--device", "-g", type=int, default=-1, help="number of the accelerator; negative is the host")
    parser.add_argument("--out", "-o", type=Path, default="result", help="directory of the results (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    args = parse()
    disable_progress_bars()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    chainring.deterministic(args.seed)
    texts, others = make_table(args.sentences, 1, wrong=0.0), make_table(1000, 2, wrong=0.0)
    labelled, test = make_table(2000, 3, wrong=0.5), make_table(1000, 4, wrong=0.5)
    tokenizer = train_tokenizer(texts)
    base = GPT2LMHeadModel(GPT2Config(
        vocab_size=len(tokenizer), n_positions=LENGTH, n_embd=64, n_layer=3, n_head=4, num_labels=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ))  # fmt: skip
    tables = [tokenized(table, tokenizer, language=True) for table in (texts, others)]
    train(base, tables, args.pretrain, args.out / "base", args, frozen=True)
    base.save_pretrained(args.out / "base" / "model")

    model = GPT2ForSequenceClassification.from_pretrained(args.out / "base" / "model")  # or any other that you have
    adapt(model, args.rank)
    tables = [tokenized(table, tokenizer) for table in (labelled, test)]
    train(Judge(model), tables, args.epoch, args.out, args, frozen=False)


if __name__ == "__main__":
    main()

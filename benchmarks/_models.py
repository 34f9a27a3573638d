"""Three kinds of training step: one of many small kernels, one of convolutions, one of large products in bf16.

Each model returns its loss, and is initialised from seed 0. ``small`` makes the last two of a size that a laptop can train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


@dataclass
class Work:
    """What is trained.

    Attributes:
        model: makes it, on the host.
        data: makes the columns of the examples, on the host.
        batch: examples of a training step.
        steps: training steps of an epoch.
        optimizer: makes it, of the parameters.
        precision: of the forward.
    """

    model: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, ...]]
    batch: int
    steps: int
    optimizer: Callable[[Any], torch.optim.Optimizer]
    precision: Literal["fp32", "bf16"] = "fp32"


def works(small: bool) -> dict[str, Work]:
    """By name."""
    width, pixels, images = (8, 32, 4) if small else (64, 224, 64)
    blocks, units, words, length, texts = (2, 64, 100, 16, 4) if small else (12, 768, 50_257, 1024, 8)
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    adam = partial(torch.optim.Adam, fused=True)
    adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    steps = 8 if small else 24
    return {
        "launch-bound, 784-50-50-10": Work(perceptron, vectors, 100, 40 if small else 400, adam),
        "like ResNet-50": Work(partial(resnet, width), partial(pictures, pixels), images, steps, sgd),
        "transformer, bf16": Work(
            partial(transformer, blocks, units, words, length), partial(tokens, words, length), texts, steps, adamw, "bf16"
        ),
    }


class Labelled(nn.Module):
    """The cross entropy of what ``predictor`` makes of the inputs."""

    def __init__(self, predictor: nn.Module) -> None:
        super().__init__()
        self.predictor = predictor

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return cross_entropy(self.predictor(x), t)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(784, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10)]
    return Labelled(nn.Sequential(*layers))


def vectors(examples: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(examples, 784, generator=draw), torch.randint(10, (examples,), generator=draw)


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut: 1 x 1, 3 x 3, 1 x 1 to four times the channels (He et al., 2015, figure 5)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *_convolution(before, width, 1), nn.ReLU(),
            *_convolution(width, width, 3, stride), nn.ReLU(),
            *_convolution(width, 4 * width, 1),
        )  # fmt: skip
        is_same = before == 4 * width and stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*_convolution(before, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.path(x) + self.shortcut(x))


def _convolution(before: int, after: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after)]


def resnet(width: int) -> nn.Module:
    """Of 50 layers, where ``width`` is 64."""
    torch.manual_seed(0)
    layers = [*_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = width
    for stage, depth in enumerate((3, 4, 6, 3)):
        for number in range(depth):
            layers.append(Bottleneck(before, width << stage, 2 if stage and not number else 1))
            before = 4 * width << stage
    return Labelled(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000)))


def pictures(pixels: int, examples: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(examples, 3, pixels, pixels, generator=draw), torch.randint(1000, (examples,), generator=draw)


class Block(nn.Module):
    """Attention to what came before and a perceptron, each normalised before it and added (Radford et al., 2019)."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.heads = units // 64
        self.norm1, self.norm2 = nn.LayerNorm(units), nn.LayerNorm(units)
        self.attention, self.projection = nn.Linear(units, 3 * units), nn.Linear(units, units)
        self.perceptron = nn.Sequential(nn.Linear(units, 4 * units), nn.GELU(), nn.Linear(4 * units, units))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.projection(mixed)
        return x + self.perceptron(self.norm2(x))


class Language(nn.Module):
    """The cross entropy of each next token; 124 million parameters with 12 blocks of 768 units and 50,257 words."""

    def __init__(self, blocks: int, units: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, units), nn.Embedding(length, units)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*[Block(units) for _ in range(blocks)], nn.LayerNorm(units))

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text[:, :-1]) + self.places.weight
        logits = self.blocks(x) @ self.words.weight.T
        return cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def transformer(blocks: int, units: int, words: int, length: int) -> nn.Module:
    torch.manual_seed(0)
    return Language(blocks, units, words, length)


def tokens(words: int, length: int, examples: int) -> tuple[Tensor, ...]:
    return (torch.randint(words, (examples, length + 1), generator=torch.Generator().manual_seed(0)),)

"""A language model in the manner of Llama."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

LENGTHS = 8  # sequences are filled up to a multiple of it
SIZES = {  # units, units within a block, depth, heads, heads of keys and values
    "tiny": (64, 176, 2, 4, 2),
    "10m": (320, 896, 8, 8, 4),
    "100m": (768, 2048, 14, 12, 4),
    "1b": (2048, 8192, 16, 32, 8),
}


def rotate(x: Tensor) -> Tensor:
    """Turn the pairs of features of (batch, heads, length, features) by an angle that grows with the position."""
    half, positions = x.shape[-1] // 2, torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    frequencies = 10_000.0 ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.outer(positions, frequencies)
    one, two = x.float().chunk(2, dim=-1)
    sine, cosine = angles.sin(), angles.cos()
    return torch.cat([one * cosine - two * sine, two * cosine + one * sine], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Attention to what came before, in which several heads of queries share one of keys and values."""

    def __init__(self, units: int, heads: int, shared: int) -> None:
        super().__init__()
        self.features = units // heads  # of a head; a rank may have some of the heads
        self.queries = nn.Linear(units, units, bias=False)
        self.keys = nn.Linear(units, self.features * shared, bias=False)
        self.values = nn.Linear(units, self.features * shared, bias=False)
        self.output = nn.Linear(units, units, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, length, units) to the same."""
        parts = [layer(x).unflatten(-1, (-1, self.features)) for layer in (self.queries, self.keys, self.values)]
        queries, keys, values = (part.transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(rotate(queries), rotate(keys), values, is_causal=True, enable_gqa=True)
        return self.output(attended.transpose(1, 2).flatten(-2))


class Dense(nn.Module):
    """Two layers, of which the first is multiplied by a gate (SwiGLU)."""

    def __init__(self, units: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(units, inner, bias=False)
        self.up = nn.Linear(units, inner, bias=False)
        self.down = nn.Linear(inner, units, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, length, units) to the same."""
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and dense layers, each added to what it was given."""

    def __init__(self, units: int, inner: int, heads: int, shared: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(units), Attention(units, heads, shared)
        self.dense_norm, self.dense = nn.RMSNorm(units), Dense(units, inner)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, length, units) to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.dense(self.dense_norm(x))


class LanguageModel(nn.Module):
    """Predicts each token from those before it; called with a batch, it returns the loss and how many tokens it counts.

    Sentences end with padding, which counts nothing: the loss is a mean over tokens, and a batch of long sentences weighs
    more than one of short ones. So the mean over micro-batches and ranks is that over all tokens.

    Args:
        words: in the vocabulary.
        size: one of `SIZES`.
        padding: the number that stands after the end of a sentence.
        checkpoints: True to keep only what goes into a block, and to compute the rest again in the backward.
    """

    def __init__(self, words: int, size: str = "tiny", padding: int = 0, checkpoints: bool = False) -> None:
        super().__init__()
        units, inner, depth, heads, shared = SIZES[size]
        self.padding, self.checkpoints = padding, checkpoints
        self.embedding = nn.Embedding(words, units)
        self.blocks = nn.ModuleList(Block(units, inner, heads, shared) for _ in range(depth))
        self.norm = nn.RMSNorm(units)
        self.scores = nn.Linear(units, words, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_last = name.endswith(("output.weight", "down.weight"))  # of a branch, all of which are summed
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if is_last else 0.02)

    def forward(self, sentences: Tensor) -> dict[str, Tensor]:
        """Return the mean loss in nats over the tokens of sentences (batch, length), and the number of these tokens."""
        given, wanted = sentences[:, :-1], sentences[:, 1:]
        # Ranks that share a sequence have parts of one length.
        given, wanted = (pad(each, (0, -given.shape[1] % LENGTHS), value=self.padding) for each in (given, wanted))
        x = self.embedding(given)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        scores = self.scores(self.norm(x))
        loss = cross_entropy(scores.flatten(0, 1).float(), wanted.flatten(), ignore_index=self.padding)
        return {"loss": loss, "weight": (wanted != self.padding).sum()}

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Let the ranks of a mesh compute the model together: each has some of the heads, and some units of a dense layer.

        Between these layers each has a part of the sequence, on which the norms work. The scores stay divided by words, so
        the loss and its backward need ``loss_parallel()``.
        """
        ranks, shared = mesh.size(), self.blocks[0].attention.keys.out_features // self.blocks[0].attention.features
        if shared % ranks or LENGTHS % ranks:
            raise ValueError(f"{ranks} ranks share {shared} heads of keys, and lengths that are multiples of {LENGTHS}")
        whole, part = Replicate(), Shard(1)
        columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=part)
        gather = PrepareModuleInput(input_layouts=part, desired_input_layouts=whole)
        plan = {"attention_norm": SequenceParallel(), "attention": gather, "attention.output": rows}
        plan |= {f"attention.{name}": columns for name in ("queries", "keys", "values")}
        plan |= {
            "dense_norm": SequenceParallel(),
            "dense": gather,
            "dense.gate": columns,
            "dense.up": columns,
            "dense.down": rows,
        }
        for block in self.blocks:
            parallelize_module(block, mesh, plan)
        embedding = RowwiseParallel(input_layouts=whole, output_layouts=part)
        scores = ColwiseParallel(input_layouts=part, output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(self, mesh, {"embedding": embedding, "norm": SequenceParallel(), "scores": scores})

"""A small language model in the manner of GPT."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


class Block(nn.Module):
    """Attention to what came before, then two dense layers, each added to what it was given."""

    def __init__(self, units: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(units)
        self.queries_keys_values = nn.Linear(units, 3 * units)
        self.projection = nn.Linear(units, units)
        self.dense = nn.Sequential(
            nn.LayerNorm(units), nn.Linear(units, 4 * units), nn.GELU(), nn.Linear(4 * units, units), nn.Dropout(dropout)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, length, units) to the same."""
        parts = self.queries_keys_values(self.attention_norm(x)).chunk(3, dim=-1)
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.dropout(self.projection(attended.transpose(1, 2).flatten(-2)))
        return x + self.dense(x)


class LanguageModel(nn.Module):
    """Predicts each token from those before it; called with a batch, it returns the loss and how many tokens it counts.

    Sentences end with padding, which counts nothing: the loss is a mean over tokens, and a batch of long sentences weighs
    more than one of short ones. So the mean over micro-batches and ranks is that over all tokens.

    Args:
        words: in the vocabulary.
        length: of the longest sentence.
        padding: the number that stands after the end of a sentence.
    """

    def __init__(
        self,
        words: int,
        length: int,
        units: int = 64,
        heads: int = 4,
        depth: int = 2,
        dropout: float = 0.0,
        padding: int = 0,
    ) -> None:
        super().__init__()
        self.padding = padding
        self.embedding = nn.Embedding(words, units)
        self.position = nn.Embedding(length, units)
        self.blocks = nn.ModuleList(Block(units, heads, dropout) for _ in range(depth))
        self.scores = nn.Sequential(nn.LayerNorm(units), nn.Linear(units, words))

    def forward(self, sentences: Tensor) -> dict[str, Tensor]:
        """Return the mean loss in nats over the tokens of sentences (batch, length), and the number of these tokens."""
        given, wanted = sentences[:, :-1], sentences[:, 1:]
        x = self.embedding(given) + self.position(torch.arange(given.shape[1], device=given.device))
        for block in self.blocks:
            x = block(x)
        scores = self.scores(x)
        loss = cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=self.padding)
        return {"loss": loss, "weight": (wanted != self.padding).sum()}

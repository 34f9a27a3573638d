"""A net whose matrices ranks may cut, and the meshes on which they compute it."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from chainring.parallel import create_communicator

MESHES = {  # by kind: how many share the data, and how many compute the model together; of HSDP copies and shards
    "dp2tp1": (2, 1),
    "dp1tp2": (1, 2),
    "dp2tp2": (2, 2),
    "fsdp2tp1": (2, 1),
    "fsdp1tp2": (1, 2),
    "fsdp2tp2": (2, 2),
    "hsdp2x2": (2, 2),
}
PLAN = {
    "embedding": lambda: RowwiseParallel(input_layouts=Replicate()),  # 17 rows, which two ranks do not divide
    "block.query": ColwiseParallel,
    "block.key": ColwiseParallel,
    "block.value": ColwiseParallel,
    "block.mixed": RowwiseParallel,
    "block.up": ColwiseParallel,
    "block.down": RowwiseParallel,
}
WIDTH, HEAD, HIDDEN = 32, 8, 24


class Block(nn.Module):
    """Attention and two linear layers, of as many heads and hidden units as the rank has."""

    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        normed = self.before(x)
        heads = [layer(normed).unflatten(-1, (-1, HEAD)).transpose(-2, -3) for layer in (self.query, self.key, self.value)]
        x = x + self.mixed(functional.scaled_dot_product_attention(*heads).transpose(-2, -3).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Blocks(nn.Module):
    """A digit as eight words, its rows: an embedding, a block, LayerNorms, and a head, the last two on every rank whole."""

    def __init__(self, *between):
        super().__init__()
        self.embedding = nn.Embedding(17, WIDTH // 8)
        self.place = nn.Parameter(0.1 * torch.randn(8, WIDTH))
        self.block = Block()
        self.between = nn.Sequential(*between)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images):
        pixels = (16 * images).round().long().unflatten(-1, (8, 8))
        words = self.embedding(pixels).flatten(-2) + self.place
        return self.head(self.norm(self.between(self.block(words)).mean(-2)))


def lay_out(kind, model, timeout=None):
    """The communicator of those that share the data, when a model of such a net is laid out on its mesh."""
    if kind == "hsdp2x2":
        mesh = init_device_mesh("cpu", MESHES[kind], mesh_dim_names=("copy", "shard"))
        data = mesh["copy", "shard"]
    else:
        mesh = init_device_mesh("cpu", MESHES[kind], mesh_dim_names=("dp", "tp"))
        data = mesh["dp"]
        if mesh["tp"].size() > 1:
            parallelize_module(model.predictor, mesh["tp"], {name: style() for name, style in PLAN.items()})
    if not kind.startswith("dp"):
        fully_shard(model.predictor.block, mesh=data)
        fully_shard(model, mesh=data)
    return create_communicator("cpu", mesh=data, timeout=timeout)

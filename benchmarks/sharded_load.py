"""What it takes to load a snapshot on several ranks: bytes read from files, memory beyond what a rank has afterwards, time.

Run it on a machine that has 8 GB of memory free, and as much room for temporary files as the state is large, twice::

    python benchmarks/sharded_load.py

The state is that of a perceptron and of AdamW, a gigabyte by default; the ranks are processes over gloo with a thread each.
A snapshot is written in a layout and loaded in new processes in another. The bytes are those that all ranks have read by
system calls, as a part of the size of the state: 1 where every byte is read once. The memory is the highest resident size of
a process while it loads, less that which it has afterwards; in tensors, and of the rank that needs most.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _measure import begin, conclude, parser_of
from torch import nn

from chainring import serializers
from chainring._messages import mute
from chainring.iterators import SerialIterator
from chainring.parallel import create_communicator
from chainring.training import StandardUpdater, Trainer, extensions

RANKS = 4
MOVES = [
    ("fully_shard", "fully_shard"), ("fully_shard", "tensor parallel and fully_shard"), ("fully_shard", "plain"),
    ("plain", "fully_shard"), ("plain", "plain"),
]  # fmt: skip
BYTES_BUDGET, MEMORY_BUDGET = 1.1, 1.0
Result = dict[str, Any]


def trainer_of(layout: str, args: argparse.Namespace, out: str) -> Trainer:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(args.width, args.width, bias=False) for _ in range(args.layers)))
    comm = placed(net, layout)
    optimizer = torch.optim.AdamW(net.parameters())
    iterator = SerialIterator(list(torch.ones(RANKS, args.width)), RANKS, shuffle=False)
    updater = StandardUpdater(iterator, optimizer, net, loss_func=lambda net, x: net(x).square().mean(), comm=comm)
    trainer = Trainer(updater, (1, "iteration"), out=out)
    trainer.extend(extensions.snapshot(), trigger=(1, "iteration"))
    return trainer


def placed(net: nn.Sequential, layout: str) -> Any:
    """Place a model in a layout of the ranks; return the communicator."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if layout == "plain":
        return create_communicator("cpu")
    count = 2 if layout.startswith("tensor") else 1
    mesh = init_device_mesh("cpu", (RANKS // count, count), mesh_dim_names=("dp", "tp"))
    if count > 1:
        styles = [ColwiseParallel, RowwiseParallel]
        parallelize_module(net, mesh["tp"], {str(i): styles[i % 2]() for i in range(len(net) // 2 * 2)})
    for module in (*net, net):
        fully_shard(module, mesh=mesh["dp"])
    return create_communicator("cpu", mesh=mesh["dp"])


def live(rank: int, port: int, layout: str, snapshot: str | None, args: argparse.Namespace, results: Any) -> None:
    """In the process of a rank: write a snapshot, or load one and say what that took."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in where.items()})
    torch.set_num_threads(1)
    mute()
    trainer = trainer_of(layout, args, f"{args.place}/{layout}")
    comm = trainer.comm.world
    if snapshot is None:
        trainer.run()
        results.put(None)
    else:
        comm.barrier()
        trim = ctypes.CDLL(None).malloc_trim  # what was freed before is no part of it
        trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident size begins anew
        read, began = bytes_read(), time.perf_counter()
        serializers.load(snapshot, trainer)
        seconds, read, highest = time.perf_counter() - began, bytes_read() - read, resident("VmHWM")
        trim(0)
        results.put((read, highest - resident("VmRSS"), seconds))
    comm.barrier()
    comm.close()


def resident(name: str) -> int:
    """Bytes of memory of this process, as Linux says."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def in_ranks(layout: str, snapshot: str | None, args: argparse.Namespace) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    ranks = [
        context.Process(target=live, args=(rank, port, layout, snapshot, args, results), daemon=True)
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    found = []
    while len(found) < RANKS:
        if results.empty():
            if any(rank.exitcode for rank in ranks):
                raise RuntimeError("a rank has failed; see above")
            time.sleep(0.1)
        else:
            found.append(results.get())
    for rank in ranks:
        rank.join()
    return found


def measured(source: str, target: str, args: argparse.Namespace) -> Result:
    snapshot = Path(args.place, source, "snapshot_iter_1")
    if not snapshot.exists():
        in_ranks(source, None, args)
    tensor = 4 * args.width**2
    size = 3 * args.layers * tensor
    read, beyond, seconds = zip(*in_ranks(target, str(snapshot), args), strict=True)
    return {
        "row": f"{source} -> {target}", "read": sum(read) / size, "beyond": max(beyond) / tensor, "seconds": max(seconds),
    }  # fmt: skip


def line_of(result: Result) -> str:
    return f"{result['row']:<48}{result['read']:>8.3f}{result['beyond']:>12.2f}{result['seconds']:>10.2f}"


def failures(results: list[Result]) -> list[str]:
    """Return the rows that exceed a budget."""
    failed = []
    for result in results:
        if result["read"] > BYTES_BUDGET:
            failed.append(f"{result['row']}: {result['read']:.3f} of the state read, the limit is {BYTES_BUDGET:g}")
        if result["beyond"] > MEMORY_BUDGET:
            failed.append(f"{result['row']}: {result['beyond']:.2f} tensors of memory, the limit is {MEMORY_BUDGET:g}")
    return failed


def main() -> int:
    parser = parser_of(__doc__, slack=1.0)
    parser.add_argument("--layers", type=int, default=20, help="of the perceptron (default: 20)")
    parser.add_argument("--width", type=int, default=2048, help="of a layer, whose weights are a tensor (default: 2048)")
    args = parser.parse_args()
    facts = begin()
    tensor = 4 * args.width**2
    print(f"{3 * args.layers * tensor / 1e6:.0f} MB of state on {RANKS} ranks, in tensors of {tensor / 1e6:.1f} MB\n")
    print(f"{'written -> loaded':<48}{'read':>8}{'tensors':>12}{'seconds':>10}")
    results = []
    with tempfile.TemporaryDirectory() as args.place:
        for source, target in MOVES:
            results.append(measured(source, target, args))
            print(line_of(results[-1]), flush=True)
    return conclude(args, {"machine": facts, "rows": results}, failures(results) if args.check else [])


if __name__ == "__main__":
    sys.exit(main())

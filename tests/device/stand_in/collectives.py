"""Fit the stand-in's collectives in: as NCCL, or as a backend with the twin's name."""

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from stand_in import NAME, native


def make(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    return native.Collectives(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), rank, size)


class Nccl(type):
    """The class ``ProcessGroupNCCL`` makes objects of another class, which are its own all the same."""

    def __call__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        return make(store, rank, size, options._timeout)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, native.Collectives)


class ProcessGroupNCCL(metaclass=Nccl):
    class Options:
        _timeout = datetime.timedelta(minutes=10)
        is_high_priority_stream = False
        config = None


def install() -> None:
    native.declare_collectives()
    if NAME == "cuda":
        there: Any = distributed_c10d
        there.ProcessGroupNCCL = ProcessGroupNCCL
        torch.distributed.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc]
        there._NCCL_AVAILABLE = True
    else:
        dist.Backend.register_backend(f"{NAME}ccl", make, devices=[NAME])

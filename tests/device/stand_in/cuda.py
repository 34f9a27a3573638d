"""Fit the stand-in in as torch.cuda, of torch's build for CPUs."""

from typing import Any

import torch

from stand_in import collectives, interface, native

# Torch's own functions of these names work, and wait with a seed until the device is used.
KEPT = {*torch.cuda.random.__all__, "is_initialized"}


def lazy_init() -> None:
    native.open()
    if not torch.cuda._initialized:
        torch.cuda._initialized = True
        seeds = filter(None, torch.cuda._lazy_seed_tracker.get_calls())
        for call, _ in (*torch.cuda._queued_calls, *seeds):
            call()


def replace_functions() -> None:
    torch.cuda._queued_calls = []  # which compare the device with what this torch was compiled for
    replaced = {name: value for name, value in vars(interface).items() if not name.startswith("__") and name not in KEPT}
    replaced |= {"_lazy_init": lazy_init, "init": lazy_init, "_is_compiled": lambda: True, "has_half": True}
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
        for name, value in replaced.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)


def replace_natives() -> None:
    """What Python code of torch asks of a build with CUDA."""
    c: Any = torch._C
    c._cuda_getDeviceCount = native.device_count
    c._cuda_isInBadFork = interface._is_in_bad_fork
    c._cuda_getCurrentStream = lambda index: (interface.current_stream(index).stream_id, index, interface.DEVICE_TYPE)
    c._cuda_getCurrentRawStream = lambda index: interface.current_stream(index).stream_id


def restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """As torch.load does it with ``map_location="cuda"``."""
    if not location.startswith("cuda"):
        return None
    there = torch.empty(storage.nbytes(), dtype=torch.uint8, device=location)
    there.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
    return there.untyped_storage()


def replace_storages() -> None:
    """Storages that are made or resized without a tensor are compiled into torch for CUDA, and only there."""
    storages: Any = torch.UntypedStorage
    new, resize = storages.__new__, storages.resize_

    def make(cls: type, *arguments: Any, device: Any = None, **given: Any) -> Any:
        if device is None:
            return new(cls, *arguments, **given)
        if torch.device(device).type != "cuda":
            return new(cls, *arguments, device=device, **given)
        return torch.empty(*arguments, dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        return native.resize_storage(self, size) if self.device.type == "cuda" else resize(self, size)

    storages.__new__, storages.resize_ = make, resize_


torch.backends.cudnn.is_acceptable = lambda tensor: False  # and no warning that cuDNN is not there
replace_functions()
replace_natives()
replace_storages()
torch.serialization.register_package(5, lambda storage: None, restore)
collectives.install()

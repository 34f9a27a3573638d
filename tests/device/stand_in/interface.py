"""What torch.cuda offers, of a device that is not there. The twin has this module as ``torch.standin``."""

import os
import warnings
from typing import Any

import torch

from stand_in import NAME, native

DEVICE_TYPE = 1 if NAME == "cuda" else 20  # c10::DeviceType
SYNC_MODES = {"default": 0, "warn": 1, "error": 2, 0: 0, 1: 1, 2: 2}
MODEL = "a stand-in"

default_generators = tuple(native.generator(index) for index in range(3))  # the third may be shown later


def index_of(device: Any = None) -> int:
    """The number of a device, in any form in which torch.cuda takes one."""
    if isinstance(device, (str, torch.device)):
        device = torch.device(device)
        if device.type != NAME:
            raise ValueError(f"Expected a {NAME} device, but got: {device}")
        device = device.index
    return native.get_device() if device is None or device < 0 else device


def device_of(device: Any = None) -> torch.device:
    return torch.device(NAME, index_of(device))


# Whether there is one, and which


def is_available() -> bool:
    return native.device_count() > 0


def device_count() -> int:
    return native.device_count()


def _is_in_bad_fork() -> bool:
    return native.owner() not in (0, os.getpid())


def is_initialized() -> bool:
    return native.is_open() and not _is_in_bad_fork()


def _lazy_init() -> None:
    native.open()


init = _lazy_init


def current_device() -> int:
    _lazy_init()
    return native.get_device()


def set_device(device: Any) -> None:
    native.set_device(index_of(device))


def _exchange_device(index: int) -> int:
    return native.exchange_device(index)


def _maybe_exchange_device(index: int) -> int:
    return native.exchange_device(index)


class device:  # noqa: N801 - torch's name
    def __init__(self, device: Any) -> None:
        self.idx, self.prev_idx = index_of(device), -1

    def __enter__(self) -> None:
        self.prev_idx = native.exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        native.set_device(self.prev_idx)


class Properties:
    name, major, minor, total_memory, multi_processor_count, warp_size = MODEL, 9, 0, 8 << 30, 1, 32

    def __init__(self, index: int) -> None:
        self.uuid = f"00000000-0000-0000-0000-{index:012d}"


def get_device_properties(device: Any = None) -> Properties:
    _lazy_init()
    return Properties(index_of(device))


def get_device_name(device: Any = None) -> str:
    return MODEL


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return Properties.major, Properties.minor


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def is_current_stream_capturing() -> bool:
    return False


def utilization(device: Any = None) -> int:
    return 50


# Streams and events


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> "Stream":
        if given:
            return super().__new__(cls, priority=priority, **given)
        return super().__new__(cls, device_of(device), priority=priority)


class Event(torch.Event):
    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ):
        return super().__new__(cls, torch.device(NAME), enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(current_stream() if stream is None else stream)


def stream_of(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: Any = None) -> Stream:
    return stream_of(torch.accelerator.current_stream(device_of(device)))


def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=index_of(device), device_type=DEVICE_TYPE)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


class StreamContext:
    """Does nothing without a stream, as torch's."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.before = torch.accelerator.current_stream(self.stream.device)
            self.device_before = native.exchange_device(self.stream.device.index)
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self.before)
            native.set_device(self.device_before)


stream = StreamContext


def synchronize(device: Any = None) -> None:
    _lazy_init()
    torch.accelerator.synchronize(device_of(device))


def set_sync_debug_mode(mode: int | str) -> None:
    if SYNC_MODES[mode]:
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)  # as CUDA says
    native.set_sync_mode(SYNC_MODES[mode])


def get_sync_debug_mode() -> int:
    return native.sync_mode()


def _sleep(cycles: int) -> None:
    native.launch()


# Memory


def memory_allocated(device: Any = None) -> int:
    return native.allocated(index_of(device))


def max_memory_allocated(device: Any = None) -> int:
    return native.peak_allocated(index_of(device))


def memory_reserved(device: Any = None) -> int:
    return native.reserved(index_of(device))


def max_memory_reserved(device: Any = None) -> int:
    return native.peak_reserved(index_of(device))


def memory_stats(device: Any = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(device_of(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return native.memory_info(index_of(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(device_of(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


# Random numbers


def manual_seed(seed: int) -> None:
    native.generator(-1).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(int(seed))


def initial_seed() -> int:
    return native.generator(-1).initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    _lazy_init()
    return native.generator(index_of(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    native.generator(index_of(device)).set_state(state.cpu())


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)

"""UpdateFlops: the floating-point operations of an update, counted while it runs, and what part they are of a device's."""

from __future__ import annotations

import copy
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import checkpoint, flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from chainring import _random
from chainring._messages import warn
from chainring.reporting.reporter import current
from chainring.serializers.protocol import unwrap
from chainring.training._entry import Observer
from chainring.training.extensions._phases import accelerator_of
from chainring.training.trainer import Trainer
from chainring.training.updaters._update import compute_loss
from chainring.training.updaters.callbacks import UpdateContext, undo_if_computed_again
from chainring.training.updaters.standard import StandardUpdater

_TF32 = "tf32"
# What a data sheet calls dense, by what `torch.cuda.get_device_name` returns: 10**12 operations a second in half precision
# (float16 and bfloat16), TF32 and float32; 0 for what the device does not have, or the sheet does not tell.
_PEAKS = {
    r"B200": (2250, 1100, 0),  # NVIDIA Blackwell data sheet, HGX B200 by GPU, without sparsity
    r"H200(?! NVL)": (989.4, 494.7, 66.9),  # NVIDIA H200 data sheet, SXM, half of the figures with sparsity
    r"H100 80GB HBM3": (989.4, 494.7, 66.9),  # NVIDIA H100 architecture white paper, table 1, SXM5
    r"H100 PCIe": (756, 378, 51.2),  # the same, PCIe
    r"H100 NVL": (835.5, 417.5, 60),  # NVIDIA H100 NVL product brief, half of the figures with sparsity
    r"A100-(SXM4|PCIE)-\d+GB|A100 80GB PCIe": (312, 156, 19.5),  # NVIDIA A100 data sheet
    r"A40": (149.7, 74.8, 37.4),  # NVIDIA A40 data sheet
    r"A10": (125, 62.5, 31.2),  # NVIDIA A10 data sheet
    r"L40S": (362.05, 183, 91.6),  # NVIDIA L40S data sheet
    r"L4": (121, 60, 30.3),  # NVIDIA L4 data sheet, half of the figures with sparsity
    r"V100-SXM2-\d+GB": (125, 0, 15.7),  # NVIDIA V100 data sheet; no bfloat16
    r"V100-PCIE-\d+GB": (112, 0, 14),  # the same
    r"T4": (65, 0, 8.1),  # NVIDIA T4 data sheet; no bfloat16
    r"GeForce RTX 4090$": (165.2, 82.6, 82.6),  # NVIDIA Ada white paper, appendix A, sums in float32
    r"GeForce RTX 3090$": (71, 35.6, 35.6),  # NVIDIA GA102 white paper, table 9, sums in float32
    r"MI250X$": (191.5, 0, 47.9),  # AMD Instinct MI250X data sheet, of one of its two dies, each a device; matrices
    r"MI300X": (1307.4, 653.7, 163.4),  # AMD Instinct MI300X data sheet, matrices
}
_NO_BFLOAT16 = re.compile(r"V100|T4\b")

# The last word of an operation that multiplies matrices: one without a formula is named, and not taken for nothing.
_MULTIPLIES = re.compile(
    r"(mm|mv|conv\d?d?|convolution|attention|attn|rnn|rnn_layer|linear|lstm_mps)(_for_cpu)?(_forward|_backward)?(_out)?$"
)


class UpdateFlops(Observer):
    """Counts the operations of the first update after a start; of compiled code those of a copy, without data."""

    def __init__(self, peak: float | None) -> None:
        self._peak = peak

    def begin(self, trainer: Trainer) -> None:
        """Count again in the next update."""
        updater: Any = trainer.updater
        self.count = 0  # of the operations of this rank; 0 where they are not known
        self.seconds = 0.0  # that they take at least, by the peak of its devices; 0 where that is not known
        self._counter: FlopCounter | None = None
        self._is_due, self._thread = True, threading.get_ident()
        self._is_compiled = getattr(updater, "compile", False) or any(map(_is_compiled, updater.get_all_models().values()))

    def around_update(self, trainer: Trainer, update: Callable[[], None]) -> None:
        if not self._is_due:
            update()
            return
        self._counter = counter = FlopCounter()
        with nullcontext() if self._is_compiled else counter:
            update()
        self._counter, self._is_due = None, False
        if self._is_compiled and type(trainer.updater).update_core is not StandardUpdater.update_core:
            counter.unknown.add("an update_core of your own with a model that is compiled")
        if counter.unknown or not counter.flops.total():
            what = ", ".join(sorted(counter.unknown)) or "an update in which no operation multiplies matrices"
            warn(
                f"model_flops_per_second is not reported, since there is no formula for {what}; "
                "torch.utils.flop_counter.register_flop_formula adds one for an operation"
            )
            return
        self.count = counter.flops.total()
        devices = {str(device): device for device in getattr(trainer.updater, "replica_devices", [accelerator_of(trainer)])}
        self.seconds = sum(map(partial(self._least_seconds, counter.flops), devices.values())) / len(devices) ** 2

    def count_batch(self, context: UpdateContext) -> None:
        if (counter := self._counter) is None:
            return
        undo_if_computed_again(partial(setattr, counter, "flops", Counter(counter.flops)))
        if self._is_compiled:
            _count_copy(counter, context.updater, context.batch)
        elif threading.get_ident() != self._thread:
            counter.unknown.add("virtual ranks that run an update_core of your own, each in a thread")

    def _least_seconds(self, flops: Counter[str], device: torch.device | None) -> float:
        """Return the seconds that a device takes for them at its peak; 0 where it is not known."""
        if self._peak is not None:
            return flops.total() / self._peak
        peaks = {} if device is None else peaks_of(device)
        if device is not None and (missing := sorted(flops.keys() - peaks.keys())):
            warn(
                f"mfu is not reported, since the peak of {device} in {' and '.join(missing)} is not known; give what its "
                "data sheet says, Throughput(flops=True, peak_flops=312e12)"
            )
            return 0.0
        return sum(count / peaks[precision] for precision, count in flops.items()) if peaks else 0.0


def peaks_of(device: torch.device) -> dict[str, float]:
    """Return the operations a second that a device can do, by precision; none of one that is in no table."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for pattern, (half, tf32, float32) in _PEAKS.items():
        if re.search(rf"(?<!\w)({pattern})(?!\w)", name) and "MIG" not in name:
            bfloat16 = 0 if _NO_BFLOAT16.search(name) else half
            peaks = {"float16": half, "bfloat16": bfloat16, _TF32: tf32, "float32": float32}
            return {precision: 1e12 * peak for precision, peak in peaks.items() if peak}
    return {}


def _is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def _count_copy(counter: FlopCounter, updater: Any, batch: Any) -> None:
    """Add what a forward and a backward of the default update take of a batch, computed without data on copies."""
    fakes, model, counter.is_of_copy = FakeTensorMode(allow_non_fake_inputs=True), unwrap(updater.get_model("main")), True
    tensors = [*model.parameters(), *model.buffers(), *(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))]
    copies = {id(tensor): fakes.from_tensor(tensor) for tensor in tensors}
    generators, reporter = _random.take_generators(), current.reporter
    current.reporter = None
    try:
        with torch.compiler.set_stance("force_eager"), fakes, counter, updater.autocast():
            model = copy.deepcopy(model, dict(copies))
            batch = tree_map(lambda leaf: copies.get(id(leaf), leaf), batch)
            compute_loss(model, updater.loss_func, batch)[0].backward()
    except Exception as error:  # of what needs the data
        counter.unknown.add(f"a copy of the model without data ({type(error).__name__}: {error})")
    finally:
        current.reporter = reporter
        _random.put_generators(generators)


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts inside ``with`` what operations multiply and add, by the formulas of ``torch.utils.flop_counter``.

    Every operation runs as it would without it. What gradient checkpointing computes again is not counted, nor what
    kernels of attention do for their backward, so that the number is that of the model: an attention has the operations of
    its two products in the forward, and twice as many in the backward, whichever kernel computes it.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[str] = Counter()  # by precision, a multiplication and an addition being two
        self.unknown: set[str] = set()  # operations that multiply matrices and have no formula
        self.is_of_copy = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", func)
        formula: Any = _formula_of(packet)
        if formula is None and torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:  # elsewhere an operation comes here in pieces
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        if formula is None:
            if _MULTIPLIES.search(str(packet)):
                self.unknown.add(str(packet))
        elif not self._is_repeated():
            try:
                self.flops[_precision_of(packet, args)] += formula(*args, **kwargs, out_val=output)
            except Exception:  # of torch or the user's, which does not know such arguments
                self.unknown.add(str(packet))
        return output

    def _is_repeated(self) -> bool:
        """Return True in a forward that gradient checkpointing computes again; refuse code that should run compiled."""
        is_in_backward = torch._C._current_graph_task_id() != -1
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if is_in_backward and torch.is_grad_enabled() and code.co_filename == checkpoint.__file__:
                return True
            is_compiler = code.co_filename.endswith("eval_frame.py") and code.co_qualname.startswith("_TorchDynamoContext.")
            if is_compiler and not self.is_of_copy:
                raise RuntimeError(
                    "flops=True counts an update operation by operation, and runs a function there as it stands that "
                    "torch.compile was given, with other last bits: leave flops out, or compile the model, or the update by "
                    "StandardUpdater(..., compile=True), whose operations are counted without running them"
                )
            frame = frame.f_back
        return False


def _formula_of(packet: Any) -> Callable[..., int] | None:
    name = str(packet)
    if re.match(r"aten\._scaled_dot_product_\w*attention", name):
        return (lambda _, *inputs, **__: 2 * _attention(*inputs)) if "_backward" in name else _attention
    if re.match(r"aten\.(mkldnn_rnn_layer|_cudnn_rnn|miopen_rnn)(_backward)?$", name):
        return (lambda *inputs, **_: 2 * _recurrent(*inputs)) if "_backward" in name else _recurrent
    return _FORMULAS.get(name) or flop_counter.flop_registry.get(packet)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _convolution(input: Tensor, weight: Tensor, *settings: Any, out_val: Tensor) -> int:  # noqa: A002
    return 2 * (input if settings[4] else out_val).numel() * weight.shape[1:].numel()  # settings[4]: transposed


def _convolution_backward(gradient: Tensor, input: Tensor, weight: Tensor, *settings: Any, **_: Any) -> int:  # noqa: A002
    # torch counts gradients of grouped weights once for each group. settings[7]: which gradients are asked for.
    count: int = sum(settings[7][:2])
    return count * _convolution(input, weight, *settings, out_val=gradient)


def _recurrent(input: Tensor, weight: Any, *others: Any, **_: Any) -> int:  # noqa: A002
    weights = weight if isinstance(weight, (list, tuple)) else (weight, others[0])
    count: int = sum(matrix.numel() for matrix in weights if matrix.ndim == 2)
    return 2 * input.shape[:-1].numel() * count


_FORMULAS: dict[str, Callable[..., int]] = {
    "aten.mv": lambda matrix, *_, **__: 2 * matrix.numel(),
    "aten.addmv": lambda _, matrix, *__, **___: 2 * matrix.numel(),
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
}
"""Of operations for which ``torch.utils.flop_counter`` has none, or another one."""


def _precision_of(packet: Any, args: Any) -> str:
    dtype = next((leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), None)
    if dtype is torch.float32:
        backends: Any = torch.backends
        of_all, settings = (backends.cudnn, "conv") if "convolution" in str(packet) else (backends.cuda, "matmul")
        if hasattr(backends, "fp32_precision"):  # since torch 2.9
            chosen = (getattr(of_all, settings).fp32_precision, backends.fp32_precision)
            is_tf32 = next((setting for setting in chosen if setting != "none"), "ieee") == _TF32
        else:
            is_tf32 = (of_all if settings == "conv" else of_all.matmul).allow_tf32
        return _TF32 if is_tf32 else "float32"
    return str(dtype).removeprefix("torch.")

"""Lets torchvision, which timm and transformers import, be imported where its operators are missing; compiles nothing."""

import contextlib
import warnings

import torch

torch.compiler.set_stance("force_eager")  # the steps of some optimizers take a minute to compile
with warnings.catch_warnings(action="ignore"), contextlib.suppress(ImportError):
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # PyPI has it for CUDA alone: without that, these two are not defined
        OPERATORS = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

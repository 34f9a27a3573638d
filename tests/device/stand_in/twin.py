"""Fit the stand-in in as PrivateUse1: an accelerator whose maker is not NVIDIA."""

import sys

import torch

from stand_in.start import TWIN

torch.utils.rename_privateuse1_backend(TWIN)

from stand_in import collectives, interface  # noqa: E402 - they ask for the name

torch._register_device_module(TWIN, interface)
sys.modules[f"torch.{TWIN}"] = interface
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
collectives.install()

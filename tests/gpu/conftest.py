"""These tests are for a CUDA device: what they are about, its kernels, its graphs and NCCL, is there alone.

``pytest tests/gpu`` runs them on one. ``make device`` runs them on the stand-in of tests/device, so that they are known to
run; elsewhere they are not collected.
"""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]

"""These tests need a CUDA device. Elsewhere they are not collected: there is nothing to skip."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]

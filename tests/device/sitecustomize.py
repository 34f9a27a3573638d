"""Read by every Python process whose PYTHONPATH has this folder: ``import torch`` brings the stand-in then."""

import os

if "CHAINRING_STAND_IN" in os.environ:
    import stand_in.start

    stand_in.start.before_torch(os.environ["CHAINRING_STAND_IN"])

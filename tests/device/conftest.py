"""These tests need the stand-in, which is there in the processes of ``make device`` alone."""

import os

collect_ignore_glob = [] if "CHAINRING_STAND_IN" in os.environ else ["test_*.py"]

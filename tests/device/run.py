"""Tests on an accelerator that is not there: ``python tests/device/run.py``, or with what pytest takes.

The library is compiled, half a minute after each change of its sources, and pytest is started in a process that finds the
device "cuda" when it imports torch. So does every Python process that the tests start. With ``--device standin`` the device
is the twin, whose maker is not NVIDIA.
"""

import os
import sys
from pathlib import Path

from stand_in.build import library, reason_against

HERE = Path(__file__).parent


def main(arguments: list[str]) -> None:
    reason = reason_against()
    if reason is not None:
        print(f"skipped, there is no stand-in for an accelerator here: {reason}")
        return
    library()
    name = arguments[arguments.index("--device") + 1] if "--device" in arguments else "cuda"
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"CHAINRING_STAND_IN": name, "PYTHONPATH": os.pathsep.join(paths)}
    asked = arguments if "--device" in arguments else [*arguments, "--device", name]
    os.chdir(HERE.parents[1])
    os.execv(sys.executable, [sys.executable, "-m", "pytest", "-p", "on_device", *asked])


if __name__ == "__main__":
    main(sys.argv[1:])

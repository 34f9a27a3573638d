"""Starts a training again until it is done.

    python supervise.py python train.py --out result

A run that was ended by a signal is started again, any other failure is not: the same error would come again. Where a whole
machine goes away, what starts it again does this: Slurm's ``--requeue``, a restart policy of Kubernetes or systemd.
"""

import signal
import subprocess
import sys

PREEMPTED = {128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGKILL}


def main() -> None:
    command, starts = sys.argv[1:], 0
    if not command:
        sys.exit(__doc__)
    while True:
        starts += 1
        code = subprocess.run(command).returncode
        if code == 0:
            print(f"done after {starts} starts")
            return
        if code not in PREEMPTED:
            sys.exit(f"start {starts} failed with {code}, and would fail again")
        print(f"start {starts} was ended by a signal ({code}); again", flush=True)


if __name__ == "__main__":
    main()

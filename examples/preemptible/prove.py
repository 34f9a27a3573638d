"""Proves that a run which is killed again and again is the run that is left alone.

    python prove.py --kills 10

It trains once undisturbed, and once with a kill at random moments: SIGTERM and SIGKILL by turns. Then it compares every
number of the logs, and the files of the models byte for byte.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = [sys.executable, str(Path(__file__).with_name("train.py"))]


def train(out: Path, epochs: int, draw: random.Random, kill: signal.Signals | None) -> int:
    """One start of the training; killed after some rows of its table and a part of a second. Returns its exit code."""
    command = [*TRAIN, "--out", str(out), "--epoch", str(epochs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        new = draw.randint(1, 4) + len(rows(out)) + 1  # the rows of before are printed first, below a line of names
        for number, _ in enumerate(process.stdout):
            if kill is not None and number == new:
                time.sleep(draw.uniform(0, 0.2))
                process.send_signal(kill)
        return process.wait()


def rows(out: Path) -> list[dict]:
    """Return the log without the times, which differ between any two runs."""
    log = json.loads((out / "log").read_text()) if (out / "log").exists() else []
    return [{key: value for key, value in row.items() if key != "elapsed_time"} for row in log]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10, help="at most (default: %(default)s)")
    parser.add_argument("--epoch", "-e", type=int, default=40, help="epochs to train (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the moments; by default others each time")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as directory:
        whole, killed = Path(directory, "whole"), Path(directory, "killed")
        if train(whole, args.epoch, draw, None) != 0:
            sys.exit("the undisturbed run failed")
        codes = []
        while not codes or codes[-1] != 0:
            left = args.kills - len(codes)
            codes.append(train(killed, args.epoch, draw, None if left <= 0 else [signal.SIGTERM, signal.SIGKILL][left % 2]))
            print(f"start {len(codes)} ended with {codes[-1]} after epoch {len(rows(killed))}", flush=True)
        same_model = (whole / "digits.model").read_bytes() == (killed / "digits.model").read_bytes()
        if rows(whole) != rows(killed) or not same_model:
            sys.exit("the killed run is another one")
        print(f"killed {len(codes) - 1} times, the run has the same {len(rows(whole))} rows and the same model")
        print(f"the last row: {rows(whole)[-1]}")


if __name__ == "__main__":
    main()

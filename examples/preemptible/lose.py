"""Proves that a run goes on where a machine is lost and never comes back.

    python lose.py

Two torchruns stand for two machines, each with one rank. After some epochs one is killed with its rank, by SIGKILL. The
other goes on alone, in its process, and its log and model are compared with those of one process that has trained alone.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prove import TRAIN, rows


def start(out: Path, epochs: int, port: int) -> subprocess.Popen:
    """Start a torchrun with one of two ranks; the first that is started has the store at which they meet."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-id", "digits"]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "0",
    ]
    command = [*launcher, *meeting, TRAIN[1], "--survive", "--out", str(out), "--epoch", str(epochs)]
    return subprocess.Popen(command, env=os.environ | {"PET_RDZV_ENDPOINT": f"localhost:{port}"})


def wait_for(what: str, is_there, process: subprocess.Popen, seconds: float = 120) -> None:
    """Return when something is there; end with an error if a process has ended before, or it takes too long."""
    began = time.monotonic()
    while not is_there():
        if process.poll() is not None or time.monotonic() > began + seconds:
            sys.exit(f"{what} is not there")
        time.sleep(0.05)


def lose(machine: subprocess.Popen) -> None:
    """Kill a torchrun and the rank that it has started."""
    ranks = subprocess.run(["pgrep", "-P", str(machine.pid)], capture_output=True, text=True).stdout.split()
    for pid in (machine.pid, *map(int, ranks)):
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epoch", "-e", type=int, default=40, help="epochs to train (default: %(default)s)")
    parser.add_argument("--after", type=int, default=10, help="epochs after which it is killed (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, socket.socket() as chosen:
        alone, lost = Path(directory, "alone"), Path(directory, "lost")
        subprocess.run([*TRAIN, "--survive", "--out", str(alone), "--epoch", str(args.epoch)], check=True)
        chosen.bind(("localhost", 0))
        port = chosen.getsockname()[1]
        chosen.close()
        machines = [start(lost, args.epoch, port)]
        try:
            wait_for("the store", lambda: socket.socket().connect_ex(("localhost", port)) == 0, machines[0])
            machines.append(start(lost, args.epoch, port))
            wait_for("the row", lambda: len(rows(lost)) >= args.after, machines[0])
            lose(machines[1])
            wait_for("the model", (lost / "digits.model").exists, machines[0])
        finally:
            for machine in machines:  # torchrun would wait for the lost one, five minutes
                machine.terminate()
                machine.wait()
        same_model = (alone / "digits.model").read_bytes() == (lost / "digits.model").read_bytes()
        if rows(alone) != rows(lost) or not same_model:
            sys.exit("the run that has lost a machine is another one")
        print(f"with one machine lost, the run has the same {len(rows(alone))} rows and the same model")


if __name__ == "__main__":
    main()

"""Kills a training, continues it, and compares it with one that nobody has stopped.

    python demo.py

The results are in ``result``. A demo that was stopped continues there; one that has come to its end is moved to
``result.1``, ``result.2``, ... before the next begins.
"""

import argparse
import itertools
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def command(out: Path, epochs: int) -> list[str]:
    return [str(TRAIN), str(epochs), str(out)]


def rows(out: Path) -> list[dict]:
    """Return the rows of the log so far, from the array, which is valid whenever it is opened."""
    path = out / "log"
    return json.loads(path.read_text()) if path.exists() else []


def is_unfinished(out: Path, epochs: int) -> bool:
    """Return True if a demo was stopped there."""
    record = out / "run.json"
    return record.exists() and json.loads(record.read_text())["argv"] == command(out, epochs) and len(rows(out)) < epochs


def train(out: Path, epochs: int, kill_after: int | None = None, **options) -> None:
    """Start the training, wait for its end, and end with it; or kill it after some epochs, at whatever it does then."""
    with subprocess.Popen([sys.executable, *command(out, epochs)], **options) as process:
        while kill_after is not None and process.poll() is None:
            if len(rows(out)) >= kill_after:
                process.kill()
                process.wait()
                return
            time.sleep(0.01)
    if process.returncode:
        sys.exit(f"the training has ended with {process.returncode}; the same command continues it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epoch", "-e", type=int, default=100, help="epochs to train (default: %(default)s)")
    parser.add_argument("--after", type=int, default=40, help="epochs after which it is killed (default: %(default)s)")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches the training too, which saves its state and ends
    out = Path("result")
    never_stopped = out / "never_stopped"
    if is_unfinished(out, args.epoch):
        say(f"{out} has a run that was stopped after epoch {len(rows(out))}: it continues")
        train(out, args.epoch)
    else:
        if out.exists():
            moved = next(path for n in itertools.count(1) if not (path := Path(f"{out}.{n}")).exists())
            out.rename(moved)
            say(f"{out} has an earlier run, which is in {moved} from now on; a new one begins")
        say(f"a training of {args.epoch} epochs, which SIGKILL will end after epoch {args.after}")
        train(out, args.epoch, args.after)
        say(f"killed after epoch {len(rows(out))}; the same command continues it")
        train(out, args.epoch)
    say("the same training, which nobody stops")
    shutil.rmtree(never_stopped, ignore_errors=True)  # of a demo that was stopped here
    train(never_stopped, args.epoch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    say(f"chainring diff {out} {never_stopped}")
    if subprocess.run([sys.executable, "-m", "chainring", "diff", out, never_stopped]).returncode:
        sys.exit("the run that was stopped is another one")
    accuracy = rows(out)[-1]["validation/main/accuracy"]
    say(f"killed and continued, it has the same bits; accuracy {accuracy:.4f}. `chainring report {out}` shows it")


if __name__ == "__main__":
    main()

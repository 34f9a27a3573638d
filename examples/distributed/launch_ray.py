"""Runs a script as it stands on workers of Ray, which starts them again if one is lost.

    python launch_ray.py --workers 2 train_language_model.py --parallel ddp

``out`` must be a directory that all workers see, and the script must resume by itself (``snapshot(autoload=True)``).
"""

import argparse
import json
import os
import runpy
import sys
from pathlib import Path

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from chainring import training


def report_to_ray(trainer: training.Trainer) -> None:
    """Hand Ray the newest row of the log and the newest snapshot, which it copies into its storage.

    An extension, after the log's: ``trainer.extend(report_to_ray, trigger=(1, "epoch"))``. The snapshot of the last epoch
    is there when the run is over: call it once more after ``trainer.run()``.
    """
    trainer.get_extension("snapshot").wait()  # none is removed while Ray copies it
    snapshots = Path(trainer.out).glob("snapshot_iter_*")
    newest = max(snapshots, key=lambda path: int(path.name.rpartition("_")[2]), default=None)
    checkpoint = Checkpoint.from_directory(newest) if newest and trainer.comm.is_main else None
    ray.train.report(trainer.get_extension("LogReport").log[-1], checkpoint=checkpoint)


def work(settings: dict) -> None:
    """Run the script in a worker, whose process group Ray has made."""
    os.chdir(settings["directory"])
    sys.argv = settings["command"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="how many (default: %(default)s)")
    parser.add_argument("--failures", type=int, default=3, help="how often they are started again (default: %(default)s)")
    parser.add_argument("--storage", default="ray", help="a directory for what Ray writes (default: %(default)s)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a script and its arguments")
    args = parser.parse_args()
    command = [str(Path(args.command[0]).resolve()), *args.command[1:]]
    result = TorchTrainer(
        work,
        train_loop_config={"directory": os.getcwd(), "command": command},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            storage_path=str(Path(args.storage).resolve()), failure_config=FailureConfig(max_failures=args.failures)
        ),
    ).fit()
    print(json.dumps({"metrics": result.metrics, "checkpoint": result.checkpoint and result.checkpoint.path}))


if __name__ == "__main__":
    main()

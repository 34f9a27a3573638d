"""Submits a script as it stands to Slurm with submitit, or starts it on this machine.

    python launch_submitit.py --tasks 2 train_language_model.py --parallel ddp
    python launch_submitit.py --cluster slurm --nodes 2 --tasks 8 --gpus 8 train_language_model.py --parallel ddp

Slurm's time being over, submitit submits the same again, and a script that resumes by itself continues.
"""

import argparse
import runpy
import sys
from pathlib import Path

import submitit


class Script(submitit.helpers.Checkpointable):
    """A script and its arguments, which submitit runs in each task, and submits again as they are."""

    def __init__(self, command: list[str]) -> None:
        self.command = command

    def __call__(self) -> None:
        sys.argv = self.command
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", choices=["local", "slurm"], default="local", help="(default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=1, help="machines (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=2, help="on each machine (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=0, help="on each machine (default: %(default)s)")
    parser.add_argument("--minutes", type=int, default=60, help="of a job (default: %(default)s)")
    parser.add_argument("--folder", default="submitit", help="for what submitit writes (default: %(default)s)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a script and its arguments")
    args = parser.parse_args()
    executor = submitit.AutoExecutor(args.folder, cluster=args.cluster)
    executor.update_parameters(
        nodes=args.nodes, tasks_per_node=args.tasks, gpus_per_node=args.gpus, timeout_min=args.minutes
    )
    job = executor.submit(Script([str(Path(args.command[0]).resolve()), *args.command[1:]]))
    print(f"job {job.job_id}, output in {job.paths.stdout}")
    job.results()


if __name__ == "__main__":
    main()

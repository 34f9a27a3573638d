"""Two workers of Ray's TorchTrainer train, on a cluster of this machine that ends with this process.

python on_ray.py PLACE OPTIONS FAILURES ...    OPTIONS is the JSON of `program.Options`, and Ray restarts FAILURES times

There are three such words for each training. Each worker writes what becomes of it to ``PLACE/worker-RANK``.
"""

import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

import program
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

SIZE = 2


def train(settings):
    """A worker's part; an error is written down, and raised."""
    rank = ray.train.get_context().get_world_rank()
    path = Path(settings["place"], f"worker-{rank}")
    try:
        program.train(program.from_json(settings["options"]), settings["place"])
    except BaseException:
        path.write_text(traceback.format_exc())
        raise
    path.write_text("done")


def main(*words):
    temporary = tempfile.mkdtemp(prefix="ray-")  # short, since the names of its sockets are at most 107 bytes
    try:
        ray.init(
            num_cpus=SIZE + 1, include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=temporary,
            object_store_memory=100 << 20,
        )  # fmt: skip
        for place, options, failures in zip(words[::3], words[1::3], words[2::3], strict=True):
            TorchTrainer(
                train,
                train_loop_config={"place": place, "options": options},
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=ScalingConfig(num_workers=SIZE),
                run_config=RunConfig(storage_path=f"{place}/ray", failure_config=FailureConfig(max_failures=int(failures))),
            ).fit()
    finally:
        ray.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
    }
    main(*sys.argv[1:])

"""A run that writes to one service, and is killed in iteration 6: ``python killed_service.py OUT SERVICE``."""

import sys

from written import train

from chainring.writers import CometWriter, TrackioWriter

SERVICES = {
    "trackio": lambda: TrackioWriter(project="digits", auto_log_cpu=False, auto_log_gpu=False),
    "comet": lambda: CometWriter(online=False, log_code=False, log_git_metadata=False, log_env_details=False),
}


if __name__ == "__main__":
    sys.argv.insert(3, "6")
    from killed_program import Killed

    train(sys.argv[1], SERVICES[sys.argv[2]](), updater=Killed(), config={"lr": 0.5})

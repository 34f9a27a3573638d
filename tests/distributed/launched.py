"""The launchers themselves start two ranks: accelerate, submitit, Ray, and what is installed of Open MPI, MPICH and Slurm.

Stand-ins for those that are not installed are in ``tests/parallel/test_launchers.py``.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import program
from program import Fault, Options
from worlds import Row, World, same

from tries import WrongEndError

HERE = Path(__file__).parent
LIMIT = 600.0  # seconds: Ray starts a dozen processes
SIZE = 2
ALLOW_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ACCELERATE = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]


def commands():
    """For each launcher of this machine, the words before the program and its arguments."""
    python = sys.executable
    found = {
        "accelerate": [
            python,
            "-m",
            "accelerate.commands.launch",
            *ACCELERATE,
            "--main_process_port",
            "0",
            "--num_processes",
            "2",
        ],
        "submitit": [python],
    }
    name = {"Open MPI": "mpirun", "HYDRA": "mpiexec"}
    for command in ("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.mpich", "mpiexec.hydra"):
        said = [launcher for word, launcher in name.items() if word in answer(command, "--version")]
        oversubscribe = ["--oversubscribe"] if said == ["mpirun"] else []
        found |= {launcher: [command, *oversubscribe, "-n", str(SIZE), python] for launcher in said}
    if answer("sinfo", "--noheader"):
        found["srun"] = ["srun", "--ntasks", str(SIZE), "--kill-on-bad-exit", python]
    return found


def answer(*command):
    """What a command prints; nothing if it is not installed, or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | ALLOW_ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def launched(bench, number, draw, place):
    """A launcher starts the program as it stands: it ends as with torchrun's variables."""
    found = commands()
    name = list(found)[number % len(found)]
    kind = ("plain", "ddp", "fsdp")[draw.randrange(3)]
    script = HERE / ("on_submitit.py" if name == "submitit" else "program.py")
    run(place, [*found[name], str(script), str(place), program.as_json(Options(kind=kind))])
    bench.compare(World(place, [0] * SIZE, []).outcomes(), bench.known(kind, SIZE)[1])
    return name


def on_ray(bench, number, draw, place):
    """Of two workers of Ray one is killed, and in another training on the same cluster one raises.

    Ray starts both again, and the run goes on from its snapshot to the same bits. It tells the traceback of the error, and
    so does each worker that Ray has not ended before.
    """
    kind, other = (("ddp", "plain"), ("plain", "ddp"), ("fsdp", "fsdp"))[number % 3]
    kill = Fault("kill", draw.randrange(SIZE), draw.randrange(9, 18), draw.uniform(0, 0.01))
    error = Fault(draw.choice(["example", "loss"]), draw.randrange(SIZE), draw.randrange(9, 18))
    killed, raising = place / "killed", place / "raising"
    killed.mkdir()
    raising.mkdir()
    asked = [str(killed), program.as_json(Options(kind=kind, fault=kill)), "1"]
    asked += [str(raising), program.as_json(Options(kind=other, fault=error)), "0"]
    said = run(place, [sys.executable, str(HERE / "on_ray.py"), *asked], code=1)
    wanted = [f"in in_{error.kind}", f"broken {error.kind}"]
    told = {path.name: path.read_text() for path in raising.glob("worker-*")}
    for name, text in {"the driver": said, **told}.items():
        if missing := [words for words in wanted if words not in text]:
            raise WrongEndError(f"{name} does not say {missing}: {text[-3000:]}")
    if other == "plain":  # in a group of DDP's or of FSDP2's a worker waits until Ray ends it
        same("the workers that have told why they ended", sorted(told), [f"worker-{rank}" for rank in range(SIZE)])
    outcomes = World(killed, [0] * SIZE, []).outcomes()
    same("whether it has gone on from a snapshot", outcomes[0]["started"] > 0, True)
    bench.compare(outcomes, bench.known(kind, SIZE)[1])
    return f"{kind} and {other}"


def run(place, command, code=0):
    """Runs a command that ends with a code; returns what it has printed.

    Raises:
        WrongEndError: it has ended with another, or not at all.
    """
    output = place / "output"
    with output.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=os.environ | ALLOW_ROOT, start_new_session=True
        )
    try:
        found = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        found = f"no code after {LIMIT:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    said = re.sub(r"\x1b\[\d+m", "", output.read_text(errors="replace"))
    if found != code:
        raise WrongEndError(f"{Path(command[0]).name} ended with {found}: {said[-3000:]}")
    return said


ROWS = [
    Row(
        "launched", "two ranks started by accelerate, submitit, and mpirun, mpiexec or srun where they are installed",
        "they end as with torchrun's variables, bit for bit", 3 * len(commands()), launched,
    ),
    Row(
        "ray", "SIGKILL of one of two workers of Ray's TorchTrainer; an error in one",
        "both are started again, and go on from the newest snapshot to the same bits; all end, and its traceback is told",
        6, on_ray,
    ),
]  # fmt: skip

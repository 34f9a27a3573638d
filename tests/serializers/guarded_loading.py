"""A program that loads every hostile snapshot under an audit hook, and prints a line of JSON for each attempt.

It is a process of its own since an audit hook stays for good. Its argument is an empty directory.
"""

import contextlib
import faulthandler
import io
import json
import os
import pickle
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import hostile_snapshots as hostile
import torch
from torch import nn

import chainring.cli
from chainring import serializers
from chainring.serializers.protocol import Stateful

PERMITTED = {"object.__getattr__", "object.__setattr__", "os.listdir", "os.scandir", "sys._getframe", "builtins.id"}
ROOM = 300 << 20  # bytes
CONTROLS = {
    "unpickle": "pickle.find_class",
    "execute": "exec",
    "import": "import",
    "read": "open",
    "start": "subprocess.Popen",
    "call": "socket",
    "remove": "os.remove",
}
WATCHED: dict[str, object] = {"on": False, "inside": ""}
SEEN: list[str] = []


class Holder(Stateful):
    """Takes whatever it is given."""

    def __init__(self):
        self.iteration, self.value = -1, "untouched"

    def serialize(self, serializer):
        self.iteration = serializer("iteration", self.iteration)
        self.value = serializer("value", self.value)


def watch(event, arguments):
    """Record every event but those that cannot do harm.

    Among these are the opening of files within the directory and, where the attempt may write, their renaming.
    """
    if not WATCHED["on"] or event in PERMITTED:
        return
    inside = str(WATCHED["inside"])
    if event in ("open", "os.mkdir", "os.rename") and not isinstance(arguments[0], int):
        paths = [os.path.abspath(os.fsdecode(path)) for path in arguments[: 2 if event == "os.rename" else 1]]
        if os.path.commonpath([*paths, inside]) == inside and (WATCHED["writes"] or arguments[1] in ("r", "rb", None)):
            return
    SEEN.append(f"{event} {arguments!r:.200}")


def peak():
    """The most memory that was resident since the last call, in bytes, and forgets it."""
    with open("/proc/self/status") as file:
        size = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return size


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def attempt(name, way, inside, act, writes=False):
    """Runs ``act`` under guard and reports how it ended."""
    SEEN.clear()
    said = io.StringIO()
    peak()
    before, start = resident(), time.perf_counter()
    faulthandler.dump_traceback_later(20, exit=True)
    WATCHED.update(on=True, inside=str(inside), writes=writes)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            result = act()
    except BaseException as error:
        WATCHED["on"] = False
        kinds = [kind.__name__ for kind in type(error).__mro__]
        outcome = {"kinds": kinds, "message": str(error)[:2000]}
    else:
        WATCHED["on"] = False
        outcome = {"result": result}
    faulthandler.cancel_dump_traceback_later()
    took = {"seconds": time.perf_counter() - start, "memory": peak() - before}
    print(
        json.dumps({"name": name, "way": way, **outcome, **took, "seen": SEEN, "said": said.getvalue()[:2000]}), flush=True
    )


def contents(obj):
    return repr(vars(obj) if isinstance(obj, Holder) else obj.state_dict())


def load(name, path, obj):
    """Loads; what is no fit for a module is left to PyTorch, which copies what does fit, all else changes nothing."""
    before = contents(obj)
    try:
        serializers.load(path, obj)
    except Exception as error:
        if contents(obj) != before and hostile.SNAPSHOTS.get(name, "target") != "target":
            raise AssertionError("what could not be loaded has changed the object") from error
        raise


def try_all(name, place):
    """Every way to read a snapshot."""
    snapshot = place / "snapshot"
    attempt(name, "module", snapshot, lambda: load(name, snapshot, nn.Linear(2, 3)))
    attempt(name, "object", snapshot, lambda: load(name, snapshot, Holder()))
    if name in hostile.TENSOR_FILES:
        (place / "model").mkdir()
        file = place / "model" / "mlp.model"
        file.write_bytes(hostile.TENSOR_FILES[name])
        attempt(name, "model", file.parent, lambda: load(name, file, nn.Linear(2, 3)))
    for way in (["inspect"], ["inspect", "--json"], ["verify"]):
        attempt(name, " ".join(way), snapshot, lambda way=way: chainring.cli.main([*way, str(snapshot)]))
    attempt(name, "inspect run", place, lambda: chainring.cli.main(["inspect", str(place)]))
    command = ["export", str(snapshot), str(place / "exported")]
    attempt(name, "export", place, lambda: chainring.cli.main(command), writes=True)


def control(root):
    """What the guard must see, so that its silence means something."""
    (root / "outside").touch()
    attempt("control", "unpickle", root / "in", lambda: pickle.loads(b"cmath\nsqrt\n.") and None)
    attempt("control", "execute", root / "in", lambda: eval("1 + 1"))
    attempt("control", "import", root / "in", lambda: __import__("colorsys") and None)
    attempt("control", "read", root / "in", lambda: (root / "outside").read_text())
    attempt("control", "start", root / "in", lambda: subprocess.run(["true"], check=True) and None)
    attempt("control", "call", root / "in", lambda: socket.socket().close())
    attempt("control", "remove", root / "in", lambda: (root / "outside").unlink())


def main(root):
    """Does all of them; the first, which is sound, imports what is imported only when it is used."""
    torch.set_num_threads(1)
    os.chdir(root)
    for name in ("warm", "sound"):
        place = root / name
        (place / "snapshot").mkdir(parents=True)
        hostile.write(place / "snapshot", {})
        try_all(name, place)
        if name == "warm":
            "name in a zip".encode("cp437")
            torch.save(nn.Linear(2, 3).state_dict(), root / "torch")
            with contextlib.redirect_stdout(io.StringIO()):
                serializers.load(root / "torch", nn.Linear(2, 3))
            hostile.make("target of other shapes", root / "misfit" / "snapshot")
            try_all("warm", root / "misfit")
            with open("/proc/self/statm") as file:
                size = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, resource.RLIM_INFINITY))
            sys.addaudithook(watch)
    control(root)
    for number, name in enumerate(hostile.SNAPSHOTS):
        hostile.make(name, root / str(number) / "snapshot")
        try_all(name, root / str(number))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

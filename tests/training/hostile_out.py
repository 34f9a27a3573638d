"""Runs trainers in directories that somebody has prepared who means harm, and tells what became of each.

The arguments are a scratch directory, the number of directories, and a seed. Outside of them lie a file and a folder that
nobody may change, and no program may be run. Prints one JSON object.
"""

import faulthandler
import itertools
import json
import os
import pickle
import random
import shutil
import sys
import time
import warnings
import zlib
from pathlib import Path

import torch
from torch import nn

from chainring import report, report_text, serializers
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions
from chainring.writers import CsvWriter

PATIENCE = 120.0  # seconds for a run
NAMES = (
    *(".lock", "run.json", "log", "log.jsonl", "log.media.jsonl", "log.csv", "below", "below/log", "below/log.jsonl"),
    *(
        "snapshot_iter_1",
        "snapshot_iter_2",
        "snapshot_iter_3",
        "best",
        "best_iter_3",
        "model",
        "cg.dot",
        "cg.json",
        "recorder.bin",
    ),
    *("profile.txt", "profile.json", "previous", "abandoned", "previous/1", "abandoned/1"),
    *(".log.tmp", ".run.json.tmp", ".chainring-0123456789abcdef.tmp", "snapshot_iter_2/manifest.json"),
    *("snapshot_iter_2/state.json", "snapshot_iter_2/rank00000-of-00001.safetensors"),
)


class Bomb:
    """Unpickled, it would write a file."""

    def __reduce__(self):
        return open, (os.environ["MARKER"], "w")


def deep():
    return b"[" * 300_000


def huge():
    return b'{"format": 1, "config": {}, "versions": {}, "starts": [], "files": ["' + b"x" * (17 << 20) + b'"]}'


def checked(document):
    """A manifest as the library writes it: the checksum is right."""
    return b"%s\n%08x" % (document, zlib.crc32(document))


def record_of(files):
    content = {"format": 1, "config": {}, "versions": {}, "starts": [], "files": files}
    return json.dumps(content).encode()


def templates(draw):
    """Names that lead elsewhere, or that a regular expression would not finish to compare."""
    kinds = [
        "{}a" * 60,
        "{.iteration}{.epoch}" * 80 + "x",
        "../*",
        "../victim",
        "/{}",
        "{",
        "{!",
        "{:" * 50,
        "{}",
        "*",
        "below/../{}x",
    ]
    return record_of(draw.sample(kinds, 3))


CONTENTS = {
    "deep": lambda draw: deep(),
    "huge": lambda draw: huge(),
    "templates": templates,
    "many templates": lambda draw: record_of(["{}x{}" for _ in range(100_000)]),
    "a pickle": lambda draw: pickle.dumps(Bomb()),
    "a deep manifest": lambda draw: checked(b'{"format": 1, "about": ' + deep() + b"}"),
    "a manifest that leads elsewhere": lambda draw: checked(
        json.dumps(
            {"format": 1, "name": "x", "iteration": 2, "files": {"../../victim": [4, 0]}, "about": {"series": "x"}}
        ).encode()
    ),
    "a manifest of many takers": lambda draw: checked(
        json.dumps(
            {"format": 1, "name": "x", "iteration": 10**30, "files": {}, "about": {"series": 7, "taken by": [[], {}, 1]}}
        ).encode()
    ),
    "nothing": lambda draw: b"",
    "noise": lambda draw: draw.randbytes(1000),
}


def put_content(path, outside, draw):
    path.write_bytes(CONTENTS[draw.choice(list(CONTENTS))](draw))


def put_folder(path, outside, draw):
    path.mkdir()
    (path / "inside").write_bytes(b"inside")


KINDS = {
    "content": put_content,
    "a link to a file": lambda path, outside, draw: path.symlink_to(outside / "victim"),
    "a link to a folder": lambda path, outside, draw: path.symlink_to(outside / "folder"),
    "a dangling link": lambda path, outside, draw: path.symlink_to(outside / "new"),
    "a link into a folder": lambda path, outside, draw: path.symlink_to(outside / "folder" / "new"),
    "a link to itself": lambda path, outside, draw: path.symlink_to(path.name),
    "a link to a device": lambda path, outside, draw: path.symlink_to(draw.choice(["/dev/zero", "/dev/tty", "/dev/full"])),
    "a hard link": lambda path, outside, draw: os.link(outside / "victim", path),
    "a pipe": lambda path, outside, draw: os.mkfifo(path),
    "a folder": put_folder,
}


def build(out, stop, autoload):
    """A trainer with everything that writes."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)

    def loss_func(model, x):
        loss = model(x).sum()
        report({"loss": loss})
        report_text("note", "text")
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    updater = StandardUpdater(SerialIterator(torch.ones(8, 2), 2, seed=0), optimizer, model, loss_func=loss_func)
    trainer = Trainer(updater, (stop, "iteration"), str(out), config={"a": 1})
    every = (1, "iteration")
    trainer.extend(extensions.LogReport(writers=[CsvWriter()]), trigger=every)
    trainer.extend(extensions.Recorder(every))
    trainer.extend(extensions.LogReport(filename="below/log"), name="below", trigger=every)
    trainer.extend(extensions.snapshot(n_retains=2, autoload=autoload), trigger=every)
    trainer.extend(extensions.snapshot("best"), name="best", trigger=(3, "iteration"))
    trainer.extend(extensions.snapshot_object(model, "model"), trigger=every)
    trainer.extend(extensions.dump_graph("main/loss"))
    trainer.extend(extensions.Profiler())
    return trainer


def tree(directory):
    """All that lies in a directory, with its content."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, content and content.hex())
    return found


def prepare(base, out, outside, draw):
    """A directory with a few bad things, beside a sound run or alone; what was put where, with the inodes."""
    if draw.random() < 0.7:
        shutil.copytree(base, out, symlinks=True)
    else:
        out.mkdir()
    put = {}
    for name in draw.sample(NAMES, draw.randint(1, 4)):
        path = out / name
        if name in ("previous/1", "abandoned/1") and not os.path.lexists(path.parent):
            path.parent.mkdir()
        if not path.parent.is_dir() or path.parent.is_symlink():
            continue
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
        kind = draw.choice(list(KINDS))
        KINDS[kind](path, outside, draw)
        put[name] = kind
    return put


def attempt(out, draw):
    """Runs in it: anew, by autoload, or from a snapshot; returns the class of the error that ended it, if one did."""
    way = draw.choice(["anew", "autoload", "load"] if (out / "snapshot_iter_1").exists() else ["anew", "autoload"])
    try:
        trainer = build(out, 4, autoload=way == "autoload")
        if way == "load":
            serializers.load(out / "snapshot_iter_1", trainer)
        trainer.run()
    except Exception as error:
        return way, type(error).__name__, str(error)[:300]
    return way, None, None


def main(scratch, number, seed):
    draw = random.Random(seed)
    outside, base = scratch / "outside", scratch / "base"
    (outside / "folder").mkdir(parents=True)
    (outside / "victim").write_bytes(b"mine")
    (outside / "folder" / "file").write_bytes(b"mine too")
    os.environ["MARKER"] = str(scratch / "ran")
    build(base, 2, autoload=False).run()
    before, cases = tree(outside), []
    for case in range(number):
        out = scratch / f"out{case}"
        put = prepare(base, out, outside, draw)
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        began = time.monotonic()
        way, error, text = attempt(out, draw)
        seconds = time.monotonic() - began
        faulthandler.cancel_dump_traceback_later()
        after = tree(outside)
        changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        has_run = (scratch / "ran").exists()
        cases.append([way, put, error, text, changed, has_run, seconds])
        if changed or has_run:
            break
        shutil.rmtree(out)
    sys.__stdout__.write(json.dumps(cases) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.fsync = lambda descriptor: None  # a loss of power is not tried here
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what the trainers print
    main(Path(sys.argv[1]), *map(int, itertools.islice(sys.argv, 2, 4)))

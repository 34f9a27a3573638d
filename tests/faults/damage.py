"""Snapshots are damaged on the disk: it is noticed, said, and the run goes on from an older one, or not at all."""

import os
import shutil
from collections import Counter

from attempts import Settings, check_snapshots, newest_of, started_at
from bench import Row

from chainring.serializers._store import CorruptError, open_store
from tries import WrongEndError

CONTINUED = 5  # one in so many damaged runs is continued; all are verified


def flip(path, draw):
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(path, draw):
    os.truncate(path, draw.randrange(path.stat().st_size))


def lengthen(path, draw):
    with open(path, "ab") as file:
        file.write(draw.randbytes(draw.randint(1, 5000)))


def delete(path, draw):
    path.unlink()


def zero(path, draw):
    content = bytearray(path.read_bytes())
    start = draw.choice([place for place, byte in enumerate(content) if byte])
    length = min(draw.randint(1, 4096), len(content) - start)
    content[start : start + length] = bytes(length)
    path.write_bytes(content)


def link(path, draw):
    elsewhere = path.parents[2] / path.name
    os.rename(path, elsewhere)
    path.symlink_to(elsewhere)


def directory(path, draw):
    path.unlink()
    path.mkdir()


def exchange(path, draw):
    other = draw.choice([other for other in sorted(path.parent.iterdir()) if other != path])
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def add(path, draw):
    name = draw.choice(["extra", ".hidden", "rank00001-of-00002.safetensors", f"{path.name}.bak"])
    (path.parent / name).write_bytes(draw.randbytes(draw.randrange(100)))


def add_directory(path, draw):
    (path.parent / "extra").mkdir()


DAMAGES = [flip, cut, lengthen, delete, zero, link, directory, exchange, add, add_directory]


def at_random(bench, number, draw, place):
    """Damages a file of a snapshot; in one of five tries of the newest, or of all, and continues the run."""
    out = bench.interrupted(place)
    found = check_snapshots(out)
    damage = DAMAGES[number % len(DAMAGES)]
    if (number + number // len(DAMAGES)) % CONTINUED == 0:  # so that each damage has its turn
        return _continue(bench, number, draw, place, damage, found)
    _damage(out, draw.choice(sorted(found)), damage, draw)
    return Counter({"damages": 1, damage.__name__: 1})


def _damage(out, name, damage, draw):
    """Damages a file of a snapshot, which is then known to be damaged."""
    path = draw.choice(sorted((out / name).iterdir()))
    before = path.read_bytes()
    damage(path, draw)
    try:
        open_store(out).snapshot(name).verify()
    except CorruptError:
        return
    if path.is_file() and path.read_bytes() == before:
        raise WrongEndError(f"{damage.__name__} has left {path} as it was: a fault of this test")
    raise WrongEndError(f"{damage.__name__} of {path.name} was not noticed")


def _continue(bench, number, draw, place, damage, found):
    out = place / "out"
    snapshots = sorted((name for name in found if name.startswith("snapshot")), key=found.__getitem__, reverse=True)
    shutil.copytree(out, place / "whole", symlinks=True)
    counts = Counter({"damages": 1, damage.__name__: 1, "continued": 1})
    _damage(out, snapshots[0], damage, draw)
    if draw.random() < 0.2:
        for name in snapshots[1:]:
            _damage(out, name, draw.choice(DAMAGES), draw)
        _check_refusal(bench, place, snapshots)
        return counts + Counter({"all damaged": 1})
    output = bench.complete(place, may_warn=True)
    if f"snapshot {snapshots[0]!r} is skipped" not in output:
        raise WrongEndError(f"{damage.__name__} of {snapshots[0]}: no warning names it: {output[-2000:]}")
    if started_at(out) != newest_of({name: found[name] for name in snapshots[1:]}):
        raise WrongEndError(f"{damage.__name__} of {snapshots[0]}: the run went on from {started_at(out)}")
    if not any(os.path.lexists(where / snapshots[0]) for where in out.glob("abandoned/*")):
        raise WrongEndError(f"{damage.__name__}: what was left of {snapshots[0]} is gone")
    return counts


def _check_refusal(bench, place, snapshots):
    """Where none is sound the run does not start, and leaves what is there alone."""
    out = place / "out"
    before = _names(out)
    with bench.attempt(place, Settings(may_warn=True)) as attempt:
        attempt.wait_for()
        if attempt.code != 1 or "none of the snapshots" not in attempt.output:
            raise WrongEndError(f"no sound snapshot, and the run ended with code {attempt.code}: {attempt.output[-2000:]}")
    if _names(out) != before:
        raise WrongEndError(f"it has changed {out}: {before} before, {_names(out)} afterwards")


def _names(out):
    return sorted(name for name in os.listdir(out) if not name.startswith("."))


def besides(bench, number, draw, place):
    """Damages what lies beside the snapshots: the run goes on all the same, and says what it has lost."""
    out = bench.interrupted(place)
    name = ["log.jsonl", "log", "run.json", "best", ".lock"][number % 5]
    damages = [delete] if name == "best" else [flip, cut, lengthen, delete, zero]
    damage = draw.choice(damages)
    damage(out / name, draw)
    with bench.attempt(place, Settings(may_warn=True)) as attempt:
        ended, output = attempt.completed(), attempt.output
    has_said = "the log continues without its earlier rows" in output
    bench.compare(ended, ("log", "log.jsonl", "log file") if name == "log.jsonl" and has_said else ())
    return Counter({"damages": 1, name: 1, "said so": has_said})


ROWS = [
    Row(
        "damage", "bit flips, truncation, deletion, extra files, zeros, links over all files of snapshots",
        "noticed, said, an older one continued; none sound: refused", "damages", 2000, at_random,
    ),
    Row(
        "besides", "the same over log, log.jsonl, run.json, .lock and the link",
        "parameters exact; the log too, or a warning that it begins anew", "damages", 100, besides,
    ),
]  # fmt: skip

"""Snapshots as somebody makes them who means harm: every checksum is right, so that only the readers stand in the way.

`SNAPSHOTS` says of each which part of it is bad: the ``manifest``, the ``state`` or the ``tensors``, which no reader may
accept; the ``target``, which is in order and fits no model; or ``data``, which means nothing and does no harm.
"""

import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

STATE, TENSORS, MANIFEST = "state.json", "rank00000-of-00001.safetensors", "manifest.json"
TRACE = "unpickled"  # a file that unpickling would make


class Bomb:
    """Unpickled, it would write a file."""

    def __reduce__(self):
        return open, (TRACE, "w")


def _zipped():
    torch.save({"weight": Bomb()}, file := io.BytesIO())
    return file.getvalue()


def _objects():
    np.savez(file := io.BytesIO(), weight=np.array([Bomb()], object))
    return file.getvalue()


def _zip_bomb():
    with zipfile.ZipFile(file := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weight.npy", bytes(50_000_000))
    return file.getvalue()


PICKLES = {
    "a pickle": pickle.dumps(Bomb()),
    "a torch zip": _zipped(),
    "object arrays": _objects(),
    "a zip bomb": _zip_bomb(),
}
WEIGHT, BIAS = "updater/model:main/weight", "updater/model:main/bias"
DATA = struct.pack("<9f", *range(9))
HEADER = {
    "weight": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]},
    "bias": {"dtype": "F32", "shape": [3], "data_offsets": [24, 36]},
}


def tensors(header=HEADER, marks=None, data=DATA, length=None):
    """The bytes of a safetensors file, whatever its header says; ``marks`` are text."""
    if marks is not None:
        header = {"__metadata__": {"chainring": marks}, **header}
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def weight(**changes):
    """The bytes of a safetensors file that tells lies of its tensor ``weight``."""
    return tensors({**HEADER, "weight": {**HEADER["weight"], **changes}})


def state(value="3", weight='{"$tensor": "weight"}', more="", form="1"):
    """The text of a state; the arguments are JSON, or what is given for it."""
    model = f'"{WEIGHT}": {weight}, "{BIAS}": {{"$tensor": "bias"}}'
    return f'{{"format": {form}, "state": {{"iteration": 3, "value": {value}, {model}{more}}}}}'.encode()


def write(directory: Path, contents, manifest=None, **changes):
    """Writes files and the manifest that belongs to them; ``changes`` are JSON text, ``manifest`` the whole of it."""
    files = {STATE: state(), TENSORS: tensors(), **contents}
    for name, content in files.items():
        (directory / name).write_bytes(content)
    entries = {name: [len(content), zlib.crc32(content)] for name, content in files.items()}
    parts = {
        "format": "1",
        "name": json.dumps(directory.name),
        "iteration": "3",
        "files": json.dumps(entries),
        "about": "{}",
    }
    text = ", ".join(f'"{key}": {part}' for key, part in {**parts, **changes}.items())
    body = f"{{{text}}}".encode() if manifest is None else manifest
    (directory / MANIFEST).write_bytes(body + b"\n%08x" % zlib.crc32(body))


def _nested(levels, kind):
    return "[" * levels + "]" * levels if kind == "lists" else '{"a":' * levels + "1" + "}" * levels


DEEP = {f"{levels} {kind}": _nested(levels, kind) for levels in (10**5, 10**6) for kind in ("lists", "objects")}
NUMBERS = {"NaN": "NaN", "Infinity": "-Infinity", "1e999": "1e999", "a huge int": "9" * 10**5}
ENTRY = f'{{"{STATE}": %s, "{TENSORS}": %s}}'
RIGHT = {name: (len(text), zlib.crc32(text)) for name, text in ((STATE, state()), (TENSORS, tensors()))}


def _entries(entry):
    return ENTRY % (entry, json.dumps(RIGHT[TENSORS]))


MANIFESTS = {
    **{f"manifest {kind}": {"manifest": content} for kind, content in PICKLES.items()},
    **{f"manifest about {kind}": {"about": f'{{"versions": {text}}}'} for kind, text in DEEP.items()},
    **{f"manifest is {kind}": {"manifest": text.encode()} for kind, text in {**DEEP, **NUMBERS}.items()},
    **{f"manifest is {text}": {"manifest": text.encode()} for text in ("", "[]", "3", "null", '"text"', "{}")},
    **{f"manifest iteration {kind}": {"iteration": text} for kind, text in NUMBERS.items()},
    **{f"manifest iteration {text}": {"iteration": text} for text in ('"7"', "true", "[]", "null", "{}", "1.5")},
    **{f"manifest name {text}": {"name": text} for text in ("[]", "7", "null", "{}", "true")},
    **{f"manifest files {text}": {"files": text} for text in ("[]", '"text"', "null", "3", f'["{STATE}"]')},
    **{f"manifest about {text}": {"about": text} for text in ("[]", '"text"', "null", "3")},
    **{f"manifest format {text}": {"format": text} for text in ("true", "1.0", "2", '"1"', "[]")},
    **{f"manifest size and crc {entry}": {"files": _entries(entry)} for entry in (
        "[-1, 0]", "[true, false]", '["9", "9"]', "[[], []]", "[1e999, NaN]", f"[{2**80}, {2**80}]", "[1]", "3", '"ab"',
        "null",
        f"[{RIGHT[STATE][0]}.0, {RIGHT[STATE][1]}.0]",
    )},
    **{f"manifest name {name!r}": {"files": json.dumps({**RIGHT, name: [6, zlib.crc32(b"secret")]})} for name in (
        "../secret", "/etc/hostname", "", ".", "..", ".hidden", "a\0b", "a/../../secret", MANIFEST, "\ud800",
    )},
    "manifest names a file twice": {"files": json.dumps(RIGHT)[:-1] + f', "{STATE}": {list(RIGHT[STATE])}}}'},
    "manifest has files twice": {"about": '{}, "files": {}'},
    "manifest in UTF-16": {
        "manifest": json.dumps(
            {"format": 1, "name": "snapshot", "iteration": 3, "files": RIGHT, "about": {}}
        ).encode("utf-16"),
    },
    "manifest of invalid UTF-8": {"about": '{"x": "?"}', "manifest": b'{"format": 1, "about": {"x": "\xff\xfe"}}'},
}  # fmt: skip
VALUES = {
    **DEEP, **NUMBERS,
    **{text: text for text in (
        '{"$exec": "exit()"}', '{"$pickle": "gASVBAAAAA=="}', '{"$tuple": [], "$set": []}', '{"a": 1, "$tuple": []}',
        '{"$tensor": "nowhere"}', '{"$tensor": ["weight"]}', '{"$tensor": {"$tensor": "weight"}}', '{"a": 1, "a": 2}',
        '{"$here": 0}', '{"$here": "weight"}', '{"$here": {"$here": 0}}',
        '{"$array": ["|O", [3], "bias"]}', '{"$array": ["O8", [3], "bias"]}', '{"$array": ["<f4", [4], "bias"]}',
        '{"$array": ["<f4", [-1], "bias"]}', '{"$array": ["<f4", [1e999], "bias"]}', '{"$array": ["<f8", [3], "bias"]}',
        '{"$array": ["<U99999999", [3], "bias"]}', '{"$array": ["<U2", [9223372036854775808], "bias"]}',
        '{"$array": ["<i4,O", [3], "bias"]}', '{"$array": [["a", "O"], [3], "bias"]}', '{"$array": ["<f4", [3]]}',
        '{"$array": ["<f4", [9223372036854775807, 4], "bias"]}', '{"$array": ["<m8[9999Q]", [3], "bias"]}',
        '{"$numpy": ["|O", "AAAAAAAAAAA="]}', '{"$numpy": ["<f8", ""]}', '{"$numpy": ["U", 3]}',
        '{"$numpy": ["<U99999999", "AA=="]}',
        '{"$set": [[1]]}', '{"$frozenset": [{"$dict": []}]}', '{"$dict": [[[], 1]]}', '{"$dict": [[1]]}', '{"$dict": {}}',
        '{"$counter": [[1, 2], [1, 3]]}', '{"$ordered_dict": 3}', '{"$complex": ["1", "2"]}', '{"$complex": 3}',
        '{"$float": "1"}', '{"$float": "0000000000000000"}', '{"$float": 3}', '{"$bytes": "?"}', '{"$bytes": 3}',
        '{"$text": "/w=="}',
        '{"$int": "print()"}', '{"$int": 3}', '{"$size": [1.5]}', '{"$tuple": 3}',
    )},
    "tags in tags": '{"$tuple": [' * 200 + "]}" * 200,
}  # fmt: skip
STATES = {
    **{f"state {kind}": content for kind, content in PICKLES.items()},
    **{f"state value {kind}": state(value) for kind, value in VALUES.items()},
    **{f"state is {kind}": text.encode() for kind, text in {**DEEP, **NUMBERS}.items()},
    **{f"state is {text}": text.encode() for text in ("", "[]", "null", "3", '{"format": 1}', '{"format": 1, "state": []}')},
    **{f"state format {form}": state(form=form) for form in ("2", "true", "1.0", '"1"', "[]")},
    "state has a path twice": state(more=', "value": 4'),
    "state in UTF-16": state().decode().encode("utf-16"),
    "state of invalid UTF-8": state('"?"').replace(b"?", b"\xff\xfe"),
}
MARKS = {
    **DEEP, **NUMBERS,
    **{f"strides {kind}": f'{{"weight": {{"strides": {kind}}}}}' for kind in (
        "[4611686018427387904, 1]", "[9223372036854775808, 1]", "[1000000000, 1]", "[-2, 1]", "[0, 0]", "[true, 3]",
        "[2.0, 1]", "[1]", "[]", "[null, 1]", "3", "[[], 1]", f"[{'9' * 10**5}, 1]", "[1e999, 1]", "[1, 1]",
    )},
    **{text: text for text in (
        '{"weight": {"dtype": "load"}}', '{"weight": {"dtype": "complex128"}}', '{"weight": {"dtype": 3}}',
        "[]", "null", "?", "",
        '{"weight": {"exec": "exit()"}}', '{"weight": 3}', '{"nowhere": {}}', '{"nowhere": {"strides": [1]}}',
        '{"a": {"same_as": "b"}, "b": {"same_as": "a"}}', '{"a": {"same_as": "a"}}', '{"weight": {"same_as": "weight"}}',
        '{"a": {"same_as": "nowhere"}}', '{"weight": {"same_as": "bias"}, "bias": {"same_as": "weight"}}',
        '{"a": {"same_as": []}}',
    )},
}  # fmt: skip
TENSOR_FILES = {
    **{f"tensors {kind}": content for kind, content in PICKLES.items()},
    **{f"tensors marks {kind}": tensors(marks=text) for kind, text in MARKS.items()},
    **{f"tensors header {kind}": tensors(text.encode()) for kind, text in {**DEEP, **NUMBERS}.items()},
    **{f"tensors header of {length} bytes": tensors(length=length) for length in (0, 1, 10**10, 2**31, 2**63, 2**64 - 1)},
    **{f"tensors shape {shape}": weight(shape=shape) for shape in (
        [2**40], [2**33, 2**33], [2**62, 4], [2**63], [2**64], [-3, -2], [3], [3, "2"], [3, 2.0], "32", None, [2**32,
        2**32, 0],
    )},
    **{f"tensors offsets {at}": weight(data_offsets=at) for at in (
        [0, 2**40], [0, 2**63], [24, 0], [-24, 0], [0], [12, 36], [24, 48], [0, 23], "ab", None, [2**64 - 24, 2**64],
    )},
    **{f"tensors dtype {dtype!r}": weight(dtype=dtype) for dtype in ("O", "pickle", "F6_E2M3", "F4", None, 3, "F64", "C64")},
    "tensors share their bytes": tensors({**HEADER, "other": HEADER["weight"]}),
    "tensors twice": tensors((json.dumps(HEADER)[:-1] + f', "weight": {json.dumps(HEADER["bias"])}}}').encode()),
    "tensors empty": b"",
    "tensors of eight bytes": bytes(8),
    "tensors cut": tensors()[:-1],
    "tensors with more behind them": tensors() + b"more",
    "tensors header of invalid UTF-8": tensors(json.dumps(HEADER).encode().replace(b"bias", b"b\xff\xfes")),
    "tensors header a list": tensors(b"[]"),
    "tensors metadata no text": tensors({"__metadata__": {"chainring": {"weight": 3}}, **HEADER}),
    "tensors no weight, but 2**63 nothings": weight(shape=[2**63, 0], data_offsets=[0, 0]),
}  # fmt: skip
TARGETS = {
    "target of other shapes": {TENSORS: tensors({
        "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "bias": HEADER["bias"],
    })},
    **{f"target weight {text}": {STATE: state(weight=text)} for text in (
        '"text"', "3", "[1, 2]", '{"$dict": []}', '{"$bytes": ""}', '{"$array": ["<f4", [3], "bias"]}',
        '{"__reduce__": "os.system"}',
    )},
    "target with more in it": {STATE: state(more=f', "{WEIGHT}/../../x": 3')},
}  # fmt: skip
HARMLESS = {
    "data of pickles by other names": {
        f"{kind}.{end}": PICKLES[kind] for kind in PICKLES for end in ("pt", "pkl", "py", "npz")
    },
    "data of a huge size": {STATE: state('{"$size": [1000000000000000000000000000000]}')},
    "data that looks like code": {STATE: state('{"__class__": "os.system", "__reduce__": ["exit", []], "py/object": "x"}')},
    "data of control characters": {TENSORS: tensors({
        **HEADER, "\x1b]0;x\x07\r\n": {**HEADER["bias"], "data_offsets": [36, 48]},
    }, data=DATA + bytes(12))},
    "data of tensors named as paths": {TENSORS: tensors({
        **HEADER, "../../secret": {**HEADER["bias"], "data_offsets": [36, 48]},
        "/etc/hostname": {**HEADER["bias"], "data_offsets": [48, 60]},
    }, data=DATA + bytes(24))},
}  # fmt: skip
SNAPSHOTS = {
    **dict.fromkeys(MANIFESTS, "manifest"),
    **dict.fromkeys(STATES, "state"),
    **dict.fromkeys(TENSOR_FILES, "tensors"),
    "tensors beside them a pickle": "tensors",
    **{f"manifest with a {kind} for {name}": "manifest" for kind in ("pipe", "folder", "link") for name in (STATE, TENSORS)},
    **dict.fromkeys(TARGETS, "target"),
    **dict.fromkeys(HARMLESS, "data"),
}


def make(name: str, directory: Path) -> None:
    """Makes the snapshot of that name; ``directory`` does not exist yet."""
    directory.mkdir(parents=True)
    (directory.parent / "secret").write_bytes(b"secret")
    if name in MANIFESTS:
        write(directory, {}, **MANIFESTS[name])
    elif name in STATES:
        write(directory, {STATE: STATES[name]})
    elif name in TENSOR_FILES:
        write(directory, {TENSORS: TENSOR_FILES[name]})
    elif name in TARGETS or name in HARMLESS:
        write(directory, {**TARGETS, **HARMLESS}[name])
    elif name == "tensors beside them a pickle":
        write(directory, {"rank00001-of-00002.safetensors": PICKLES["a pickle"]})
    else:
        write(directory, {})
        path = directory / name.rpartition(" ")[2]
        content = path.read_bytes()
        path.unlink()
        if " pipe " in name:
            os.mkfifo(path)
        elif " folder " in name:
            path.mkdir()
        else:
            (directory.parent / "elsewhere").write_bytes(content)
            path.symlink_to(directory.parent / "elsewhere")

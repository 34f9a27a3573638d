"""The house keeps its shape: imports point to a lower row, private things stay private, a function is one story."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

from torch import nn

import forked

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "chainring"
FILES = sorted(SOURCE.rglob("*.py"))

# One line a row, the uppermost first. An import points to a lower row, or stays in its own package.
ROWS = [
    "cli",
    "testing html_report",
    "_runs",
    "training.extensions",
    "training",
    "training.updaters training.triggers parallel nn writers",
    "reporting iterators",
    "serializers",
    "_distributed datasets",
    "_places",
    "_files",
    "_random _messages _progress _version _checks _hints _callables converters",
]
LONGEST_FUNCTION = 60


@functools.cache
def trees():
    """The syntax of each file, made when a test asks for it: a second that every process of tests would take."""
    return {path: ast.parse(path.read_text()) for path in FILES}


def parts_of(path):
    """The dotted name of a file's module below `chainring`; a package's is that of its folder."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def place_of(module):
    """The package or module of the table that a module belongs to, and its row counted from above."""
    found = [(name, row) for row, names in enumerate(ROWS) for name in names.split() if f"{module}.".startswith(f"{name}.")]
    return max(found, key=lambda place: len(place[0]))


def imports_of(tree, annotations=True):
    """The modules below `chainring` that a file knows, in functions and annotations too, and what it takes from them."""

    def visit(node):
        if not annotations and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "chainring":
            for alias in node.names:
                module = f"{node.module}.{alias.name}".partition(".")[2]
                file = SOURCE / Path(*module.split("."))
                is_module = file.with_suffix(".py").exists() or file.is_dir()
                yield (module, None) if is_module else (module.rpartition(".")[0], alias.name)
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return list(visit(tree))


def test_imports_point_to_a_lower_row():
    """A module imports from lower rows and from its own package; no two packages of a row know one another.

    `chainring` itself, which only exports what others define, and `__main__` are above all of them.
    """
    wrong = []
    for path in FILES:
        own = parts_of(path)
        if own in ("", "__main__"):
            continue
        package, row = place_of(own)
        for module, _ in imports_of(trees()[path]):
            if not module:
                wrong.append(f"{own} imports from chainring itself")
                continue
            other, other_row = place_of(module)
            if other != package and other_row <= row:
                wrong.append(f"{own} imports {module}")
    assert not wrong


def private_names_of(tree):
    """The private names that a file defines, as functions, classes, variables or attributes of its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def is_own(value):
    """True for ``self`` and ``super()``, whose class may have inherited a private name."""
    return ast.unparse(value) in ("self", "cls", "super()")


def test_private_names_stay_in_their_file():
    """No file imports a name that begins with an underscore from another, or reads such an attribute of its objects."""
    defined = {path: {name for name in private_names_of(tree) if re.match("_[^_]", name)} for path, tree in trees().items()}
    ours = set().union(*defined.values()) - set(dir(nn.Module()))
    wrong = []
    for path, tree in trees().items():
        taken = [name for _, name in imports_of(tree) if name and re.match("_[^_]", name)]
        read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & ours - defined[path]
        inherited = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_own(node.value)}
        wrong += [f"{parts_of(path)}: {name}" for name in {*taken, *read - inherited}]
    assert not wrong


def test_a_function_is_one_story():
    """It has at most 60 lines without its docstring."""
    long = []
    for path in FILES:
        for node in ast.walk(trees()[path]):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = ast.get_docstring(node, clean=False)
                length = node.end_lineno - node.lineno + 1 - (docstring.count("\n") + 1 if docstring else 0)
                if length > LONGEST_FUNCTION:
                    long.append(f"{parts_of(path)}: {node.name} has {length} lines")
    assert not long


KNOWS_ITS_HOLDERS = "training.updaters."
"""A package in which an object, the update under way, names for annotations alone those that pass it on."""


def test_no_imports_go_round():
    """Not through functions either, nor for annotations alone."""
    imports = {}
    for path in FILES:
        module = parts_of(path)
        known = imports_of(trees()[path], annotations=not module.startswith(KNOWS_ITS_HOLDERS))
        imports[module] = {imported for imported, _ in known}
    while ends := {module for module, imported in imports.items() if not imported & imports.keys()}:
        imports = {module: imported for module, imported in imports.items() if module not in ends}
    assert not imports


TRAINING = """
import sys
import torch
from chainring import datasets, iterators, training
from chainring.nn import Classifier
from chainring.training import extensions
for epochs in 1, 2:  # the second continues the first
    model = Classifier(torch.nn.Linear(4, 3))
    data = datasets.TupleDataset(torch.zeros(8, 4), torch.arange(8) % 3)
    updater = training.StandardUpdater(iterators.SerialIterator(data, 4), torch.optim.Adam(model.parameters()), model)
    trainer = training.Trainer(updater, (epochs, "epoch"), out=sys.argv[1])
    trainer.extend(extensions.Evaluator(iterators.SerialIterator(data, 4, repeat=False, shuffle=False), model))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.snapshot(autoload=True))
    trainer.run()
assert trainer.is_resumed
print(*sys.modules)
"""
DOORS = {
    "_places.remote": {"training._run", "training._run_directory", "serializers._store"},
    "serializers.foreign": {"serializers._loading"},
    "training.updaters._virtual": {"training.updaters.standard"},
    "_distributed.launchers": {"parallel", "training._run"},
    "_distributed.process_group": {"_distributed.launchers", "_distributed.survival"},
    "_distributed.survival": {"_distributed.launchers"},
    "html_report": {"cli.report"},
    "testing": set(),
    "_runs": set(),
}
"""Wings of the house, each with the modules that hold its door; the commands and the tools may open all of them."""


def test_a_wing_is_entered_by_its_door():
    """A reader of the loop opens no wing, and a run that needs none imports none."""
    strangers, doors = [], {(wing, holder) for wing, holders in DOORS.items() for holder in holders}
    unused = doors | {(wing, wing) for wing in DOORS}
    for path in FILES:
        own = parts_of(path)
        unused.discard((own, own))
        for module, name in imports_of(trees()[path], annotations=False):
            for wing in DOORS:
                is_inside = f"{own}.".startswith(f"{wing}.") or f"{own}.".startswith(("cli.", "testing.", "html_report."))
                if f"{module}.".startswith(f"{wing}."):
                    unused.discard((wing, own))
                    if not is_inside and (wing, own) not in doors:
                        strangers.append(f"{own} imports {module}: {name}")
    assert not strangers
    assert not unused, "no such wing, or a door that nobody uses"


def test_a_run_without_a_wing_imports_none(tmp_path):
    """One process, directories of its own files, no virtual ranks, no checkpoint of another library."""
    ended = subprocess.run([sys.executable, "-c", TRAINING, tmp_path / "result"], capture_output=True, text=True, check=True)
    wings = {name for name in ended.stdout.split() if any(f"{name}.".startswith(f"chainring.{wing}.") for wing in DOORS)}
    assert not wings


def test_a_class_has_one_subject():
    """It has at most 25 methods and sets at most 15 attributes of its objects."""
    large = []
    for path in FILES:
        for node in ast.walk(trees()[path]):
            if isinstance(node, ast.ClassDef):
                methods = [child for child in node.body if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))]
                stored = [child for child in ast.walk(node) if isinstance(child, ast.Attribute) and is_own(child.value)]
                attributes = {child.attr for child in stored if isinstance(child.ctx, ast.Store)}
                if len(methods) > 25 or len(attributes) > 15:
                    large.append(f"{parts_of(path)}: {node.name}")
    assert not large


def test_a_walk_has_a_length():
    """No event of a run takes a reader through more files or functions than its limit, which contributors read."""
    counted = forked.run([ROOT / "benchmarks" / "trace_files.py"])
    assert counted.returncode == 0, counted.stdout + counted.stderr
    limits = re.findall(r"^(.*?) +\d+ +\d+ +(\d+)/(\d+)$", counted.stdout, re.MULTILINE)
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(limits) == 4
    for row in limits:
        assert "| {} | {} | {} |".format(*row) in page

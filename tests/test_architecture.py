"""The house keeps its shape: imports point down, what decides does not import torch, files and functions stay small."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "chainring"
FILES = sorted(SOURCE.rglob("*.py"))

# The first prefix that fits says the layer of a module. An import points to a lower layer, or stays in its folder.
LAYERS = [
    ("chainring._version", 0), ("chainring.progress", 0), ("chainring.notices", -1), ("chainring.names", -1),
    ("chainring.order", 0), ("chainring.columns", 0), ("chainring.files", 0), ("chainring.plain", 0),
    ("chainring.environment", 0.1), ("chainring.communicator", -1),
    ("chainring.sharding", -1),
    ("chainring.serializers.base", 0), ("chainring.serializers.dictionary", 0.1), ("chainring.serializers.lock", 0.1),
    ("chainring.serializers.manifest", 0.1), ("chainring.serializers.store", 0.2),
    ("chainring.serializers.stateful", 0.2), ("chainring.metrics", 0.2), ("chainring.summary", 0.3),
    ("chainring.blocks", 0.2), ("chainring.merging", 0.4),
    ("chainring.reporter", 1), ("chainring.generators", 1), ("chainring.training.updaters._optimizer_state", 1),
    ("chainring.writers.base", 2), ("chainring.iterators.base", 2), ("chainring.training.triggers", 2),
    ("chainring.training.updaters.base", 2), ("chainring.training.updaters.callbacks", 2),
    ("chainring.training._loss", 2), ("chainring.training.extension", 2.1), ("chainring.training._directory", 2.2),
    ("chainring.training._record", 2.2), ("chainring.training._signals", 2.2),
    ("chainring.training._plan", 3), ("chainring.training._state", 3),
    ("chainring.training._start", 3), ("chainring.training._session", 3.05), ("chainring.training.trainer", 3.1),
    ("chainring.datasets.digits", 4.1), ("chainring.datasets.mnist", 4.1), ("chainring.datasets", 4),
    ("chainring.serializers.saving", 4.1), ("chainring.serializers.seal", 4.02),
    ("chainring.serializers.shards", 4.05), ("chainring.serializers.ranks", 4.05),
    ("chainring.serializers.npz", 4.1), ("chainring.serializers.background", 4.1),
    ("chainring.iterators.multiprocess", 4.1), ("chainring.iterators._work", 4.1), ("chainring.iterators._workers", 4.1),
    ("chainring.iterators.device_prefetcher", 4.1),
    ("chainring.iterators", 4), ("chainring.converters", 4), ("chainring.nn", 4), ("chainring.serializers", 4),
    ("chainring.parallel.data_parallel", 4.2), ("chainring.parallel.scatter", 4.1),
    ("chainring.parallel.process_group", 4.1),
    ("chainring.parallel", 4), ("chainring.writers", 4), ("chainring.training.updaters.parallel", 4.3),
    ("chainring.training.updaters", 4.2),
    ("chainring.training.extensions", 4.2), ("chainring.training", 5), ("chainring.testing", 5),
    ("chainring.html_report", 5), ("chainring.cli", 5.1),
    ("chainring.__main__", 5.2), ("chainring", 5),
]  # fmt: skip
DECIDES = ["progress.py", "reporter.py", "names.py", "training/trainer.py", "training/extension.py", "training/triggers"]


def module_of(path):
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module):
    return next(layer for prefix, layer in LAYERS if module == prefix or module.startswith(prefix + "."))


def imports_of(path):
    """The modules that a file imports when it runs; those under TYPE_CHECKING are for annotations only."""
    found = []

    def visit(node):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = SOURCE.parent / Path(*node.module.split("."), alias.name)
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                found.append(f"{node.module}.{alias.name}" if is_module else node.module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_down(path):
    """A module imports modules of lower layers, or of its own folder there only `base` and private helpers."""
    own = module_of(path)
    folder = own if path.name == "__init__.py" else own.rpartition(".")[0]
    for module in imports_of(path):
        if not module.startswith("chainring"):
            continue
        name = module.rpartition(".")[2]
        in_folder = module.rpartition(".")[0] == folder
        helper = in_folder and (name == "base" or name.startswith("_") or path.name == "__init__.py")
        is_door = path.name.startswith("_get_") and in_folder  # the one place where spellings become objects
        assert helper or is_door or layer_of(module) < layer_of(own), f"{own} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_what_decides_does_not_import_torch(path):
    """Trainer, triggers, reporter and progress decide by plain numbers; only what computes imports torch."""
    relative = path.relative_to(SOURCE).as_posix()
    if any(relative == place or relative.startswith(place + "/") for place in DECIDES):
        assert not any(module == "torch" or module.startswith("torch.") for module in imports_of(path))


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_files_and_functions_stay_small(path):
    """A file is under 300 lines, a function under 40 without its docstring."""
    text = path.read_text()
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node, clean=False)
            length = node.end_lineno - node.lineno + 1 - (docstring.count("\n") + 1 if docstring else 0)
            assert length <= 40, f"{node.name} has {length} lines"

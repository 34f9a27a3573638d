"""What users import: one public path for each name, sorted, documented."""

import ast
import importlib
import inspect
import itertools
import pkgutil
import subprocess
import sys
import textwrap

import chainring

PACKAGES = ["chainring"] + [
    f"chainring.{name}" for name in (
        "converters", "datasets", "iterators", "nn", "parallel", "serializers", "testing", "training",
        "training.extensions", "training.triggers", "writers",
    )
]  # fmt: skip


def public_names(package):
    module = importlib.import_module(package)
    return [(name, getattr(module, name)) for name in getattr(module, "__all__", [])]


def test_all_lists_names_that_exist_sorted():
    """`__all__` of each package is sorted, capitals first, and every name in it can be imported."""
    unsorted = []
    for package in PACKAGES:
        names = [name for name, _ in public_names(package)]
        if names != sorted(names):
            unsorted.append(package)
    assert not unsorted


def test_everything_public_is_documented():
    """Every public class, function and method says what it does, itself or through what it overrides."""
    undocumented = []
    for package in PACKAGES:
        for name, thing in public_names(package):
            if not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            members = {f"{package}.{name}": thing}
            if inspect.isclass(thing):
                for method, function in inspect.getmembers(thing, inspect.isfunction):
                    if not method.startswith("_") and function.__module__.startswith("chainring"):
                        members[f"{package}.{name}.{method}"] = getattr(thing, method)
            undocumented += [path for path, member in members.items() if not inspect.getdoc(member)]
    assert not undocumented


def test_every_public_class_has_an_example():
    """After the heading ``Example::`` of its docstring, in lines that Python can parse."""
    without = []
    for package in PACKAGES:
        for name, thing in public_names(package):
            if inspect.isclass(thing):
                lines = (inspect.getdoc(thing) or "").partition("Example::\n\n")[2].splitlines()
                code = textwrap.dedent("\n".join(itertools.takewhile(lambda line: not line or line[0] == " ", lines)))
                if not (code and ast.parse(code)):
                    without.append(f"{package}.{name}")
    assert not without


def test_importing_a_module_has_no_effect_on_the_world():
    """No module prints, starts a thread or draws a random number when it is imported."""
    modules = [info.name for info in pkgutil.walk_packages(chainring.__path__, "chainring.")]
    program = (
        "import importlib, random, threading, numpy, torch\n"
        "before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()\n"
        f"[importlib.import_module(name) for name in {modules!r}]\n"
        "after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()\n"
        "assert before == after and threading.active_count() == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

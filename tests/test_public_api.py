"""What users import: one public path for each name, sorted, documented."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("package", PACKAGES)
def test_all_lists_names_that_exist_sorted(package):
    """`__all__` of each package is sorted, capitals first, and every name in it can be imported."""
    names = [name for name, _ in public_names(package)]
    assert names == sorted(names)


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_public_is_documented(package):
    """Every public class, function and method says what it does, itself or through what it overrides."""
    for name, thing in public_names(package):
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        assert inspect.getdoc(thing), f"{package}.{name}"
        if inspect.isclass(thing):
            for method, function in inspect.getmembers(thing, inspect.isfunction):
                if not method.startswith("_") and function.__module__.startswith("chainring"):
                    assert inspect.getdoc(getattr(thing, method)), f"{package}.{name}.{method}"


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

"""Names of other libraries are answered by what to write here, and a missing name stays a missing name."""

import copy
import importlib
import inspect
import re
import subprocess
import sys

import pytest
import torch
from toys import updater_of

import chainring
from chainring import _hints, iterators, parallel, serializers, training, writers
from chainring.training import extensions, triggers

HINTS = {
    **{f"Trainer.{name}": hint for name, hint in _hints.TRAINER.items()},
    **{f"Trainer({name}=)": hint for name, hint in _hints.TRAINER_KEYWORDS.items()},
    **{f"StandardUpdater({name}=)": hint for name, hint in _hints.UPDATER_KEYWORDS.items()},
    **_hints.NAMES,
}
KNOWN = {
    "chainring": chainring, "extensions": extensions, "triggers": triggers, "training": training, "torch": torch,
    "iterators": iterators, "serializers": serializers, "writers": writers, "parallel": parallel,
}  # fmt: skip


@pytest.fixture
def trainer(tmp_path):
    return training.Trainer(updater_of(), (1, "epoch"), str(tmp_path))


@pytest.mark.parametrize("name", HINTS)
def test_what_a_hint_names_is_there(name):
    """Every dotted name of ours or of torch's in it can be looked up."""
    for module in ("torch.optim.lr_scheduler", "chainring.nn", "chainring.converters"):
        importlib.import_module(module)
    for dotted in re.findall(r"\b((?:chainring|extensions|triggers|torch)(?:\.\w+)+)", HINTS[name]):
        first, *rest = dotted.split(".")
        found = KNOWN[first]
        for part in rest:
            found = getattr(found, part)


@pytest.mark.parametrize("name", _hints.TRAINER)
def test_a_trainer_of_another_library_is_answered(trainer, name):
    """As an AttributeError; the trainer has none of these names."""
    with pytest.raises(AttributeError, match=re.escape(_hints.TRAINER[name])):
        getattr(trainer, name)
    assert not hasattr(trainer, name)
    assert name not in dir(trainer)


def test_any_other_name_is_missing_as_ever(trainer):
    """So that Python finds the nearest; copies and pickles ask for names too."""
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'extent'") as caught:
        trainer.extent  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("extent", trainer)
    assert not hasattr(trainer, "__fspath__")
    assert copy.copy(trainer).updater is trainer.updater


def test_the_error_of_a_property_is_its_own(trainer):
    """And not that of the missing name."""

    class Bare:
        update = None

    trainer.updater = Bare()
    with pytest.raises(AttributeError, match="'Bare' object has no attribute 'comm'"):
        trainer.comm  # noqa: B018


@pytest.mark.parametrize("name", _hints.TRAINER_KEYWORDS)
def test_a_keyword_of_another_trainer_is_answered(name):
    """As a TypeError; it is no argument here, and the signature is as written."""
    assert name not in inspect.signature(training.Trainer).parameters
    with pytest.raises(TypeError, match=re.escape(f"Trainer() has no argument {name!r}: {_hints.TRAINER_KEYWORDS[name]}")):
        training.Trainer(updater_of(), **{name: 1})


@pytest.mark.parametrize("name", _hints.UPDATER_KEYWORDS)
def test_a_keyword_of_another_updater_is_answered(name):
    """The same."""
    assert name not in inspect.signature(training.StandardUpdater).parameters
    with pytest.raises(TypeError, match=re.escape(_hints.UPDATER_KEYWORDS[name])):
        training.StandardUpdater(None, None, None, **{name: 1})


@pytest.mark.parametrize("name", _hints.LEARNING_RATES)
def test_a_keyword_of_another_learning_rate_finder_is_answered(trainer, name):
    """The same, of a function."""
    assert name not in inspect.signature(extensions.find_learning_rate).parameters
    words = f"find_learning_rate() has no argument {name!r}: {_hints.LEARNING_RATES[name]}"
    with pytest.raises(TypeError, match=re.escape(words)):
        extensions.find_learning_rate(trainer, **{name: 1})


def test_an_argument_that_is_given_twice_is_answered_by_the_order_of_all(trainer):
    """Whatever was given in its place is shown, in short."""
    with pytest.raises(TypeError) as caught:
        training.StandardUpdater(*range(3), model=[9] * 99)
    rule = "StandardUpdater() takes iterator, optimizer, model in this order"
    assert str(caught.value) == f"{rule}; 2 has the place of 'model', which is given by its name too"
    with pytest.raises(
        TypeError, match=r"^Trainer\.extend\(\) takes extension, name, .* has the place of 'name', which"
    ) as caught:
        trainer.extend(print, "n" * 999, name="n")
    assert len(str(caught.value)) < 300


def test_a_keyword_that_nobody_has_is_unexpected_as_ever():
    """By Python's own words."""
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'nonsense'"):
        updater_of(nonsense=1)


def test_a_subclass_may_take_any_keyword(tmp_path):
    """Only what it passes on is looked at."""

    class Timed(training.Trainer):
        def __init__(self, updater, max_epochs, **settings):
            super().__init__(updater, (max_epochs, "epoch"), **settings)

    Timed(updater_of(), max_epochs=1, out=str(tmp_path))
    with pytest.raises(TypeError, match="has no argument 'callbacks'"):
        Timed(updater_of(), max_epochs=1, callbacks=[])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (module.__name__, name)
        for module in (chainring, training, extensions, iterators)
        for name in _hints.NAMES
        if name not in module.__all__
    ],
)
def test_a_name_of_another_library_is_answered_by_a_module(module, name):
    """As an AttributeError of the module, and as an ImportError of ``from module import name``."""
    hint = _hints.NAMES[name]
    with pytest.raises(AttributeError, match=re.escape(hint)):
        getattr(importlib.import_module(module), name)
    with pytest.raises(ImportError, match=re.escape(hint)):
        exec(f"from {module} import {name}")
    assert not hasattr(importlib.import_module(module), name)


def test_any_other_name_of_a_module_is_missing_as_ever():
    """So that Python finds the nearest."""
    with pytest.raises(AttributeError, match="has no attribute 'Evalutor'") as caught:
        extensions.Evalutor  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("Evalutor", extensions)
    with pytest.raises(ImportError, match="cannot import name 'Evalutor' from"):
        exec("from chainring.training.extensions import Evalutor")


@pytest.mark.parametrize("given", ["bf16-mixed", "16-mixed", "fp16-mixed", 16, torch.bfloat16, torch.float16])
def test_a_precision_of_another_library_is_answered(given):
    """By the name that it has here."""
    with pytest.raises(ValueError, match='use "bf16"'):
        updater_of(precision=given)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 1),
            "extensions.LRScheduler",
        ),
        (lambda: writers.CsvWriter(), r"extensions.LogReport\(writers="),
        (lambda: None, r"write extend\(f\)"),
        (lambda: triggers.EarlyStoppingTrigger(), "is a trigger: give it as the stop trigger"),
        (lambda: 3, "got int$"),
    ],
)
def test_what_is_not_an_extension_is_refused_with_the_way_to_use_it(trainer, make, words):
    """A scheduler, a writer, the result of a function, a trigger."""
    with pytest.raises(TypeError, match=words):
        trainer.extend(make())


def test_every_public_module_is_there_after_importing_the_package():
    """Each is imported when it is first named, and not before."""
    program = (
        "import sys, chainring\n"
        "assert not {name for name in sys.modules if name.startswith('chainring.training')}\n"
        f"for module, names in {_hints.SUBMODULES!r}.items():\n"
        "    for name in names:\n"
        "        assert getattr(sys.modules[module], name).__name__ == f'{module}.{name}'\n"
        "chainring.training.Trainer, chainring.training.extensions.snapshot, chainring.training.triggers.any_of\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("call", "nearest"),
    [
        (lambda: extensions.snapshot(n_retain=3), "n_retains"),
        (lambda: training.StandardUpdater(None, {}, {}, loss_fun=len), "loss_func"),
        (lambda: training.Trainer(None, output="result"), "out"),
    ],
)
def test_misspelled_argument_is_answered_by_the_nearest(call, nearest):
    """As a misspelled name is by Python."""
    with pytest.raises(TypeError, match=f"has no argument .*: did you mean '{nearest}'"):
        call()

"""What a callable carries with it is known in every form that Python has."""

import functools

import pytest

from chainring._callables import is_taken_apart, references


class Carried:
    """What each form carries."""

    def method(self, trainer):
        return trainer

    @classmethod
    def of_the_class(cls, trainer):
        return trainer


THIS = Carried()  # a global, as in most scripts


def logged(function):
    """A decorator that keeps the name of what it decorates."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


def bare(function):
    """A decorator that does not."""

    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


class Decorated:
    """A decorator that is a class."""

    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __call__(self, *args):
        return self.__wrapped__(*args)


def with_attribute(trainer):
    return trainer


with_attribute.state = THIS


def in_closure():
    this = THIS

    def function(trainer):
        return this.method(trainer)

    return function


FORMS = {
    "a closure": in_closure(),
    "a lambda with a global": lambda trainer: THIS.method(trainer),
    "a global in a comprehension": lambda trainer: [THIS.method(item) for item in trainer],
    "a global in an inner function": lambda trainer: (lambda: THIS)(),
    "a partial by position": functools.partial(Carried.method, THIS),
    "a partial by name": functools.partial(Carried.method, self=THIS),
    "a partial of a partial": functools.partial(functools.partial(Carried.method, THIS)),
    "a partial method": functools.partialmethod(Carried.method, THIS),
    "a bound method": THIS.method,
    "a bound method of C": [THIS].append,
    "a default": lambda trainer, this=THIS: this,
    "a default by name": lambda trainer, *, this=THIS: this,
    "an attribute": with_attribute,
    "a decorated function": logged(in_closure()),
    "a decorated function without its name": bare(in_closure()),
    "an object that decorates": Decorated(in_closure()),
    "a cached function": functools.cache(in_closure()),
    "a function of a single dispatch": functools.singledispatch(in_closure()),
    "a static method": staticmethod(in_closure()),
    "a partial of a decorated method": functools.partial(logged(THIS.method)),
}


def reached(callable_, depth=0):
    """All objects that are reached, callables and lists being taken apart."""
    for kind, name, value in references(callable_):
        assert isinstance(kind, str), name
        yield value
        yield from value if isinstance(value, list) else ()
        if is_taken_apart(value) and depth < 6:
            yield from reached(value, depth + 1)


@pytest.mark.parametrize("form", FORMS)
def test_what_it_carries_is_reached(form):
    """Through as many callables as there are around it."""
    assert is_taken_apart(FORMS[form])
    assert any(value is THIS for value in reached(FORMS[form]))


@pytest.mark.parametrize("form", [print, len, Carried.of_the_class, lambda trainer: trainer.THIS, functools.partial])
def test_what_it_does_not_carry_is_not(form):
    """A module, a class, or a global of the name of an attribute that is read."""
    assert all(value is not THIS for value in reached(form))


def test_names_are_the_same_in_every_process():
    """Variables by name, arguments by position or name."""
    function = functools.partial(lambda trainer, first, scale, default=2: THIS, 7, scale=1)
    assert [tuple(reference[:2]) for reference in references(function)] == [
        ("function", ""), ("argument", "0"), ("argument", "scale")
    ]  # fmt: skip
    assert [(kind, name) for kind, name, _ in references(function.func)] == [("variable", "THIS"), ("default", "default")]

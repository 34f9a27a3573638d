"""Updater: what a subclass must write, and what it gets."""

import pytest
import torch
from torch import nn

from chainring.iterators import SerialIterator
from chainring.serializers import DictionarySerializer
from chainring.training import Trainer, Updater


class Counting(Updater):
    """Nothing but an update_core, and no constructor call."""

    def __init__(self):
        self.seen = []

    def update_core(self):
        self.seen.append(self.iteration)


class WithParts(Updater):
    def __init__(self):
        self.iterator = SerialIterator(list(range(5)), 2, shuffle=False)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.parts = {"main": (self.iterator, self.model, self.optimizer)}

    def get_iterator(self, name):
        return self.parts[name][0]

    def get_model(self, name):
        return self.parts[name][1]

    def get_optimizer(self, name):
        return self.parts[name][2]

    def update_core(self):
        next(self.iterator)


def test_an_updater_needs_no_constructor_of_its_base():
    """State has defaults on the class: iteration 0, no epochs, a world of one."""
    updater = Counting()
    assert (updater.iteration, updater.epoch, updater.epoch_detail) == (0, 0, 0.0)
    assert (updater.previous_epoch_detail, updater.is_new_epoch, updater.comm.size) == (None, False, 1)


def test_iteration_inside_update_core_is_the_number_of_completed_updates():
    """The count goes up after update_core."""
    updater = Counting()
    for _ in range(3):
        updater.update()
    assert updater.seen == [0, 1, 2]
    assert updater.iteration == 3


def test_a_failing_update_core_is_not_counted():
    """An error leaves iteration as it was."""
    updater = Counting()
    updater.seen = None
    with pytest.raises(AttributeError):
        updater.update()
    assert updater.iteration == 0


def test_an_updater_without_update_core_says_what_to_write():
    """The rule is in the error."""
    with pytest.raises(NotImplementedError, match=r"Updater must define update_core\(\)"):
        Updater().update()


def test_the_whole_update_may_be_written_instead_of_update_core():
    """An updater that counts for itself is taken at its word."""

    class Whole(Updater):
        def update(self):
            self.iteration += 2

    updater = Whole()
    updater.update()
    assert updater.iteration == 2


def test_epochs_are_those_of_the_main_iterator():
    """epoch, epoch_detail, previous_epoch_detail and is_new_epoch follow get_iterator("main")."""
    updater = WithParts()
    seen = []
    for _ in range(3):
        updater.update()
        seen.append((updater.epoch, updater.epoch_detail, updater.previous_epoch_detail, updater.is_new_epoch))
    assert seen == [(0, 0.4, 0.0, False), (0, 0.8, 0.4, False), (1, 1.2, 0.8, True)]


def test_an_updater_may_count_its_own_epochs():
    """The attributes can be set on the object as any others."""
    updater = Counting()
    updater.epoch, updater.epoch_detail = 3, 3.5
    assert (updater.epoch, updater.epoch_detail, updater.counts_epochs) == (3, 3.5, True)


@pytest.mark.parametrize(("kind", "counts"), [(Counting, False), (WithParts, True)])
def test_whether_epochs_are_counted_is_known(kind, counts):
    """Without a main iterator and without an epoch of its own there is nothing to count by."""
    assert kind().counts_epochs is counts


@pytest.mark.parametrize("what", ["iterator", "model", "optimizer"])
def test_an_updater_without_a_part_says_so(what):
    """The lookup of what is not there names it."""
    with pytest.raises(KeyError, match=f"Counting has no {what} 'main'"):
        getattr(Counting(), f"get_{what}")("main")


def test_all_parts_are_found_from_the_single_getters():
    """get_all_* give the main ones by default, and nothing where there is none."""
    updater, empty = WithParts(), Counting()
    assert updater.get_all_iterators() == {"main": updater.iterator}
    assert updater.get_all_models() == {"main": updater.model}
    assert updater.get_all_optimizers() == {"main": updater.optimizer}
    assert (empty.get_all_iterators(), empty.get_all_models(), empty.get_all_optimizers()) == ({}, {}, {})


def test_saved_keys_are_iteration_and_the_parts_by_name():
    """The paths are those that other programs look up."""
    saver = DictionarySerializer()
    WithParts().serialize(saver["updater"])
    paths = set(saver.target)
    assert {"updater/iteration", "updater/model:main/weight", "updater/model:main/bias"} <= paths
    assert {path.split("/")[1] for path in paths} == {"iteration", "iterator:main", "model:main", "optimizer:main"}


def test_state_goes_round():
    """state_dict and load_state_dict are made from serialize; a fresh updater stands where the saved one stood."""
    updater, fresh = WithParts(), WithParts()
    for _ in range(3):
        updater.update()
    fresh.load_state_dict(updater.state_dict())
    assert (fresh.iteration, fresh.epoch_detail) == (3, 1.2)
    assert torch.equal(fresh.model.weight, updater.model.weight)
    assert list(next(fresh.iterator)) == list(next(updater.iterator))


def test_connect_trainer_is_called_at_the_end_of_the_trainers_construction(tmp_path):
    """The trainer that is handed over is complete: its extensions are registered."""
    found = []

    class Connected(Counting):
        def connect_trainer(self, trainer):
            found.append(trainer.get_extension("note"))

    def note(trainer):
        pass

    Trainer(Connected(), (1, "iteration"), tmp_path, extensions=[note])
    assert found == [note]


def test_finalize_finalizes_every_iterator():
    """What an iterator holds is let go."""
    updater, calls = WithParts(), []
    updater.iterator.finalize = lambda: calls.append("finalized")
    updater.finalize()
    assert calls == ["finalized"]

"""check_iterator finds each defect that an iterator can have, and passes one that has none."""

import numpy as np
import pytest

from chainring.iterators import Batch, Iterator, SerialIterator, epoch_order
from chainring.serializers import Serializer
from chainring.testing import check_iterator

SIZE = 6


class Sound(Iterator):
    """As it should be: three pairs an epoch, in an order of their own."""

    batch_size = 2
    at = 0

    def __init__(self, repeat=True):
        self.repeat = repeat

    def __next__(self):
        epoch, start = divmod(self.at, SIZE)
        if epoch and not self.repeat:
            raise StopIteration
        examples = self.examples(epoch)[start : start + 2]
        self.stand_at(self.at + 2)
        return Batch(examples)[self.rank :: self.size]

    def examples(self, epoch):
        return epoch_order(7, epoch, SIZE).tolist()

    def stand_at(self, at):
        self.at = at
        self.previous_epoch_detail = (at - 2) / SIZE if at else None
        self.epoch_detail = at / SIZE
        self.epoch, self.is_new_epoch = at // SIZE, at > 0 and at % SIZE == 0

    def reset(self):
        self.stand_at(0)

    def serialize(self, serializer):
        self.stand_at(serializer("at", self.at))


class SavesNothing(Sound):
    def serialize(self, serializer):
        pass


class HasNoState(Sound):
    serialize = None
    state_dict = None


class SavesAPosition(Sound):
    """Without the epoch: it is right in the first."""

    def serialize(self, serializer):
        self.stand_at(serializer("at", self.at % SIZE))


class LosesTheOrder(Sound):
    """Counts as before, and begins another order."""

    seed = 0

    def examples(self, epoch):
        return epoch_order(self.seed, epoch, SIZE).tolist()

    def __next__(self):
        self.seed += self.at == 2
        return super().__next__()


class LosesTheCounts(Sound):
    def serialize(self, serializer):
        self.at = serializer("at", self.at)


class SavesTheNext(Sound):
    """What it has fetched ahead, and not what it has returned."""

    def serialize(self, serializer):
        self.stand_at(serializer("at", self.at + 2) if isinstance(serializer, Serializer) else serializer("at", 0))


class DrawsGlobally(Sound):
    def examples(self, epoch):
        return np.random.permutation(SIZE).tolist()


class SeedsGlobally(Sound):
    def examples(self, epoch):
        np.random.seed(epoch)
        return np.random.permutation(SIZE).tolist()


class FollowsGlobally(Sound):
    """Reads the state of a global generator, and leaves it."""

    def examples(self, epoch):
        return (np.arange(SIZE) + np.random.get_state(legacy=False)["state"]["pos"]).tolist()


class CountsLate(Sound):
    def stand_at(self, at):
        super().stand_at(at)
        self.epoch = max(at - 2, 0) // SIZE


class CountsUnevenly(Sound):
    """Before each batch it is where it was, but the way is not even."""

    def stand_at(self, at):
        super().stand_at(at)
        self.epoch_detail = self.epoch + (at % SIZE / SIZE) ** 2
        before = max(at - 2, 0)
        self.previous_epoch_detail = before // SIZE + (before % SIZE / SIZE) ** 2 if at else None


class ForgetsBefore(Sound):
    def stand_at(self, at):
        super().stand_at(at)
        self.previous_epoch_detail = None


class AlwaysNew(Sound):
    def stand_at(self, at):
        super().stand_at(at)
        self.is_new_epoch = at > 0


class BeginsByItself(Sound):
    """At its end it raises once, and then begins again."""

    def __next__(self):
        if self.at == SIZE:
            self.reset()
            raise StopIteration
        return super().__next__()


class CannotReset(Sound):
    def reset(self):
        self.at = 0


class EndsOnce(Sound):
    is_open = True

    def finalize(self):
        if not self.is_open:
            raise RuntimeError("not open")
        self.is_open = False


class GivesAllToEach(Sound):
    def __next__(self):
        self.rank, self.size = 0, 1
        return super().__next__()


class CountsForItself(Sound):
    """Each rank counts only its own examples."""

    def __next__(self):
        if self.size == 1:
            return super().__next__()
        batch = super().__next__()
        self.epoch_detail /= self.size
        return batch


class GivesAGenerator(Sound):
    def __next__(self):
        return (one for one in super().__next__())


class NeverReachesItsEpoch(Sound):
    def stand_at(self, at):
        super().stand_at(at)
        self.epoch, self.is_new_epoch, self.epoch_detail = 0, False, 0.0


class GoesBackTooFar(Sound):
    def mark(self):
        return self.at

    def return_to(self, mark):
        self.stand_at(max(mark - 2, 0))


class KeepsInTheClass(Sound):
    made = 0

    def __init__(self, repeat=True):
        super().__init__(repeat)
        type(self).made += 1

    def examples(self, epoch):
        return epoch_order(self.made, epoch, SIZE).tolist()


class EndsAfterLoading(Sound):
    is_loaded = False

    def __next__(self):
        if self.is_loaded:
            raise StopIteration
        return super().__next__()

    def serialize(self, serializer):
        super().serialize(serializer)
        self.is_loaded = self.is_loaded or not isinstance(serializer, Serializer)


class GoesOnAfterLoading(Sound):
    def serialize(self, serializer):
        super().serialize(serializer)
        self.repeat = not isinstance(serializer, Serializer)


class EndsAfterReset(Sound):
    def reset(self):
        super().reset()
        self.__class__ = EndsAfterLoading
        self.is_loaded = True


class BeginsAtAnEpoch(Sound):
    is_new_epoch = True


def test_a_sound_iterator_passes():
    """Of one's own, with and without repetition, and one that crosses epochs."""
    check_iterator(Sound)
    check_iterator(lambda: Sound(repeat=False))
    check_iterator(lambda: SerialIterator(list(range(7)), 3))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (SavesNothing, r"loads the state after 1 batches .*counts as before: epoch_detail was 0.3.*, is 0.0.*serialize"),
        (HasNoState, r"the state after 0 batches can be saved: TypeError"),
        (SavesAPosition, r"saving after every batch does not change the batches; in batch 3"),
        (LosesTheOrder, r"the state after 2 batches continues with the next; in batch 0 |after 3 batches continues"),
        (LosesTheCounts, r"state after 1 batches .*counts as before: epoch_detail was"),
        (SavesTheNext, r"saving after every batch does not change the batches"),
        (DrawsGlobally, r"global random generators are in the same state after a batch .*batch 0 moves them"),
        (SeedsGlobally, r"global random generators are in the same state after a batch"),
        (FollowsGlobally, r"numbers drawn elsewhere from global generators do not change"),
        (CountsLate, r"epoch is epoch_detail without its fraction.*in batch 2"),
        (CountsUnevenly, r"epoch_detail grows by the share"),
        (ForgetsBefore, r"previous_epoch_detail is epoch_detail before the batch.*in batch 0"),
        (AlwaysNew, r"is_new_epoch says that the batch has ended an epoch.*in batch 0"),
        (lambda: BeginsByItself(repeat=False), r"raises StopIteration until reset\(\)|is at its end after loading"),
        (CannotReset, r"reset\(\) counts epochs from 0 again"),
        (EndsOnce, r"finalize\(\) may be called at any time.*not open"),
        (GivesAllToEach, r"rank 0 of 2 gets batch\[0::2\].*examples was 1, is 2"),
        (CountsForItself, r"rank 0 of 2 .*epoch_detail was"),
        (GivesAGenerator, r"a batch is a sequence of examples: generator"),
        (NeverReachesItsEpoch, r"two epochs have fewer than 50 batches"),
        (GoesBackTooFar, r"after return_to\(mark\) of a mark after 1 batches they come again"),
        (KeepsInTheClass, r"an iterator created again returns the same batches"),
        (EndsAfterLoading, r"loads the state after 0 batches continues with the next: 0 batches are left instead of 6"),
        (lambda: GoesOnAfterLoading(repeat=False), r"saved at its end is at its end after loading"),
        (EndsAfterReset, r"after reset\(\) there are as many batches as before: 0 batches instead of 6"),
        (BeginsAtAnEpoch, r"before its first batch an iterator counts 0, 0\.0, None, False: \(0, 0\.0, None, True\)"),
        (lambda: [[1], [2]], r"it lacks \['epoch', .*LoaderIterator"),
    ],
)
def test_a_broken_one_does_not(broken, said):
    """The rule, what was found, and what to do."""
    with pytest.raises(AssertionError, match=f"(?s){said}"):
        check_iterator(broken)

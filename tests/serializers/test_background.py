"""The copy of the state that is kept while the training goes on, and the thread that writes it."""

import threading

import pytest
import torch

from chainring.serializers._saving import BackgroundWriter, StagingBuffers


def place(tensor):
    return tensor.untyped_storage().data_ptr()


def same(ours, theirs):
    return ours.dtype == theirs.dtype and ours.stride() == theirs.stride() and torch.equal(ours, theirs)


def test_a_copy_does_not_follow_the_original():
    """Nor does it need a gradient."""
    tensor = torch.ones(3, requires_grad=True)
    copies = StagingBuffers().copy({"a": tensor})
    with torch.no_grad():
        tensor.zero_()
    assert copies["a"].tolist() == [1, 1, 1]
    assert not copies["a"].requires_grad


def test_memory_is_used_again():
    """The second copy lies where the first did, with the values of then."""
    staging, tensor = StagingBuffers(), torch.arange(4.0)
    first = place(staging.copy({"a": tensor})["a"])
    second = staging.copy({"a": tensor + 1})["a"]
    assert place(second) == first
    assert second.tolist() == [1, 2, 3, 4]


def test_a_tensor_that_is_a_view_of_a_copy_is_copied_too():
    """The original may itself be what an earlier copy gave to another."""
    one, two = StagingBuffers(), StagingBuffers()
    given = one.copy({"a": torch.ones(2)})
    kept = two.copy(given)
    one.copy({"a": torch.zeros(2)})
    assert kept["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.empty(0),
        torch.empty(3, 0, 2),
        torch.tensor([True, False]),
        torch.arange(5, dtype=torch.uint8),
        torch.randn(3).to(torch.bfloat16),
        torch.randn(2, 3, dtype=torch.complex64),
        torch.randn(2, 3, dtype=torch.complex64).conj(),
        torch.randn(2, 3, dtype=torch.complex128).conj().imag,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 4).t(),
        torch.randn(4, 6)[1:3, ::2],
        torch.randn(4, 1).expand(4, 3),
        torch.tensor([float("nan"), float("inf"), -0.0]),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}{tensor.stride()}",
)
def test_every_kind_of_tensor_is_copied_as_clone_copies_it(tensor):
    """Values, dtype and strides, the second time too; also 0-dim, empty, conjugate, negated, sliced, expanded."""
    staging = StagingBuffers()
    for _ in range(2):
        copied = staging.copy({"a": tensor})["a"]
        clone = tensor.clone().resolve_conj().resolve_neg()
        assert (copied.dtype, copied.stride(), copied.shape) == (clone.dtype, clone.stride(), clone.shape)
        assert torch.equal(copied.isnan(), clone.isnan())
        assert torch.equal(copied.nan_to_num(), clone.nan_to_num()) if copied.dtype != torch.bool else True


def test_what_is_tied_is_copied_once_and_what_is_a_mere_part_is_not():
    """The same view of the same memory; another shape, offset or conjugation of it is a tensor of its own."""
    base = torch.randn(4, dtype=torch.complex64)
    views = {"a": base, "tied": base, "part": base[:2], "shape": base.view(2, 2), "conj": base.conj()}
    copies = StagingBuffers().copy(views)
    assert place(copies["tied"]) == place(copies["a"])
    assert len({place(copy) for copy in copies.values()}) == 4
    assert all(torch.equal(copies[name], view) for name, view in views.items())


def test_ties_may_come_and_go():
    """Each copy is of the tensors of then, in whatever order and under whatever names they were tied before."""
    staging, a, b = StagingBuffers(), torch.zeros(2), torch.ones(2)
    for tensors in ({"x": a, "y": b}, {"x": a, "y": a}, {"x": a, "y": b}, {"y": b, "x": b}, {"y": a, "x": b}, {"x": b}):
        copies = staging.copy(tensors)
        assert list(copies) == list(tensors)
        assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())
        distinct = {place(tensor) for tensor in tensors.values()}
        assert len({place(copy) for copy in copies.values()}) == len(distinct)


@pytest.mark.parametrize(
    "changed",
    [
        torch.randn(3, 2),
        torch.randn(2, 3, 1),
        torch.randn(2, 3, dtype=torch.float64),
        torch.randn(3, 2).t(),
        torch.randint(5, (2, 3), dtype=torch.int32),
        torch.empty(0),
        torch.tensor(1.0),
    ],
)
def test_another_shape_dtype_or_layout_under_a_name_gets_memory_of_its_own(changed):
    """As when an optimizer is exchanged; and the former again."""
    staging, before = StagingBuffers(), torch.randn(2, 3)
    for tensor in (before, changed, before):
        assert same(staging.copy({"a": tensor})["a"], tensor)


def test_a_second_copy_beside_a_call_has_arrived_too(idle, device):
    """From a device too, whose copies go on when they have been asked for."""
    staging = StagingBuffers()
    for value in range(3):
        tensors = {"a": torch.full((99,), value, device=device)}
        copies, answer = staging.copy_beside(tensors, lambda: "checked", idle)
        assert (copies["a"].tolist(), answer) == ([value] * 99, "checked")


def test_names_may_come_and_go():
    """State of an optimizer appears at its first step."""
    staging, a, b = StagingBuffers(), torch.zeros(2), torch.ones(3)
    for tensors in ({"a": a}, {"a": a, "b": b}, {"b": b}, {}, {"a": b}):
        copies = staging.copy(tensors)
        assert copies.keys() == tensors.keys()
        assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())


@pytest.fixture
def background():
    before, running = set(threading.enumerate()), BackgroundWriter()
    yield running
    running.close()
    assert set(threading.enumerate()) <= before


def fail(error):
    raise error


@pytest.fixture
def idle(background):
    """A writer that has written something, and whose thread waits."""
    background.start(lambda: None)
    background.wait()
    return background


TRANSPOSED = torch.randn(3, 2).t()
BESIDE = {
    "values": {"a": torch.randn(2, 3), "b": torch.ones(3)},
    "a dtype": {"a": torch.randn(2, 3, dtype=torch.float64), "b": torch.ones(3)},
    "a dtype that rounds": {"a": torch.tensor([[1, 2, 3], [4, 5, 6]]), "b": torch.ones(3)},
    "a shape that could be expanded": {"a": torch.randn(3), "b": torch.ones(3)},
    "a shape that could not": {"a": torch.randn(2, 3), "b": torch.ones(4)},
    "strides": {"a": TRANSPOSED, "b": torch.ones(3)},
    "a tie": {"a": (tied := torch.randn(2, 3)), "b": tied},
    "a part of another": {"a": tied, "b": tied[0]},
    "names": {"c": torch.randn(2, 3), "d": torch.ones(3)},
    "fewer": {"a": torch.randn(2, 3)},
    "more": {"a": torch.randn(2, 3), "b": torch.ones(3), "c": torch.zeros(1)},
    "none": {},
}


@pytest.mark.parametrize("change", BESIDE)
def test_a_copy_beside_a_call_is_the_same_as_without(idle, change):
    """Whatever has changed since the last one, and when it changes back."""
    staging, before = StagingBuffers(), {"a": torch.randn(2, 3), "b": torch.zeros(3)}
    staging.copy(before)
    for tensors in (BESIDE[change], BESIDE[change], before):
        copies, name = staging.copy_beside(tensors, lambda: threading.current_thread().name, idle)
        assert copies.keys() == tensors.keys()
        assert all(same(copies[key], tensor.clone()) for key, tensor in tensors.items())
        assert len(set(map(place, copies.values()))) == len({id(tensor) for tensor in tensors.values()})
        assert "chainring" in name or name == threading.current_thread().name


def test_the_call_runs_in_the_thread_that_is_idle(idle):
    """So that tensors are copied meanwhile; without a thread, none is begun for it."""
    staging, tensors = StagingBuffers(), {"a": torch.ones(2)}
    staging.copy(tensors)
    assert staging.copy_beside(tensors, threading.current_thread, idle)[1] is not threading.current_thread()
    assert staging.copy_beside(tensors, threading.current_thread, BackgroundWriter())[1] is threading.current_thread()


def test_an_error_of_the_call_is_raised_and_the_next_copy_is_right(idle):
    """As when a value cannot be saved."""
    staging, tensors = StagingBuffers(), {"a": torch.ones(2)}
    staging.copy(tensors)
    with pytest.raises(TypeError, match="not saved"):
        staging.copy_beside({"a": torch.zeros(2)}, lambda: fail(TypeError("not saved")), idle)
    copies, answer = staging.copy_beside(tensors, lambda: "saved", idle)
    assert (copies["a"].tolist(), answer) == ([1, 1], "saved")


def test_nothing_is_called_beside_what_is_being_written(background):
    """The call then runs at once, in the thread that needs its result."""
    gate, staging, tensors = threading.Event(), StagingBuffers(), {"a": torch.ones(2)}
    staging.copy(tensors)
    background.start(lambda: gate.wait(120))
    assert staging.copy_beside(tensors, threading.current_thread, background)[1] is threading.current_thread()
    gate.set()


def test_a_call_runs_in_a_thread_of_its_own(background):
    """Start returns at once."""
    gate, done = threading.Event(), []
    background.start(lambda: (gate.wait(120), done.append(threading.current_thread() is threading.main_thread())))
    assert done == []
    gate.set()
    background.wait()
    assert done == [False]


def test_the_next_call_begins_when_the_one_before_has_ended(background):
    """In their order."""
    events = []
    for number in range(5):
        background.start(lambda number=number: events.extend([f"begin {number}", f"end {number}"]))
    background.close()
    assert events == [f"{what} {number}" for number in range(5) for what in ("begin", "end")]


@pytest.mark.parametrize("error", [OSError("full"), RuntimeError("a bug"), MemoryError("no room"), SystemExit("gone")])
@pytest.mark.parametrize("how", ["start", "wait", "close"])
def test_a_failure_is_raised_once_by_whichever_is_called_next(background, how, error):
    """The thread goes on, and what is started next runs."""
    done = []
    background.start(lambda: fail(error))
    with pytest.raises(type(error), match=str(error)):
        background.start(lambda: done.append("refused")) if how == "start" else getattr(background, how)()
    background.wait()
    background.start(lambda: done.append("next"))
    background.close()
    background.close()
    assert done == ["next"]


def test_close_finishes_what_is_under_way_and_may_be_followed_by_a_start(background):
    """A trainer that is rehearsed before it runs closes twice."""
    done = []
    for number in range(2):
        background.start(lambda number=number: done.append(number))
        background.close()
        assert done == list(range(number + 1))


def test_without_a_call_there_is_no_thread():
    """Nor anything to wait for."""
    before, idle = set(threading.enumerate()), BackgroundWriter()
    idle.wait()
    assert set(threading.enumerate()) <= before
    idle.close()


def test_a_failure_at_close_leaves_no_thread():
    """It is raised when the thread has ended."""
    before, background = set(threading.enumerate()), BackgroundWriter()
    background.start(lambda: fail(OSError("full")))
    with pytest.raises(OSError, match="full"):
        background.close()
    assert set(threading.enumerate()) <= before

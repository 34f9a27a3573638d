"""Audited virtual ranks: of a device that computes wrong, nothing reaches a step, and the rank is named."""

import pytest

from audits import COUNT, OwnCore, train_all
from rank_pair import on_ranks

ITERATION = 4  # in which a bit is flipped


def of(*arguments, **settings):
    return arguments, settings


@pytest.mark.parametrize("size", [2, 3])
def test_an_audit_changes_no_bit_and_gives_no_alarm(tmp_path, size):
    """Not with accumulation, workers, a DataLoader, short last batches, an update_core of one's own, or uneven deals."""
    kinds = [
        {},
        {"kind": "processes"},
        {"kind": "loader"},
        {"kind": "once", "rows": 64},
        {"rows": 80},
        {"accumulate": 2},
        {"cls": OwnCore},
        {"balance": "speed"},
    ]
    runs = [of(**kind, audit=audit) for kind in kinds for audit in (0, 3)] + [of(audit=1), of(audit=COUNT)]
    for results in on_ranks(size, train_all, tmp_path, runs):
        bits = [bits for bits, *_ in results]
        assert bits[0:16:2] == bits[1:16:2]
        assert bits[16:] == [bits[0]] * 2
        assert [rest for _, *rest in results] == [[[], None]] * len(runs)


@pytest.mark.parametrize("place", ["gradient", "activation", "batch", "parameter"])
def test_of_three_ranks_the_wrong_one_is_named_and_its_gradient_replaced(tmp_path, place):
    """The run has the bits of one without a fault, be it transient or lasting, of the rank itself or of its auditor."""
    faults = [(rank, lasts) for rank in range(3) for lasts in ((False,) if place == "parameter" else (False, True))]
    runs = [of(), *(of((place, rank, ITERATION, ITERATION, lasts), audit=1) for rank, lasts in faults)]
    results = on_ranks(3, train_all, tmp_path, runs)
    named = set()
    for index, (rank, lasts) in enumerate(faults, 1):
        bits, said, _ = results[0][index]
        assert [of_rank[index][2] for of_rank in results] == [None] * 3
        if said:
            named.add(rank)
            assert f"in iteration {ITERATION + 1} rank {rank} (" in said[-1]
            assert f"virtual rank {ITERATION} wrong, first in the gradient of 'main." in said[-1]
            assert ("did so again" in said[-1]) == lasts
        if not (lasts and place != "gradient" and rank == 1):  # whose buffers and loss are what it has computed
            assert bits == results[0][0][0]
    assert (1 in named, len(named)) == (True, 2)  # the rank that has it, and its auditor


@pytest.mark.parametrize("audit", [1, 3])
def test_an_iterator_around_another_that_does_not_tell_it_of_audits_is_refused(tmp_path, audit):
    """By name, with what to write, and not taken for a device that computes wrong; also where numbers of rows look right."""
    for of_rank in on_ranks(2, train_all, tmp_path, [of(audit=audit, kind="around")]):
        assert "iterator 'main' (Around) has returned [16, 16] rows" in of_rank[0][2]
        assert "writes inner.deal, inner.audits = self.deal, self.audits" in of_rank[0][2]


def test_of_two_ranks_a_transient_fault_is_corrected(tmp_path):
    """Both computations of the second time, and one of the first, are the same."""
    runs = [of(), *(of(("gradient", rank, ITERATION, ITERATION), audit=1) for rank in (0, 1))]
    results = on_ranks(2, train_all, tmp_path, runs)[0]
    for rank in (0, 1):
        bits, said, error = results[1 + rank]
        assert (bits, error) == (results[0][0], None)
        assert f"in iteration 5 rank {rank} (" in said[0]
        assert "a transient fault" in said[0]


@pytest.mark.parametrize(
    ("size", "fault", "settings", "words"),
    [
        (2, (0, True), {}, ["rank 0 (", "rank 1 (", "only a third rank could tell"]),
        (2, (1, True), {}, ["rank 0 (", "rank 1 (", "only a third rank could tell"]),
        (3, (1, False), {"audit_policy": "stop"}, ["in iteration 5 rank 1 ("]),
        (3, (1, False), {"cls": OwnCore}, ["two computations of virtual rank 4 differ", "update_core"]),
    ],
    ids=["lasting of two", "lasting of two, the other", "stop", "own update_core"],
)
def test_what_cannot_be_corrected_ends_the_run_before_the_step_on_all_ranks(tmp_path, size, fault, settings, words):
    """Parameters, moments and the log are those of the update before."""
    rank, lasts = fault
    cls = {key: value for key, value in settings.items() if key == "cls"}
    runs = [of(stop=ITERATION, **cls), of(("gradient", rank, ITERATION, ITERATION, lasts), audit=1, **settings)]
    results = on_ranks(size, train_all, tmp_path, runs)
    assert results[0][0][0] == results[0][1][0]
    for of_rank in results:
        assert [word for word in ["CorruptionError", *words] if word not in of_rank[1][2]] == []


def test_a_wrong_moment_of_three_is_found_by_the_next_audit_and_set_to_that_of_the_others(tmp_path):
    """The run has the bits of one without a fault, since all virtual ranks are audited."""
    runs = [of(), of(("moment", 2, ITERATION, -1), audit=COUNT)]
    results = on_ranks(3, train_all, tmp_path, runs)
    (right, *_), (bits, said, _) = results[0]
    assert bits == right
    assert "rank 2 (" in said[0]
    assert "a majority" in said[0]


def test_at_a_snapshot_the_ranks_have_the_same_parameters_and_moments(tmp_path):
    """Of three, those of the majority are saved; two cannot tell who is wrong, and the run ends without the snapshot."""
    runs = [of(("moment", 1, ITERATION, -1), audit=1, snapshots=ITERATION)]
    ((_, said, error),), *_ = on_ranks(3, train_all, tmp_path, runs)
    assert error is None
    assert "exp_avg of main.first.weight in optimizer 'main' of rank 1 (" in said[0]
    for of_rank in on_ranks(2, train_all, tmp_path, runs):
        assert "exp_avg of main.first.weight" in of_rank[0][2]

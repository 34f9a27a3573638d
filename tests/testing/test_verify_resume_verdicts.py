"""verify_resume is exact, differs or is inconclusive, kills where it matters, and leaves nothing behind."""

import contextlib
import os
import re
import time
from pathlib import Path

import borderline_programs as programs
import pytest

from chainring.testing import Inconclusive, ResumeDiffers, verify_resume


def report(make_trainer, **settings):
    """What is said of a training."""
    return verify_resume(make_trainer, start_method="forkserver", **{"iterations": 14, **settings})


def finding(make_trainer, kind, **settings):
    """What is said of one that is not exact."""
    with pytest.raises(kind) as caught:
        report(make_trainer, **settings)
    return str(caught.value)


def test_one_call_kills_at_four_kinds_of_points():
    """Within an epoch, after the end of one, after an evaluation, and some iterations after a snapshot."""
    text = report(programs.evaluated)
    assert "Killed 4 times and resumed, the run is bit for bit the uninterrupted one" in text
    assert "killed after iteration 4 (right after an evaluation)" in text
    assert "killed after iteration 6 (right after the end of an epoch)" in text
    assert "killed after iteration 9 (within an epoch)" in text
    assert "killed after iteration 12, resumed from a snapshot of iteration 10 (some iterations after a snapshot" in text
    assert "Not reached" not in text


def test_points_that_the_run_does_not_reach_are_named():
    """It evaluates nothing, and its epoch is longer."""
    text = report(programs.unseeded, iterations=5)
    assert "Not reached in 5 iterations: right after the end of an epoch; right after an evaluation" in text


BY_ITSELF = "if its state is loaded, as it was here: the program has no snapshot(autoload=True)"
STOPPED = "up to iteration {}, where it was stopped"
LEARNING = "without learning: no parameter has changed"


@pytest.mark.parametrize(
    ("make_trainer", "iterations", "limits"),
    [
        (programs.unseeded, 5, [STOPPED.format(5), BY_ITSELF]),
        (programs.short, 14, [BY_ITSELF]),
        (programs.saving, 7, [STOPPED.format(7), BY_ITSELF]),
        (programs.continuing, 20, []),
        (programs.continuing, 6, [STOPPED.format(6)]),
        (programs.frozen, 6, [STOPPED.format(6), BY_ITSELF, LEARNING]),
    ],
)
def test_the_first_line_says_as_far_as_what_a_run_is_exact(make_trainer, iterations, limits):
    """Up to the end of the run or not, by itself or not, with learning or not."""
    line = report(make_trainer, iterations=iterations, kill_after=2).splitlines()[0]
    assert line.startswith("exact, but only " if limits else "exact: killed once and resumed, the run is bit for bit")
    said = line.removeprefix("exact, but only ").split("; only ")
    assert [text for text, limit in zip(said, limits, strict=bool(limits)) if not text.startswith(limit)] == []


@pytest.mark.parametrize("make_trainer", [programs.turned_late, programs.turned_for_a_while, programs.turned_in_a_crowd])
def test_a_change_late_in_the_run_is_found(make_trainer):
    """An attribute that is turned at the end of an epoch: the run is killed up to its end, and in each phase."""
    text = finding(make_trainer, ResumeDiffers, iterations=None, seconds=200, timeout=700)
    assert "observation/main/loss" in text
    assert "updater.model:main.scale: 0.5 -> 1.0" in text


def test_phases_that_were_not_looked_for_are_named():
    """So many attributes are compared only once in so few seconds."""
    text = report(programs.turned_in_a_crowd, iterations=30, seconds=0.1)
    assert re.search(
        r"Not reached in 30 iterations: .*phases in which attributes were not compared, which was done 1 of \d times", text
    )


def test_a_run_that_is_longer_than_its_seconds_is_exact_up_to_there():
    """The first line says so."""
    text = report(programs.counts_in_vain, iterations=None, seconds=0.05)
    assert 1 < int(re.match(r"exact, but only up to iteration (\d+), where it was stopped", text)[1]) < 600


def test_the_points_may_be_given():
    """Several, in any order, in place of those four."""
    text = report(programs.evaluated, kill_after=[7, 3])
    assert "Killed 2 times" in text
    assert "killed after iteration 3\n" in text
    assert "killed after iteration 7\n" in text


def test_by_default_a_run_is_long_enough_for_a_count_that_acts_in_iteration_25():
    """It reaches 40 iterations."""
    text = finding(programs.acts_late, ResumeDiffers, iterations=None)
    assert "differs first in iteration 25, in the observation: observation/main/loss" in text
    assert "updater.model:main.calls: " in text


def test_what_no_state_holds_is_listed_though_the_runs_are_the_same():
    """With the way to save it."""
    text = report(programs.counts_in_vain, kill_after=4)
    assert text.startswith("exact")
    assert "Not part of any state, in the killed or uninterrupted run -> in the resumed run:" in text
    assert "updater.model:main.calls: 4 -> 0. To save it: register_buffer" in text


def test_a_program_without_seeds_is_exact_if_all_that_it_draws_is_saved():
    """All runs but the resumed one begin with the same draws."""
    assert report(programs.unseeded).startswith("exact")


def test_a_program_without_seeds_whose_data_are_drawn_is_inconclusive():
    """In another start the data would be others; the line to add is named."""
    text = finding(programs.unseeded_data, Inconclusive)
    assert text.startswith("inconclusive")
    assert "in the batch" in text
    assert "  chainring.deterministic(0)" in text


def test_a_generator_from_which_nobody_draws_does_not_count():
    """Python's begins otherwise in each process."""
    assert report(programs.torch_seeded).startswith("exact")


def test_a_program_seeded_by_the_clock_is_inconclusive_and_told_the_line_to_add():
    """The generator and the tensor are named, and what it forgets is listed."""
    text = finding(programs.clock_seeded, Inconclusive)
    assert text.startswith("inconclusive: two uninterrupted runs of the program already differ")
    assert "They differ first before the first iteration, in the parameters: updater/model:main/layer/weight" in text
    assert "Random generators that begin otherwise each time: the global one of torch" in text
    assert "torch.manual_seed(0), in place of what seeds it by the clock" in text
    assert "nothing has changed that no state holds" in text


def test_an_unseeded_generator_of_its_own_is_named_with_the_line_to_add():
    """By its path."""
    text = finding(programs.noisy, Inconclusive)
    assert "They differ first in iteration 1, in the batch" in text
    assert (
        "numpy.random.default_rng(0), or torch.Generator().manual_seed(0), where updater.iterator:main.dataset.noise" in text
    )


def test_the_iteration_from_which_two_runs_differ_is_named():
    """Whatever they draw from."""
    text = finding(programs.entropic, Inconclusive)
    assert "They differ first in iteration 5, in the parameters: updater/model:main/layer/" in text
    assert "updater.model:main.calls: " in text


def test_times_and_speeds_do_not_count():
    """In a buffer, in the state of an extension, and in rows."""
    text = report(programs.timed)
    assert text.startswith("exact")
    assert "extensions/Times/lasted" in text
    assert "memory" not in text


def test_a_file_in_which_work_is_written_twice_differs():
    """The training is the same; the first line that differs is told."""
    text = finding(programs.appends, ResumeDiffers)
    assert "It differs first" not in text
    assert "own.txt: line " in text
    assert "the file is written apart from the state" in text


def test_a_file_outside_of_out_is_compared_by_what_each_run_adds(tmp_path):
    """It grows with each run."""
    text = finding(programs.appends_elsewhere, ResumeDiffers, directory=tmp_path / "kept")
    assert "own.txt: line " in text


def test_files_that_follow_from_the_state_are_the_same():
    """Also where a line of them is a time."""
    text = report(programs.writes_afresh)
    assert text.startswith("exact")
    assert "files beside the logs no difference was found" in text


def test_a_process_that_hangs_is_ended_and_the_verdict_says_where():
    """The iteration, and the line of the program."""
    for seconds in (10, 100):  # in which it has begun
        began = time.monotonic()
        text = finding(programs.hangs, Inconclusive, timeout=seconds)
        assert time.monotonic() - began < seconds + 60
        if "in wait_for_ever" in text:
            break
    end = f"inconclusive: the uninterrupted run had not ended after {seconds} seconds; it hung after iteration 3"
    assert text.startswith(end)
    assert "in wait_for_ever" in text


def is_running(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="children in other sessions are found through /proc")
def test_nothing_that_the_program_has_started_stays(tmp_path):
    """Workers that persist, a child, one in a session of its own, a thread that does not end."""
    text = finding(programs.with_children, ResumeDiffers, iterations=4, kill_after=2, directory=tmp_path / "kept")
    assert "pids: " in text  # a file of its own
    started = set((tmp_path / "pids").read_text().split())
    assert len(started) >= 12  # at least three in each of four runs
    assert not [pid for pid in started if is_running(pid)]


@pytest.mark.parametrize("settings", [{"timeout": 0}, {"iterations": 1}, {"kill_after": [3, 0]}])
def test_numbers_that_leave_nothing_to_compare_are_refused(settings):
    """Before a process is started."""
    with pytest.raises(ValueError, match="got"):
        report(programs.unseeded, **settings)

"""verify_resume says that a sound training continues bit for bit, and of a forgetful one what differs first and why."""

import forgetful_programs as programs
import pytest

from chainring.serializers._loading import read_state
from chainring.testing import Inconclusive, NotTried, ResumeDiffers, verify_resume


def report(make_trainer, **settings):
    """What is said of a training of eight iterations that is killed after four, in its second epoch."""
    return verify_resume(make_trainer, iterations=8, kill_after=4, start_method="forkserver", **settings)


def difference(make_trainer):
    """What is said of one whose resumed run differs."""
    with pytest.raises(ResumeDiffers) as caught:
        report(make_trainer)
    return str(caught.value)


def test_a_sound_training_is_bit_for_bit_the_same():
    """Processes that know nothing of each other; draws, counts, averages and a snapshot of its own."""
    text = verify_resume(programs.sound, iterations=8, kill_after=3)
    assert "bit for bit the uninterrupted one" in text
    assert "after iteration 8" in text


def test_a_count_that_is_no_buffer_is_named():
    """It scales the loss, so the parameters differ first, while the batch and the reported loss do not."""
    text = difference(programs.counting_model)
    assert "differs first in iteration 5, in the parameters: updater/model:main/layer/weight" in text
    assert "an attribute of a module that is not a buffer" in text
    assert "updater.model:main.calls: 4 -> 0" in text
    assert "updater/model:main/layer/weight: by at most 0." in text


def test_a_generator_in_the_dataset_is_named():
    """The batch differs first."""
    text = difference(programs.noisy_dataset)
    assert "differs first in iteration 5, in the batch" in text
    assert "a random generator that is not restored draws in the dataset" in text
    assert "updater.iterator:main.dataset.rng: a Generator in state" in text


def test_a_count_in_a_closure_that_sets_the_learning_rate_is_named():
    """The learning rate differs first, an iteration later than the kill; both of its values are told."""
    text = difference(programs.hidden_schedule)
    assert "differs first in iteration 6, in the optimizer: updater/optimizer:main/param_groups/0/lr: 0.005 -> 0.01" in text
    assert "sets the learning rate from a count of its own" in text
    assert "extensions.decay, variable 'calls': 4 -> 0" in text


def test_a_scheduler_that_no_one_saves_is_named():
    """Its epoch begins anew, whatever it is called in the program."""
    text = difference(programs.unsaved_scheduler)
    assert "differs first in iteration 6, in the optimizer: updater/optimizer:main/param_groups/0/lr" in text
    assert "extensions.schedule, variable 'scheduler'.last_epoch: 4 -> 0" in text


def test_a_loader_that_draws_from_a_generator_of_its_own_is_exact():
    """The generator is an attribute of it, and is put back with the first batch."""
    text = report(programs.loader_with_a_generator)
    assert "bit for bit the uninterrupted one" in text
    assert "loader.rng" not in text


def test_what_an_updater_forgets_is_named():
    """A mean that its serialize leaves out; what the library's own updater keeps is not suspected."""
    text = difference(programs.averaging_updater)
    assert "differs first in iteration 5, in the parameters" in text
    assert "  updater.mean: float32 (3, 4) of CRC " in text
    assert "updater._" not in text


def test_rows_that_differ_are_named_though_the_training_is_the_same():
    """In the state and in the file of the log."""
    text = difference(programs.forgetful_rows)
    assert "differs first" not in text
    assert "rows of numbered.jsonl/2/number: 3 -> 1" in text
    assert "extensions/numbered/log/2/number: 3 -> 1" in text
    assert "the training is the same and its rows or extensions are not" in text


def test_a_state_that_is_loaded_otherwise_than_saved_is_found_at_once():
    """Before an update has been made with it."""
    text = difference(programs.wrongly_loaded)
    assert "Right after the snapshot of iteration 4 was loaded" in text
    assert "saved state is not restored" in text


def test_an_error_while_loading_is_shown():
    """The run cannot be resumed, which is what was asked."""
    text = difference(programs.not_loading)
    assert "the killed run cannot be resumed" in text
    assert "ValueError: no way back" in text


def test_a_program_that_is_not_repeatable_is_not_blamed_for_its_resume():
    """Its weights are others each time: the verdict names the tensor and the line to add, and lists what is forgotten."""
    with pytest.raises(Inconclusive) as caught:
        report(programs.unseeded)
    text = str(caught.value)
    assert "two uninterrupted runs of the program already differ" in text
    assert "They differ first before the first iteration, in the parameters: updater/model:main/layer/bias" in text
    assert "chainring.deterministic(0) as the first line" in text
    assert "updater.model:main.calls: 4 -> 0" in text


def test_a_reported_speed_is_left_out_and_said_to_be():
    """What two starts report differently while all else is the same is no function of the training."""
    text = report(programs.clocked)
    assert "bit for bit" in text
    assert "two starts of the program differ in: date, speed" in text


def test_a_stop_trigger_that_forgets_is_named():
    """The run ends elsewhere, and is the same until then."""
    text = difference(programs.counting_stop)
    assert "One ended after iteration 6, the resumed one after 8" in text
    assert "a stop trigger that counts" in text
    assert "stop_trigger.left: 2 -> 6" in text


@pytest.mark.parametrize(
    ("make_trainer", "reason"),
    [
        (programs.failing, "LookupError: the third iteration"),
        (programs.short, "ended after 3 iterations by itself, and was to be killed after 4"),
        (programs.no_trainer, "returned a NoneType"),
    ],
)
def test_what_cannot_be_tried_says_why(make_trainer, reason):
    """A program that fails, with its traceback; one that ends too early; one that makes no trainer."""
    with pytest.raises(NotTried, match=reason):
        report(make_trainer)


def test_a_function_that_other_processes_cannot_import_is_refused():
    """Before any process is started."""
    with pytest.raises(TypeError, match="define it at the top level of a module"):
        report(lambda out: programs.sound(out))


@pytest.mark.parametrize("kill_after", [0, 8])
def test_a_kill_outside_of_the_run_is_refused(kill_after):
    """There would be nothing to resume, or nothing to kill."""
    with pytest.raises(ValueError, match="killed after 1 to 7"):
        verify_resume(programs.sound, iterations=8, kill_after=kill_after)


def test_the_directory_keeps_what_the_runs_have_written(tmp_path):
    """The state of both at the end, and the trainer's own files; a directory that holds something is refused."""
    report(programs.sound, directory=tmp_path / "kept")
    kept = tmp_path / "kept"
    ends = [read_state(kept / f"{name}.state")["updater/iteration"] for name in ("first", "second", "resumed 1")]
    assert ends == [8, 8, 8]
    assert (kept / "out of the killed run" / "snapshot_iter_8").is_dir()
    with pytest.raises(FileExistsError, match="give a new directory"):
        report(programs.sound, directory=kept)

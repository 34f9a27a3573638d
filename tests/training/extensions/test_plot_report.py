"""PlotReport: reported values as curves in an image, which is whole whenever it is opened and survives a resume."""

import math
import os
import sys
import warnings

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from resuming import chained, differences, whole
from scripted import Counting, run

import forked
from chainring import training
from chainring.training import extensions

Plot = extensions.PlotReport
EVERY, EVERY_2 = (1, "iteration"), (2, "iteration")


class Curves:
    """A postprocess that takes down what is drawn at each call."""

    def __init__(self):
        self.drawn = []

    def __call__(self, figure, axes, means):
        lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        self.drawn.append((lines, axes.get_xlabel(), means))


def curves(out, observations, keys, *, updater=None, **settings):
    """What a run draws: at each fire the curves, the label of the axis, and the means."""
    seen = Curves()
    updater = Counting(observations, 2) if updater is None else updater
    run(updater, len(observations), out, Plot(keys, postprocess=seen, **settings))
    return seen.drawn


def losses(*values):
    return [{"loss": value} for value in values]


def test_a_curve_has_a_point_an_interval(tmp_path):
    """An epoch by default, of two iterations here: its last iteration, and the mean."""
    drawn = curves(tmp_path, losses(4, 2, 1, 0, 7), "loss")
    assert drawn == [
        ({"loss": [[2, 3]]}, "iteration", {"loss": 3}),
        ({"loss": [[2, 3], [4, 0.5]]}, "iteration", {"loss": 0.5}),
    ]


def test_x_may_be_epochs(tmp_path):
    """With their fraction."""
    *_, (lines, label, _) = curves(tmp_path, losses(4, 2, 1), "loss", x_key="epoch", trigger=EVERY)
    assert (lines, label) == ({"loss": [[0.5, 4], [1, 2], [1.5, 1]]}, "epoch")


def test_means_are_weighted_as_the_updates_are(tmp_path):
    """Tensors will do for both."""
    updater = Counting(losses(torch.tensor(4.0), 0), 2, [torch.tensor(3.0), 1])
    assert curves(tmp_path, [0, 0], "loss", updater=updater)[0][0] == {"loss": [[2, 3]]}


def test_a_key_that_is_reported_now_and_then_has_points_there(tmp_path):
    """Other values are not drawn; the image waits for the first point."""
    observations = [{"a": 1, "c": 9}, {"a": 2, "b": 3}, {"c": 9}, {"b": 4}]
    with pytest.warns(UserWarning, match=r"plot.png has no point yet for \['b'\] at iteration 1: reported were \['a'"):
        drawn = curves(tmp_path, observations, ["a", "b"], trigger=EVERY)
    assert [lines for lines, _, _ in drawn] == [
        {"a": [[1, 1]]},
        {"a": [[1, 1], [2, 2]], "b": [[2, 3]]},
        {"a": [[1, 1], [2, 2]], "b": [[2, 3]]},
        {"a": [[1, 1], [2, 2]], "b": [[2, 3], [4, 4]]},
    ]


def test_keys_that_are_never_reported_are_warned_of_once_and_draw_nothing(tmp_path):
    """A misspelt key shows at the first fire."""
    with pytest.warns(UserWarning, match=r"no point yet for \['lost'\].*Check the keys") as caught:
        assert curves(tmp_path, losses(1, 2, 3), ["lost"], trigger=EVERY) == []
    assert len(caught) == 1
    assert not (tmp_path / "plot.png").exists()


def test_numbers_that_are_none_do_not_end_training(tmp_path):
    """NaN and infinities leave gaps; strings and arrays are no values."""
    observations = losses(math.nan, math.inf, "a", np.ones(2), 1)
    *_, (lines, _, _) = curves(tmp_path, observations, "loss", trigger=EVERY)
    assert [x for x, _ in lines["loss"]] == [1, 2, 5]


@pytest.mark.parametrize(("filename", "start"), [("plot.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("b.svg", b"<?xml")])
def test_the_suffix_says_the_format(tmp_path, filename, start):
    """The image lies in out, and what was there is replaced by a rename."""
    run(Counting(losses(1, 2), 1), 2, tmp_path, Plot("loss", filename=filename))
    assert (tmp_path / filename).read_bytes().startswith(start)
    assert [name for name in os.listdir(tmp_path) if "tmp" in name] == []


def test_the_image_shows_something(tmp_path):
    """Curves, a legend beside them, and lines behind them unless they are not wanted."""
    images = []
    for settings in ({}, {"grid": False}, {"marker": "o"}):
        run(Counting(losses(1, 2, 5), 1), 3, tmp_path, Plot("loss", **settings))
        images.append(imread(tmp_path / "plot.png"))
    assert all(image.shape[0] > 300 and image[..., :3].std() > 0.05 for image in images)
    assert not any(np.array_equal(images[0], other) for other in images[1:])


def test_the_image_of_an_earlier_run_is_moved_away(tmp_path):
    """As everything that a run has written."""
    run(Counting(losses(1), 1), 1, tmp_path, Plot("loss"))
    run(Counting(losses(1), 1), 0, tmp_path, Plot("loss"))
    assert not (tmp_path / "plot.png").exists()
    assert (tmp_path / "previous" / "1" / "plot.png").exists()


def test_matplotlib_is_used_without_touching_its_backend(tmp_path):
    """Neither pyplot nor a backend is loaded by a run, and importing chainring does not import matplotlib."""
    program = (
        "import sys\n"
        "from chainring import report, training\n"
        "from chainring.training import extensions\n"
        "assert 'matplotlib' not in sys.modules\n"
        "class Reporting(training.Updater):\n"
        "    def update_core(self):\n"
        "        report({'loss': self.iteration})\n"
        f"trainer = training.Trainer(Reporting(), (2, 'iteration'), out={str(tmp_path)!r})\n"
        "trainer.extend(extensions.PlotReport('loss', trigger=(1, 'iteration')))\n"
        "trainer.run()\n"
        "import matplotlib\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert matplotlib.get_backend(auto_select=False) is None\n"
    )
    environment = {**os.environ, "MPLCONFIGDIR": str(tmp_path / "config")}
    environment.pop("MPLBACKEND", None)
    done = forked.run(["-c", program], env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_matplotlib_the_error_says_which_extra_to_install(monkeypatch):
    """At construction, not at the end of the first epoch."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'chainring\[plot\]'"):
        Plot("loss")


def test_no_value_is_read_from_its_device_before_the_trigger_fires(tmp_path):
    """Tensors without data stand in for those on an accelerator: to read one is an error."""
    observations = losses(*torch.empty(50, device="meta"))
    run(Counting(observations), 50, tmp_path, Plot("loss", trigger=(51, "iteration")))


@pytest.mark.parametrize("way", ["load", "extend", "file"])
def test_cut_after_every_iteration_all_points_are_there(tmp_path, way):
    """Those before the resume, half intervals, and what has been warned of."""
    observations = [{"a/b": 1}, {"a/b": math.nan}, {"a/b": 2.5, "c": 1}, {}, {"a/b": -math.inf}, {"a/b": 3}, {"c": 2}]

    def make():
        seen = Curves()
        plot = Plot(["a/b", "c", "d"], trigger=(3, "iteration"), postprocess=seen)
        plot.seen = seen
        return Counting(observations, 2), [plot]

    with pytest.warns(UserWarning, match="no point yet for"):
        trainer, _, (plot,) = whole(tmp_path, make, 7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs = chained(tmp_path, make, 7, way=way)
    assert str([drawn for _, _, (part,) in runs for drawn in part.seen.drawn]) == str(plot.seen.drawn)
    assert len(caught) == 1
    assert differences(trainer, runs[-1][0]) == []


@pytest.mark.filterwarnings("ignore:plot.png has no point yet")
def test_resumed_with_other_keys_the_others_keep_their_points(tmp_path):
    """The keys are a setting; a new one begins now."""
    observations, seen = [{"a": n, "b": -n} for n in range(4)], Curves()
    state = run(Counting(observations), 3, tmp_path, Plot(["a", "c"], trigger=EVERY_2)).state_dict()
    run(Counting(observations), 4, tmp_path, Plot(["b", "c"], trigger=EVERY_2, postprocess=seen), state=state)
    assert seen.drawn == [({"b": [[4, -3]]}, "iteration", {"b": -3})]
    state = run(Counting(observations), 2, tmp_path, Plot("a")).state_dict()
    run(Counting(observations), 3, tmp_path, Plot(["b", "a"], postprocess=seen), state=state)
    assert seen.drawn[-1][0] == {"b": [[3, -2]], "a": [[1, 0], [2, 1], [3, 2]]}


@pytest.mark.filterwarnings("ignore:two updates")  # it takes down what is drawn
def test_a_rehearsal_draws_elsewhere_and_leaves_no_point(tmp_path):
    """It shows errors in postprocess before the run."""
    seen = Curves()
    trainer = training.Trainer(Counting(losses(1, 2)), (1, "iteration"), str(tmp_path), [Plot("loss", postprocess=seen)])
    trainer.rehearse()
    assert (len(seen.drawn), list(tmp_path.iterdir())) == (1, [])
    trainer.run()
    assert seen.drawn[-1][0] == {"loss": [[1, 1]]}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None,), TypeError, "y_keys is an iterable of keys.*got None"),
        (([],), ValueError, r"at least one key; got \[\]"),
        ((["a", 1],), TypeError, r"got \['a', 1\]"),
        (("a", "b"), ValueError, r"x_key is \"iteration\" or \"epoch\", got 'b'; keys to be drawn go into a list"),
        (("a", "epoch", EVERY, 3), TypeError, "postprocess is a function of figure, axes and means; got 3"),
        (("a", "epoch", EVERY, None, "sub/plot.png"), ValueError, "a name in out.*got 'sub/plot.png'"),
        (("a", "epoch", EVERY, None, "plot"), ValueError, "got 'plot', and the formats are .*pdf"),
        (("a", "epoch", EVERY, None, ".png"), ValueError, "got '.png'"),
        (("a", "epoch", EVERY, None, None), ValueError, "got None"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(arguments, error, message):
    """The error gives the rule and the value."""
    with pytest.raises(error, match=message):
        Plot(*arguments)


def test_the_argument_of_chainer_is_named():
    """Chainer's scripts write file_name=."""
    with pytest.raises(TypeError, match="no argument 'file_name': that is Chainer's; write filename="):
        Plot("a", file_name="loss.png")

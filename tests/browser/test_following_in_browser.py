"""The page of `--watch`: it follows what is written, and says when nobody serves it any more."""

import json
import threading

import pytest
from reader import Reader

from chainring.html_report import watch
from report_runs import falling, logged


@pytest.fixture
def following(tmp_path):
    """Two runs, the second of which still writes, on a page that is served; and the function that looks at them."""
    outs = [logged(tmp_path / "a", falling(20)), logged(tmp_path / "b", falling(5))]
    with watch(outs, 0) as (address, _, look):
        yield address, look, outs


def append(out, rows):
    with open(out / "log.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def table(reader):
    return reader.page.get_by_role("region", name="Runs").locator("tbody tr").last


def test_a_page_shows_rows_as_they_are_written(chromium, following):
    """In the curves and the tables, without loading it again; what was chosen stays."""
    address, look, (_, b) = following
    with Reader(chromium, address) as reader:
        reader.page.get_by_label("logarithmic y-axis").check()
        reader.page.get_by_text("Following the runs.").wait_for()
        reader.point_at("main/loss", 0.999)
        assert table(reader).inner_text().split()[:3:2] == ["b", "5"]
        append(b, falling(40)[5:])
        look()
        reader.page.get_by_text("Last change at").wait_for()
        assert table(reader).inner_text().split()[:3:2] == ["b", "40"]
        reader.point_at("main/loss", 0.999)
        assert reader.places() == ["iteration 40"]
        assert reader.page.get_by_label("logarithmic y-axis").is_checked()
        append(b, [{"new/key": 1.0, "iteration": 41}])
        look()
        reader.page.get_by_role("heading", name="new/key").wait_for()
        assert reader.complaints == []
        assert {request.split("?")[0] for request in reader.asked} == {address, f"{address}events"}


def test_a_run_that_is_cut_back_is_shown_so(chromium, following):
    """It was resumed from a snapshot before."""
    address, look, (_, b) = following
    with Reader(chromium, address) as reader:
        reader.page.get_by_text("Following the runs.").wait_for()
        logged(b, falling(3))
        look()
        reader.page.get_by_text("Last change at").wait_for()
        assert table(reader).inner_text().split()[:3:2] == ["b", "3"]


def test_a_page_says_that_the_command_has_ended(chromium, tmp_path):
    """And still shows what it had."""
    with Reader(chromium, "about:blank") as reader:
        with watch([logged(tmp_path / "a", falling(20))], 0) as (address, _, _look):
            reader.page.goto(address)
            reader.page.get_by_text("Following the runs.").wait_for()
        reader.page.get_by_text("The command that followed the runs has ended.").wait_for()
        assert reader.curve("main/loss") > 100
    assert threading.active_count() <= 3


def test_texts_of_a_running_run_never_become_a_script(chromium, following):
    """What is sent takes the place of a part of the page, as text."""
    address, look, (_, b) = following
    text = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
    with Reader(chromium, address) as reader:
        reader.page.get_by_text("Following the runs.").wait_for()
        append(b, [{text: 1.0, "iteration": 6}])
        (b / "notes.md").write_text(text)
        look()
        reader.page.get_by_text("Last change at").wait_for()
        assert reader.page.locator("#notes pre").inner_text() == text
        assert reader.chart(text).is_visible()
        assert reader.page.title() == "2 runs"
        assert reader.complaints == []

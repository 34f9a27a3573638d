"""The page of several runs, by what its reader sees and clicks."""

import csv
import json
import math
import time

import numpy as np
import pytest
from reader import NARROW, WIDE, Reader

from chainring import html_report
from report_runs import falling, logged

LOOKS = [(scheme, size) for scheme in ("light", "dark") for size in (WIDE, NARROW)]
SYSTEM = {"system/cpu_percent": 40.0, "system/process_memory_mib": 512.0, "system/accelerator_memory_mib": 2048.0}


def two(tmp_path, **more):
    """Two runs of a hundred rows, the second above the first."""
    one = logged(tmp_path / "one", falling(100, **more))
    rows = [{**row, "main/loss": row["main/loss"] + 0.5} for row in falling(100, **more)]
    return [one, logged(tmp_path / "two", rows)]


def run_button(reader, name):
    return reader.page.locator("#run-list").get_by_role("button", name=name, exact=True)


@pytest.mark.parametrize(("scheme", "size"), LOOKS)
def test_the_curves_of_runs_lie_over_one_another(chromium, tmp_path, scheme, size):
    """One colour a run, in light and dark, wide and narrow, with no request but for the file and no complaint."""
    with Reader(chromium, two(tmp_path, **SYSTEM), size, color_scheme=scheme) as reader:
        assert reader.curve("main/loss", 0) > 100
        assert reader.curve("main/loss", 1) > 100
        assert reader.curve("CPU of the machine (%)", 1) > 20
        assert reader.asked == [reader.address]
        assert reader.complaints == []
        assert reader.page.evaluate("document.documentElement.scrollWidth") == size["width"]


def test_a_click_on_a_run_hides_its_curves_in_all_charts(chromium, tmp_path):
    """Until it is shown again; all and none at once."""
    with Reader(chromium, two(tmp_path, **{"validation/loss": 1.0})) as reader:
        run_button(reader, "two").click()
        assert run_button(reader, "two").get_attribute("aria-pressed") == "false"
        assert [reader.curve(name, 1) for name in ("main/loss", "validation/loss")] == [0, 0]
        assert reader.curve("main/loss", 0) > 100
        reader.page.get_by_role("button", name="None", exact=True).click()
        assert reader.curve("main/loss", 0) == 0
        reader.page.get_by_role("button", name="All", exact=True).click()
        assert reader.curve("main/loss", 0) > 100
        assert reader.curve("main/loss", 1) > 100
        assert reader.complaints == []


def test_a_double_click_shows_a_run_alone(chromium, tmp_path):
    """And All brings the others back."""
    outs = [logged(tmp_path / name, falling(9)) for name in ("a", "b", "c")]
    with Reader(chromium, outs) as reader:
        run_button(reader, "b").dblclick()
        pressed = [run_button(reader, name).get_attribute("aria-pressed") for name in ("a", "b", "c")]
        assert pressed == ["false", "true", "false"]
        reader.page.get_by_role("button", name="All", exact=True).click()
        assert run_button(reader, "c").get_attribute("aria-pressed") == "true"


def test_the_keyboard_zooms(chromium, tmp_path):
    """Around the cursor, in all charts, and out again to all."""
    with Reader(chromium, two(tmp_path, **{"validation/loss": 1.0})) as reader:
        reader.chart("main/loss").locator(".plot").focus()
        reader.page.keyboard.press("End")
        reader.page.keyboard.press("+")
        reader.settle()
        assert reader.places()[0] == "iteration 100"
        reader.page.keyboard.press("Home")
        assert reader.places()[0] == "iteration 76"
        reader.point_at("validation/loss", 0.001)
        assert reader.places()[1] == "iteration 75"
        for _ in range(3):
            reader.page.keyboard.press("-")
        reader.page.keyboard.press("Home")
        assert reader.places()[0] == "iteration 1"
        assert reader.complaints == []


def test_only_the_runs_that_are_found_are_shown_or_hidden_at_once(chromium, tmp_path):
    """Find, and then None."""
    outs = [
        logged(tmp_path / name, [{"a": number, "iteration": i} for i in range(9)])
        for number, name in enumerate(["lr1", "lr2", "wd1"])
    ]
    with Reader(chromium, outs) as reader:
        reader.page.get_by_role("searchbox", name="Find a run").fill("LR")
        assert not run_button(reader, "wd1").is_visible()
        reader.page.get_by_role("button", name="None", exact=True).click()
        reader.page.get_by_role("searchbox", name="Find a run").fill("")
        pressed = [run_button(reader, name).get_attribute("aria-pressed") for name in ("lr1", "lr2", "wd1")]
        assert pressed == ["false", "false", "true"]


def test_the_values_of_the_runs_are_beside_the_cursor(chromium, tmp_path):
    """The greatest above, the nearest in bold."""
    with Reader(chromium, two(tmp_path)) as reader:
        reader.point_at("main/loss", 0.5)
        position = int(reader.places()[0].split()[1])
        assert 48 <= position <= 53
        lines = reader.chart("main/loss").locator(".tip li").all_inner_texts()
        value = 2 * math.exp(-position / 100)
        assert [line.split()[0] for line in lines] == ["two", "one"]
        assert [float(line.split()[1]) for line in lines] == pytest.approx([value + 0.5, value], rel=1e-3)
        assert reader.chart("main/loss").locator(".tip .nearest").count() == 1
        reader.page.mouse.move(5, 5)
        reader.settle()
        assert not reader.chart("main/loss").locator(".tip").is_visible()


def test_the_keyboard_speaks_the_values_of_the_runs(chromium, tmp_path):
    """From row to row."""
    with Reader(chromium, two(tmp_path)) as reader:
        reader.chart("main/loss").locator(".plot").focus()
        reader.page.keyboard.press("End")
        spoken = reader.page.locator("[aria-live=polite]").inner_text()
        assert spoken == "iteration 100: one 0.73576, two 1.2358"


def test_a_line_marks_where_two_runs_part(chromium, tmp_path):
    """In the colour of the text, at its iteration, on every axis; hidden with its run."""

    def dark_columns(reader):
        rows = {}
        for right, down in reader.pixels("main/loss", "--ink"):
            rows.setdefault(right, set()).add(down)
        return [right for right, downs in rows.items() if len(downs) > 60]

    with Reader(chromium, two(tmp_path)) as reader:
        assert reader.page.get_by_text("one and two part in iteration 20").is_visible()
        assert len(dark_columns(reader)) == 1
        over = reader.chart("main/loss").locator(".u-over")
        place = dark_columns(reader)[0] - over.evaluate("over => over.offsetLeft")
        assert place / over.bounding_box()["width"] == pytest.approx((20 - 1) / 99, abs=0.01)
        reader.page.get_by_label("epoch").check()
        assert len(dark_columns(reader)) == 1
        run_button(reader, "two").click()
        reader.settle()
        assert dark_columns(reader) == []


def test_smoothing_draws_the_mean_of_noise(chromium, tmp_path):
    """A smooth curve with the raw one faint behind; also where not all points are drawn."""
    generator = np.random.default_rng(0)
    rows = [{"noise": float(value > 0.9), "iteration": i} for i, value in enumerate(generator.random(20_000))]
    with Reader(chromium, logged(tmp_path / "run", rows)) as reader:
        reader.page.get_by_role("slider", name="Smoothing").fill("0.9")
        reader.settle()
        reader.point_at("noise", 0.5)
        assert float(reader.legend("noise").inner_text().split()[-1]) == pytest.approx(0.1, abs=0.05)
        assert reader.curve("noise", 0) > 100


def test_groups_of_charts_are_folded(chromium, tmp_path):
    """By the first part of their names; one with very many charts is closed at first."""
    rows = [
        {"main/loss": 1.0, "validation/loss": 1.0, "lr": 1.0, "iteration": i}
        | {f"main/predictor/{k}/weight/std": 1.0 for k in range(30)}
        for i in range(5)
    ]
    with Reader(chromium, logged(tmp_path / "run", rows)) as reader:
        summaries = reader.page.locator("details.group > summary").all_inner_texts()
        assert [text.split() for text in summaries] == [
            ["main", "1", "chart"], ["main/predictor", "30", "charts"], ["other", "2", "charts"],
        ]  # fmt: skip
        assert reader.page.get_by_role("heading", name="main/loss").is_visible()
        assert not reader.page.get_by_role("heading", name="main/predictor/7/weight/std").is_visible()
        reader.page.locator("summary", has_text="main/predictor").press("Enter")
        assert reader.curve("main/predictor/0/weight/std") > 20
        reader.page.locator("summary").get_by_text("main", exact=True).click()
        assert not reader.page.get_by_role("heading", name="main/loss").is_visible()


def test_a_chart_is_saved_as_a_table_and_as_a_picture(chromium, tmp_path):
    """What is shown of it: the runs that are not hidden, within the part that was enlarged."""
    with Reader(chromium, two(tmp_path)) as reader:
        run_button(reader, "one").click()
        with reader.page.expect_download() as download:
            reader.page.get_by_role("button", name="Download main/loss as CSV").click()
        rows = list(csv.DictReader(download.value.path().read_text().splitlines()))
        assert download.value.suggested_filename == "main-loss.csv"
        assert len(rows) == 100
        assert rows[49] == {"run": "two", "key": "main/loss", "iteration": "50", "value": f"{2 * math.exp(-0.5) + 0.5:.7g}"}
        with reader.page.expect_download() as download:
            reader.page.get_by_role("button", name="Download main/loss as PNG").click()
        content = download.value.path().read_bytes()
        assert download.value.suggested_filename == "main-loss.png"
        assert content.startswith(b"\x89PNG")
        assert len(content) > 5000
        assert reader.complaints == []


def test_a_slider_shows_images_texts_and_histograms_of_one_iteration(chromium, tmp_path):
    """Of each run the last up to there."""
    outs = two(tmp_path)
    for out, every in zip(outs, (10, 20), strict=True):
        lines = [
            {"row": i - 1, "iteration": i, "media": {"sample": {"kind": "text", "text": f"{out.name} at {i}"}}}
            for i in range(every, 101, every)
        ]
        (out / "log.media.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Reader(chromium, outs) as reader:
        slider = reader.page.get_by_role("slider", name="Iteration of sample")
        shown = reader.page.locator("#media pre:visible")
        assert shown.all_inner_texts() == ["one at 100", "two at 100"]
        slider.fill("2")
        assert shown.all_inner_texts() == ["one at 30", "two at 20"]
        slider.press("Home")
        assert shown.all_inner_texts() == ["one at 10"]
        run_button(reader, "one").click()
        assert shown.all_inner_texts() == []


def test_one_hundred_runs_of_more_rows_than_are_drawn_open_in_two_seconds(chromium, tmp_path):
    """Of the time of the browser's main thread, until the charts in sight are drawn; other axes are as quick.

    A run has 3,000 points on such a page, however many rows it has.
    """
    text = "".join(
        f'{{"main/loss": {1.5 * math.exp(-i / 3e3) + 0.1 * math.sin(7 * i):.5f}, "main/accuracy": {i / 2e4:.5f}, '
        f'"lr": 0.01, "epoch": {i // 100}, "iteration": {i}, "elapsed_time": {i * 0.01:.2f}}}\n'
        for i in range(1, 10_001)
    )
    log = logged(tmp_path / "run0", [], text) / "log.jsonl"
    outs = [log.parent]
    for number in range(1, 100):
        outs.append(tmp_path / f"run{number}")
        outs[-1].mkdir()
        (outs[-1] / "log.jsonl").hardlink_to(log)
    started = time.process_time()
    written = html_report.write_several(outs, tmp_path / "page.html")
    assert time.process_time() - started < 10
    assert written.rows == 1_000_000
    assert 5_000_000 < written.size < 10_000_000  # as of runs of any length
    with Reader(chromium, "about:blank") as reader:
        metrics = reader.page.context.new_cdp_session(reader.page)
        metrics.send("Performance.enable", {"timeDomain": "threadTicks"})

        def busy():
            found = metrics.send("Performance.getMetrics")["metrics"]
            return next(each["value"] for each in found if each["name"] == "TaskDuration")

        reader.page.goto(written.file.as_uri())
        reader.settle()
        assert reader.curve("main/loss", 5) == 0  # it lies below the others
        assert reader.page.locator("canvas").count() >= 3
        opened = busy()
        reader.page.get_by_label("time", exact=True).check()
        reader.settle()
        print(f"{written.size:,} bytes; opened in {opened:.2f} s, another axis in {busy() - opened:.2f} s")
        assert opened < 2
        assert reader.complaints == []

"""The page of a run, by what its reader sees and clicks."""

import math
import re
from collections import Counter

import pytest
from reader import NARROW, WIDE, Reader

from report_runs import falling, logged, recorded

LOOKS = [(scheme, size) for scheme in ("light", "dark") for size in (WIDE, NARROW)]
IDS = [f"{scheme}-{size['width']}" for scheme, size in LOOKS]
COLOURS = ("--ink", "--soft", "--accent", "--good", "--bad", "--c0", "--c1", "--c2", "--c3", "--c4", "--c5")


def luminance(colour):
    """Of a colour such as ``#0b62c4``, as WCAG 2.2 defines it (https://www.w3.org/TR/WCAG22/#dfn-relative-luminance)."""
    digits = colour.strip().lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def variable(page, name):
    return page.evaluate("name => getComputedStyle(document.documentElement).getPropertyValue(name)", name)


@pytest.mark.parametrize(("scheme", "size"), LOOKS, ids=IDS)
class TestEveryLook:
    """Light and dark, wide and narrow."""

    def test_all_is_there_without_a_request_or_a_complaint(self, chromium, result, scheme, size):
        """The parts that have something, two charts with two curves each, and nothing asked for but the file."""
        with Reader(chromium, result, size, color_scheme=scheme) as reader:
            titles = reader.page.get_by_role("heading", level=2).all_inner_texts()
            assert titles == [
                "Curves", "Log", "Settings", "Starts", "Plan", "Time by phase", "Parameters", "Graph", "Snapshots",
            ]  # fmt: skip
            for name in ("main/loss", "main/accuracy"):
                assert reader.curve(name, 0) > 100
                assert reader.curve(name, 1) > 100
            assert reader.asked == [reader.address]
            assert reader.complaints == []

    def test_the_page_is_never_wider_than_its_window(self, chromium, result, scheme, size):
        """What is wide scrolls by itself."""
        with Reader(chromium, result, size, color_scheme=scheme) as reader:
            reader.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            assert reader.page.evaluate("document.documentElement.scrollWidth") == size["width"]
            for canvas in reader.page.locator("canvas").all():
                assert canvas.bounding_box()["width"] <= size["width"]

    def test_every_text_and_curve_stands_out(self, chromium, result, scheme, size):
        """Texts by 4.5 to 1, as WCAG asks; curves by 3 to 1."""
        with Reader(chromium, result, size, color_scheme=scheme) as reader:
            for name in COLOURS:
                least = 3 if name.startswith("--c") else 4.5
                for back in ("--card", "--back"):
                    assert contrast(variable(reader.page, name), variable(reader.page, back)) >= least, (name, back)

    def test_the_switch_turns_light_into_dark_and_back(self, chromium, result, scheme, size):
        """The curves are drawn anew in the colours of the other."""
        with Reader(chromium, result, size, color_scheme=scheme) as reader:
            names = {"light": "Dark", "dark": "Light"}
            other = {"light": "dark", "dark": "light"}[scheme]
            before = variable(reader.page, "--back")
            reader.page.get_by_role("button", name=names[scheme], exact=True).click()
            assert luminance(variable(reader.page, "--back")) != luminance(before)
            assert reader.curve("main/loss") > 100
            reader.page.get_by_role("button", name=names[other], exact=True).click()
            assert variable(reader.page, "--back") == before
            assert reader.curve("main/loss") > 100


def test_the_page_follows_the_system_when_that_changes(chromium, result):
    """Until the switch is used, which holds from then on."""
    with Reader(chromium, result, color_scheme="light") as reader:
        reader.page.emulate_media(color_scheme="dark")
        assert reader.page.get_by_role("button", name="Light", exact=True).is_visible()
        assert luminance(variable(reader.page, "--back")) < 0.1
        assert reader.curve("main/loss") > 100
        reader.page.get_by_role("button", name="Light", exact=True).click()
        reader.page.emulate_media(color_scheme="light")
        reader.page.emulate_media(color_scheme="dark")
        assert luminance(variable(reader.page, "--back")) > 0.8


def test_the_cursor_over_one_chart_shows_the_values_of_all(chromium, result):
    """At the same iteration, each curve with its value from the log; away from the charts there is none."""
    with Reader(chromium, result) as reader:
        reader.point_at("main/loss", 0.999)
        assert reader.places() == ["iteration 18", "iteration 18"]
        cells = (
            reader.page.get_by_role("region", name="Rows of log.jsonl")
            .locator("tbody tr")
            .last.locator("th, td")
            .all_inner_texts()
        )
        heads = reader.page.get_by_role("region", name="Rows of log.jsonl").locator("thead th").all_inner_texts()
        row = dict(zip(heads, cells, strict=True))
        for key in ("main/loss", "validation/main/loss", "main/accuracy", "validation/main/accuracy"):
            text = reader.legend(key).inner_text()
            assert float(text.split()[-1]) == pytest.approx(float(row[key]), rel=1e-4)
        reader.page.mouse.move(5, 5)
        reader.settle()
        assert reader.places() == ["", ""]


def test_a_click_on_the_legend_hides_a_curve_and_brings_it_back(chromium, result):
    """The other stays, and so do those of other charts."""
    with Reader(chromium, result) as reader:
        button = reader.legend("validation/main/loss")
        button.click()
        assert button.get_attribute("aria-pressed") == "false"
        assert reader.curve("main/loss", 1) == 0
        assert reader.curve("main/loss", 0) > 100
        assert reader.curve("main/accuracy", 1) > 100
        reader.page.get_by_label("epoch").check()
        assert reader.curve("main/loss", 1) == 0
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        assert reader.curve("main/loss", 1) > 100


@pytest.mark.parametrize(
    ("axis", "last"),
    [("iteration", "iteration 18"), ("epoch", "epoch 6"), ("time", r"[\d.]+ s")],
    ids=["iteration", "epoch", "time"],
)
def test_the_x_axis_is_the_readers_choice(chromium, result, axis, last):
    """Iteration, epoch, or time."""
    with Reader(chromium, result) as reader:
        reader.page.get_by_label(axis, exact=True).check()
        reader.point_at("main/loss", 0.999)
        assert re.fullmatch(last, reader.places()[0])
        assert reader.curve("main/loss") > 100


def test_a_logarithmic_axis_says_what_it_cannot_show(chromium, tmp_path):
    """Values that are not positive; the others are drawn."""
    rows = falling(60)
    rows[20]["main/loss"] = 0.0
    rows[30]["main/loss"] = -1.0
    with Reader(chromium, logged(tmp_path, rows)) as reader:
        said = reader.page.get_by_text("2 values are not positive")
        assert reader.curve("main/loss") > 100
        assert not said.is_visible()
        reader.page.get_by_label("logarithmic y-axis").check()
        assert said.is_visible()
        assert reader.curve("main/loss") > 100
        reader.page.get_by_label("logarithmic y-axis").uncheck()
        assert not said.is_visible()


def test_what_falls_by_a_factor_is_a_straight_line_on_a_logarithmic_axis(chromium, tmp_path):
    """It is halfway down in the middle, where on a plain axis it is at the bottom."""
    rows = [{**row, "main/loss": 10.0 ** -(row["iteration"] / 10)} for row in falling(60)]
    with Reader(chromium, logged(tmp_path, rows)) as reader:
        assert reader.middle("main/loss") < 0.1
        reader.page.get_by_label("logarithmic y-axis").check()
        assert reader.middle("main/loss") == pytest.approx(0.5, abs=0.05)


def test_dragging_enlarges_all_charts_and_a_double_click_shows_all(chromium, tmp_path):
    """They stay over one another."""
    rows = [{**row, "main/accuracy": 0.5} for row in falling(100)]
    with Reader(chromium, logged(tmp_path, rows)) as reader:
        box = reader.chart("main/loss").locator(".u-over").bounding_box()
        height = box["y"] + box["height"] / 2
        reader.page.mouse.move(box["x"] + 0.5 * box["width"], height)
        reader.page.mouse.down()
        reader.page.mouse.move(box["x"] + 0.75 * box["width"], height, steps=5)
        reader.page.mouse.up()
        reader.settle()
        reader.point_at("main/accuracy", 0.001)
        assert 45 <= int(reader.places()[1].split()[1]) <= 55
        reader.chart("main/loss").locator(".u-over").dblclick()
        reader.settle()
        reader.point_at("main/accuracy", 0.001)
        assert reader.places() == ["iteration 1", "iteration 1"]


def test_the_keyboard_moves_the_cursor_and_the_values_are_spoken(chromium, result):
    """From row to row, to the ends, and away."""
    with Reader(chromium, result) as reader:
        reader.chart("main/loss").locator(".plot").focus()
        spoken = reader.page.locator("[aria-live=polite]")
        found = []
        for key in ("Home", "ArrowRight", "End", "ArrowLeft"):
            reader.page.keyboard.press(key)
            reader.settle()
            found.append(reader.places()[1])
        assert found == ["iteration 3", "iteration 6", "iteration 18", "iteration 15"]
        assert re.match(r"iteration 15: main/loss [\d.]+, validation/main/loss [\d.]+$", spoken.inner_text())
        reader.page.keyboard.press("Escape")
        reader.settle()
        assert reader.places() == ["", ""]


def test_every_control_is_reached_by_the_keyboard(chromium, result):
    """In the order of the page, from the link that skips to the curves; a legend works with the space bar."""
    with Reader(chromium, result) as reader:
        reader.page.keyboard.press("Tab")
        assert reader.page.evaluate("document.activeElement.textContent") == "Skip to the curves"
        reached = []
        for _ in range(40):
            reader.page.keyboard.press("Tab")
            reached.append(
                reader.page.evaluate(
                    "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
                )
            )
        for wanted in ("Dark", "Log", "validation/main/loss", "Rows of log.jsonl", "Snapshots", "Graph"):
            assert wanted in reached
        button = reader.legend("validation/main/loss")
        button.focus()
        reader.page.keyboard.press("Space")
        assert button.get_attribute("aria-pressed") == "false"


def test_one_of_many_charts_is_found_by_its_name(chromium, tmp_path):
    """The field is there where there are many; charts are drawn when they come into view."""
    rows = [{"iteration": i} | {f"layer{k}/weight/std": math.sin(i * k) for k in range(60)} for i in range(1, 50)]
    with Reader(chromium, logged(tmp_path, rows)) as reader:
        assert 2 <= reader.page.locator("canvas").count() < 40
        reader.page.get_by_role("searchbox", name="Find").fill("layer57/")
        assert reader.page.locator("figure:visible").count() == 1
        assert reader.curve("layer57/weight/std") > 100


def test_gaps_are_counted_beside_the_chart(chromium, tmp_path):
    """And the rest of the curve is drawn."""
    rows = falling(50)
    for number in (10, 11, 12):
        rows[number]["main/loss"] = "NaN"
    with Reader(chromium, logged(tmp_path, rows)) as reader:
        assert reader.page.get_by_text("Gaps: main/loss: 3 NaN").is_visible()
        assert reader.curve("main/loss") > 100


def test_a_key_of_every_tenth_row_is_one_curve(chromium, tmp_path):
    """A validation now and then is a line through its points, and not dots between gaps."""
    rows = [row | ({"validation/main/loss": 1.0} if row["iteration"] % 50 == 0 else {}) for row in falling(500)]
    with Reader(chromium, logged(tmp_path, rows)) as reader:
        width = reader.chart("main/loss").locator(".u-over").bounding_box()["width"]
        assert reader.curve("main/loss", 1) > 0.7 * width
        reader.point_at("main/loss", 0.5)
        assert "1" in reader.legend("validation/main/loss").inner_text().split()


def test_what_a_file_holds_never_becomes_a_script(chromium, tmp_path):
    """Neither in a setting, nor in a key, nor in a value: it is read as it stands."""
    text = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
    out = logged(
        recorded(tmp_path / "run", config={"note": text, text: 1}),
        [{text: 1.0, "iteration": i, "b": text} for i in range(3)],
    )
    with Reader(chromium, out) as reader:
        assert reader.page.get_by_role("region", name="Configuration").get_by_text(text).first.is_visible()
        assert reader.chart(text).locator(".legend").get_by_role("button").inner_text().strip() == text
        assert reader.page.title() == "run"
        assert reader.complaints == []


def test_a_script_that_got_into_the_page_would_not_run(chromium, result):
    """The policy of the page lets only its own run, and lets nothing be fetched."""
    with Reader(chromium, result) as reader:
        reader.page.evaluate(
            """() => {
                const script = document.createElement("script");
                script.textContent = "document.title = 'taken'";
                document.body.append(script);
                const image = document.createElement("img");
                image.src = "http://127.0.0.1:9/x.png";
                document.body.append(image);
            }"""
        )
        reader.settle()
        assert reader.page.title() == "result"
        assert sum("Content Security Policy" in complaint for complaint in reader.complaints) == 2


def test_without_scripts_the_numbers_are_there(chromium, result):
    """In the table; a sentence says why there are no curves."""
    with Reader(chromium, result, java_script_enabled=False) as reader:
        assert reader.page.get_by_text("The numbers are in the table").is_visible()
        assert reader.page.get_by_role("region", name="Rows of log.jsonl").locator("tbody tr").count() == 6
        assert not reader.page.locator("#controls").is_visible()


def test_the_graph_is_a_table_of_operations(chromium, result):
    """Parameters under the names by which they are saved."""
    with Reader(chromium, result) as reader:
        region = reader.page.get_by_role("region", name="Operations of the graph")
        assert region.get_by_text("main/predictor/2/weight").count() == 1


def test_resizing_the_window_resizes_the_curves(chromium, result):
    """From wide to narrow and back."""
    with Reader(chromium, result) as reader:
        reader.chart("main/loss")
        reader.page.set_viewport_size(NARROW)
        reader.settle()
        assert reader.page.evaluate("document.documentElement.scrollWidth") == NARROW["width"]
        assert reader.chart("main/loss").locator("canvas").bounding_box()["width"] < NARROW["width"]
        reader.page.set_viewport_size(WIDE)
        reader.settle()
        assert reader.chart("main/loss").locator("canvas").bounding_box()["width"] > NARROW["width"]


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_an_upright_line_is_where_a_command_was_carried_out(chromium, tmp_path, size):
    """Also at the last row, which is at the edge of the chart."""
    start = {"iteration": 0, "time": "2026-01-01T00:00:00+00:00", "host": "here", "pid": 1}
    commands = [
        {"id": str(iteration), "iteration": iteration, "command": "snapshot", "time": start["time"]}
        for iteration in (30, 60, 100)
    ]
    recorded(tmp_path, starts=[start], commands=commands)
    with Reader(chromium, logged(tmp_path, falling(100)), size) as reader:
        columns = Counter(right for right, _ in reader.pixels("main/loss", "--soft"))
        lines = sorted(right for right, count in columns.items() if count > 100)
        assert len(lines) == 3
        assert (lines[2] - lines[0]) / (lines[1] - lines[0]) == pytest.approx(70 / 30, abs=0.05)

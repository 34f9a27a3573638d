"""One who opens a page of a run in a browser."""

from chainring import html_report

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

_COLOURED = """
(figure, wanted) => {
  const seen = figure.querySelector("canvas");
  const copy = Object.assign(document.createElement("canvas"), { width: seen.width, height: seen.height + 1 });
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(seen, 0, 0);
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(wanted);
  context.fillRect(0, seen.height, 1, 1);
  const [red, green, blue] = context.getImageData(0, seen.height, 1, 1).data;
  const { data } = context.getImageData(0, 0, seen.width, seen.height);
  const found = [];
  for (let i = 0; i < data.length; i += 4) {
    const away = Math.abs(data[i] - red) + Math.abs(data[i + 1] - green) + Math.abs(data[i + 2] - blue);
    if (data[i + 3] > 200 && away < 12) found.push([(i / 4) % seen.width, Math.floor(i / 4 / seen.width)]);
  }
  return found;
}
"""


class Reader:
    """Opens the page of a run, or of a list of them, and remembers what the browser asked for and complained about.

    Attributes:
        page: the page in the browser.
        asked: the addresses that were asked for.
        complaints: errors and warnings of the browser.
    """

    def __init__(self, chromium, out, viewport=WIDE, **options):
        self._context = chromium.new_context(viewport=viewport, **options)
        self.page = self._context.new_page()
        self.page.set_default_timeout(240_000)  # milliseconds, of a busy machine
        self.asked, self.complaints = [], []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.address = out if isinstance(out, str) else self._written(out)
        self.page.goto(self.address)

    def _written(self, out):
        if not isinstance(out, list):
            return html_report.write(out).file.resolve().as_uri()
        partings = [html_report.Parting(1, 20, "one and two part in iteration 20")]
        return html_report.write_several(out, out[0].parent / "several.html", partings).file.as_uri()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.close()

    def chart(self, name):
        """The figure under this heading, drawn."""
        heading = self.page.get_by_role("heading", name=name, exact=True)
        figure = self.page.locator("figure").filter(has=heading)
        figure.scroll_into_view_if_needed()
        figure.locator("canvas").wait_for()
        return figure

    def legend(self, key):
        """The button that names a curve and hides it."""
        return self.page.get_by_role("button").filter(has=self.page.get_by_text(key, exact=True))

    def curve(self, name, number=0):
        """How many pixels of a chart have the colour of its curve of this number, once it has been painted anew."""
        return len(self.pixels(name, f"--c{number}"))

    def middle(self, name):
        """How far up the first curve of a chart is in the middle of its width, from 0, its lowest pixel, to 1."""
        pixels = self.pixels(name, "--c0")
        rights, downs = zip(*pixels, strict=True)
        centre = (min(rights) + max(rights)) / 2
        there = [down for right, down in pixels if abs(right - centre) < 5]
        return (max(downs) - sum(there) / len(there)) / (max(downs) - min(downs))

    def pixels(self, name, colour):
        """The places in a chart that have this colour of the page, once it has been painted anew."""
        self.settle()
        return self.chart(name).evaluate(_COLOURED, colour)

    def settle(self):
        """Lets the browser paint what is due."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def point_at(self, name, share):
        """Moves the mouse over a chart, to this share of its width."""
        over = self.chart(name).locator(".u-over")
        box = over.bounding_box()
        self.page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
        self.settle()

    def places(self):
        """What the charts say where the cursor is."""
        return self.page.locator("figure output").all_inner_texts()

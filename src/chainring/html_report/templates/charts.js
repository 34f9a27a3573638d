// The charts: what is in each, and how it is drawn. An array in the data is text until it is drawn for the first time.

const COLOURS = 6; // that are chosen; further ones are computed
const AXES = ["iteration", "epoch", "time", "row"];
const SYSTEM = {
  cpu_percent: "CPU of the machine (%)",
  process_cpu_percent: "CPU of the process (%, 100 is one core)",
  memory_percent: "Memory of the machine (%)",
  process_memory_mib: "Memory of the process (MiB)",
  accelerator_percent: "GPU (%)",
  accelerator_memory_mib: "GPU memory (MiB)",
};
const WHOLE = Array.from({ length: 36 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));
const SECONDS = [0.001, 0.01, 0.1, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000];
const INCREMENTS = { iteration: WHOLE, row: WHOLE, time: SECONDS };
const ARRAYS = { f: Float32Array, d: Float64Array };
const MAX_IN_TIP = 8;
const OPEN_CHARTS = 12; // more charts in a group are folded at first

const data = JSON.parse(document.getElementById("data").textContent);
const isOne = document.body.classList.contains("one");
const choice = { axis: null, logarithmic: false, smoothing: 0, zoom: null, hiddenRuns: new Set(), hiddenKeys: new Set(), find: "" };
const figures = new Map(); // by the identity of a chart

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const colour = (index) => (index < COLOURS ? css(`c${index}`) : `oklch(${css("lightness")} 0.14 ${Math.round((index * 137.508) % 360)})`);
const shown = (value) => (value == null || Number.isNaN(value) ? "–" : String(Number(value.toPrecision(5))));
const positionText = (x) => (choice.axis === "time" ? `${shown(x)} s` : `${choice.axis} ${choice.axis === "epoch" ? shown(x) : x}`);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function unpacked(holder, name) {
  if (typeof holder[name] === "string") {
    const bytes = Uint8Array.from(atob(holder[name].slice(1)), (character) => character.charCodeAt(0));
    holder[name] = new ARRAYS[holder[name][0]](bytes.buffer);
  }
  return holder[name];
}

// --- what is in the charts ---

// Of one run the curves of a metric share a chart; of several those of a key, one of each run.
function chartsOf() {
  const charts = new Map();
  data.runs.forEach((run, runIndex) => run.logs.forEach((log, logIndex) => {
    for (const curve of log.curves) {
      const name = isOne ? curve.chart : curve.key;
      const id = `${log.name}\n${name}`;
      if (!charts.has(id)) charts.set(id, { id, name, log: log.name, isFirst: logIndex === 0, entries: [] });
      const { entries } = charts.get(id);
      entries.push({ run: runIndex, log, curve, label: isOne ? curve.key : run.name, number: isOne ? entries.length : runIndex });
    }
  }));
  const counts = new Map();
  // The names of parameters are long, and would hide the losses of their model in one group with them.
  const firstPart = ({ name }) => name.split("/").slice(0, name.split("/").length > 3 ? 2 : 1).join("/");
  for (const chart of charts.values()) counts.set(firstPart(chart), (counts.get(firstPart(chart)) ?? 0) + 1);
  for (const chart of charts.values()) {
    const prefix = chart.isFirst ? "" : `${chart.log}: `;
    chart.isSystem = chart.name.includes("/") && Object.hasOwn(SYSTEM, chart.name.split("/").at(-1));
    chart.title = chart.isSystem ? SYSTEM[chart.name.split("/").at(-1)] : chart.name;
    chart.group = prefix + (chart.name.includes("/") || counts.get(chart.name) > 1 ? firstPart(chart) : "other");
  }
  return charts;
}

const isHidden = (figure, entry) => (isOne ? choice.hiddenKeys.has(`${figure.chart.id}\n${entry.label}`) : choice.hiddenRuns.has(entry.run));

// Positions and values of a curve in the order of the positions; those of its means too, of which a smooth curve is drawn.
function pointsOf({ log, curve }) {
  if (curve.points?.axis === choice.axis) return curve.points;
  const positions = choice.axis in log.axes ? unpacked(log.axes, choice.axis) : null;
  const taken = (at, y) => {
    const rows = positions ? [...unpacked(curve, at).keys()].filter((i) => !Number.isNaN(positions[curve[at][i]])) : [];
    const place = (i) => positions[curve[at][i]];
    if (rows.some((i, index) => index && place(i) < place(rows[index - 1]))) rows.sort((one, other) => place(one) - place(other) || one - other);
    return { xs: Float64Array.from(rows, place), ys: Float64Array.from(rows, (i) => unpacked(curve, y)[i]) };
  };
  const raw = taken("at", "y");
  curve.points = { axis: choice.axis, raw, means: curve.means ? taken("meanAt", "means") : raw };
  return curve.points;
}

// A value that is a hundredth of the axis before counts `smoothing` times as much, however many points there are.
function smoothed({ xs, ys }, range) {
  let sum = 0;
  let weights = 0;
  const values = ys.map((y, i) => {
    const decay = i ? choice.smoothing ** ((xs[i] - xs[i - 1]) / range * 100) : 0;
    sum *= decay;
    weights *= decay;
    if (!Number.isNaN(y)) {
      sum += y;
      weights += 1;
    }
    return Number.isNaN(y) ? NaN : sum / weights;
  });
  return { xs, ys: values };
}

// What uPlot draws of points: those in sight and one on either side. null is a gap.
function columnsOf({ xs, ys }) {
  let [first, last] = [0, xs.length - 1];
  if (choice.zoom) {
    while (first < last && xs[first + 1] < choice.zoom[0]) first += 1;
    while (last > first && xs[last - 1] > choice.zoom[1]) last -= 1;
  }
  const columns = [[], []];
  let unseen = 0;
  for (let i = first; i <= last; i += 1) {
    const isUnseen = choice.logarithmic && ys[i] <= 0;
    unseen += isUnseen;
    columns[0].push(xs[i]);
    columns[1].push(Number.isNaN(ys[i]) || isUnseen ? null : ys[i]);
  }
  return { columns, unseen };
}

function rangeOf(arrays) {
  let [least, greatest] = [Infinity, -Infinity];
  for (const array of arrays)
    for (const value of array)
      if (value != null && !Number.isNaN(value)) {
        least = Math.min(least, value);
        greatest = Math.max(greatest, value);
      }
  return least > greatest ? null : [least, greatest];
}

// --- drawing ---

function draw(figure) {
  figure.isStale = false;
  const entries = figure.chart.entries.filter((entry) => !isHidden(figure, entry));
  const points = entries.map(pointsOf);
  const whole = rangeOf(points.map(({ raw }) => (raw.xs.length ? [raw.xs[0], raw.xs.at(-1)] : [])));
  const span = whole ? whole[1] - whole[0] || 1 : 1;
  const [faint, series] = [[], []];
  figure.curves = entries.map((entry, index) => {
    const { columns, unseen } = columnsOf(points[index].raw);
    const smooth = choice.smoothing ? columnsOf(smoothed(points[index].means, span)).columns : columns;
    const style = { label: entry.label, stroke: colour(entry.number) };
    const width = entries.length > 20 ? 1.25 : 1.75;
    if (choice.smoothing) faint.push({ ...style, columns, width: 1, alpha: 0.35 / Math.sqrt(entries.length), isFaint: true });
    series.push({ ...style, columns: smooth, width });
    return { entry, columns, smooth, unseen };
  });
  series.unshift(...faint); // behind all others
  if (!series.length) series.push({ columns: [[], []], stroke: "transparent" });
  figure.whole = whole ?? [0, 1];
  const xs = choice.zoom ?? figure.whole;
  const inSight = series.map(({ columns }) => columns[1].filter((_, i) => columns[0][i] >= xs[0] && columns[0][i] <= xs[1]));
  figure.range = { x: xs[0] === xs[1] ? [xs[0] - 0.5, xs[1] + 0.5] : xs, y: rangeOf(inSight) ?? [choice.logarithmic ? 0.1 : 0, 1] };
  figure.positions = null;
  plot(figure, series);
  describe(figure);
}

function plot(figure, series) {
  const cursor = figure.plot?.cursor.left >= 0 ? { ...figure.plot.cursor, x: figure.plot.posToVal(figure.plot.cursor.left, "x") } : null;
  figure.plot?.destroy();
  const axis = { stroke: css("soft"), grid: { stroke: css("line"), width: 1 }, ticks: { stroke: css("line"), width: 1 } };
  const few = (one) => one.columns[0].length < 40 && series.length <= 40 && !one.isFaint;
  const { x, y } = figure.range;
  figure.plot = new uPlot({
    mode: 2,
    width: figure.holder.clientWidth,
    height: figure.holder.clientHeight,
    legend: { show: false },
    cursor: {
      y: false,
      sync: { key: "runs", setSeries: false, filters: { pub: (type) => type === "mousemove" || type === "mouseleave", sub: () => true } },
      drag: { x: true, y: false, setScale: false },
      points: { size: 7, show: series.length <= 40 ? undefined : false },
      bind: { dblclick: () => null },
      dataIdx: (self, index) => nearest(self.data[index], self.posToVal(self.cursor.left, "x")),
    },
    scales: {
      x: { time: false, range: () => x },
      y: { distr: choice.logarithmic ? 3 : 1, range: () => (choice.logarithmic ? uPlot.rangeLog(...y, 10, true) : uPlot.rangeNum(...y, 0.1, true)) },
    },
    axes: [
      { ...axis, values: (_, values) => values.map(tick), size: 34, ...(choice.axis in INCREMENTS ? { incrs: INCREMENTS[choice.axis] } : {}) },
      { ...axis, values: choice.logarithmic ? undefined : (_, values) => values.map((value) => (value == null ? "" : String(Number(value.toPrecision(6))))), size: 58 },
    ],
    series: [{}, ...series.map((one) => ({
      label: one.label,
      stroke: one.stroke,
      width: one.width,
      pxAlign: 0,
      alpha: one.alpha ?? 1,
      points: { show: few(one), size: 5, filter: () => (few(one) ? [...one.columns[0].keys()].filter((i) => one.columns[1][i] != null) : null) },
    }))],
    hooks: {
      ready: [(self) => restoreCursor(self, figure, cursor)],
      setCursor: [() => showCursor(figure)],
      setSelect: [(self) => enlarge(self)],
      drawAxes: [(self) => drawMarks(self, figure)],
    },
  }, [null, ...series.map((one) => one.columns)], figure.holder);
  figure.holder.append(figure.tip);
}

// The cursor stays where the mouse is, or at the row to which the keyboard has moved it.
function restoreCursor(self, figure, cursor) {
  if (!cursor) return;
  if (figure.holder === document.activeElement) self.setCursor({ left: self.valToPos(cursor.x, "x"), top: cursor.top }, true, true);
  else if (figure.element.matches(":hover")) self.setCursor({ left: cursor.left, top: cursor.top }, true, true);
}

function tick(value) {
  if (value == null) return "";
  const rounded = (number) => String(Number(number.toPrecision(6)));
  if (choice.axis !== "time") return value >= 1e6 ? `${rounded(value / 1e6)}M` : value >= 1e4 ? `${rounded(value / 1e3)}k` : rounded(value);
  return value < 120 ? `${rounded(value)} s` : value < 7200 ? `${rounded(value / 60)} min` : `${rounded(value / 3600)} h`;
}

function enlarge(self) {
  if (self.select.width < 3) return;
  choice.zoom = [self.posToVal(self.select.left, "x"), self.posToVal(self.select.left + self.select.width, "x")];
  requestAnimationFrame(drawAll); // when uPlot is done with the event
}

// The index of the value nearest to a position, gaps left out.
function nearest([xs, ys], x) {
  let [low, high] = [0, xs.length - 1];
  if (high < 0) return null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle;
    else high = middle;
  }
  while (low > 0 && ys[low] == null) low -= 1;
  while (high < xs.length - 1 && ys[high] == null) high += 1;
  const index = Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) && ys[low] != null ? low : high;
  return ys[index] == null ? (ys[low] == null ? null : low) : index;
}

// An upright line where a run was resumed, and where two runs part.
function drawMarks(self, figure) {
  const lines = isOne
    ? data.runs[0].marks.map((iteration) => ({ iteration, run: 0, stroke: css("soft"), text: "" }))
    : data.partings.filter(({ run }) => !choice.hiddenRuns.has(run)).map(({ run, iteration }) => ({
      iteration, run, stroke: data.partings.length > 1 ? colour(run) : css("ink"), text: data.partings.length > 1 ? "" : `part at ${iteration}`,
    }));
  const context = self.ctx;
  const { left, top, width, height } = self.bbox;
  context.save();
  context.lineWidth = devicePixelRatio;
  context.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
  lines.forEach(({ iteration, run, stroke, text }) => {
    const at = positionOf(figure, run, iteration);
    // What is before the first row is marked there, unless a part is enlarged.
    const place = at != null && !choice.zoom ? Math.max(at, figure.range.x[0]) : at;
    const x = place == null ? -1 : Math.round(self.valToPos(place, "x", true)) + 0.5;
    if (x < left || x > left + width + 1) return; // the last row is at the edge
    context.strokeStyle = context.fillStyle = stroke;
    context.setLineDash(isOne ? [] : [4 * devicePixelRatio, 3 * devicePixelRatio]);
    context.beginPath();
    context.moveTo(x, top);
    context.lineTo(x, top + height);
    context.stroke();
    const isRight = x + context.measureText(text).width + 8 * devicePixelRatio > left + width;
    context.textAlign = isRight ? "right" : "left";
    context.fillText(text, x + (isRight ? -4 : 4) * devicePixelRatio, top + 13 * devicePixelRatio);
  });
  context.restore();
}

// Where on the axis an iteration of a run is: on others than that of iterations, at the last row up to there.
function positionOf(figure, run, iteration) {
  if (choice.axis === "iteration") return iteration;
  const log = figure.chart.entries.find((entry) => entry.run === run)?.log;
  if (!log || !("iteration" in log.axes) || !(choice.axis in log.axes)) return null;
  const row = unpacked(log.axes, "iteration").findLastIndex((each) => each <= iteration);
  return row < 0 ? unpacked(log.axes, choice.axis)[0] : unpacked(log.axes, choice.axis)[row];
}

// --- what is said about a chart ---

function describe(figure) {
  const unseen = figure.curves.reduce((sum, curve) => sum + curve.unseen, 0);
  figure.unseen.hidden = !unseen;
  figure.unseen.textContent = `${unseen} values are not positive, and are not shown on a logarithmic axis.`;
  const sentences = figure.curves.slice(0, MAX_IN_TIP).map(({ entry, columns }) => {
    const values = columns[1].filter((value) => value != null);
    const range = rangeOf([values]);
    return range ? `${entry.label} from ${shown(values[0])} to ${shown(values.at(-1))}, least ${shown(range[0])}, greatest ${shown(range[1])}` : `${entry.label} without a value`;
  });
  figure.holder.setAttribute("aria-label", `${figure.chart.title}: ${sentences.join("; ") || "nothing is shown"}`);
}

function valuesAt(figure) {
  const left = figure.plot?.cursor.left;
  if (left == null || left < 0) return null;
  const x = figure.plot.posToVal(left, "x");
  return figure.curves.map(({ entry, smooth }) => {
    const index = nearest(smooth, x);
    return index == null ? { entry, x: null, y: null } : { entry, x: smooth[0][index], y: smooth[1][index], away: Math.abs(smooth[0][index] - x) };
  });
}

function showCursor(figure) {
  const values = valuesAt(figure);
  const closest = values?.filter((value) => value.x != null).sort((one, other) => one.away - other.away)[0];
  figure.at.textContent = closest ? positionText(closest.x) : "";
  if (isOne)
    for (const [label, cell] of figure.cells) {
      const value = values?.find(({ entry }) => entry.label === label);
      cell.textContent = value ? shown(value.y) : "";
    }
  else showTip(figure, closest ? values : null);
}

function showTip(figure, values) {
  const isHere = values && (figure.element.matches(":hover") || figure.holder === document.activeElement);
  figure.tip.hidden = !isHere;
  if (!isHere) return;
  const { left, top } = figure.plot.cursor;
  const away = ({ y }) => Math.abs(figure.plot.valToPos(y, "y") - top);
  const near = values.filter(({ y }) => y != null).sort((one, other) => away(one) - away(other));
  const rows = near.slice(0, MAX_IN_TIP).sort((one, other) => other.y - one.y).map((value) => {
    const row = element("li", { className: value === near[0] ? "nearest" : "" }, element("span", { textContent: value.entry.label }), element("b", { textContent: shown(value.y) }));
    row.style.setProperty("--curve", colour(value.entry.number));
    return row;
  });
  if (near.length > MAX_IN_TIP) rows.push(element("li", { textContent: `and ${near.length - MAX_IN_TIP} more`, className: "more" }));
  figure.tip.replaceChildren(...rows);
  const width = figure.holder.clientWidth;
  const offset = figure.plot.over.offsetLeft + left;
  figure.tip.style.left = offset < width / 2 ? `${offset + 14}px` : "";
  figure.tip.style.right = offset < width / 2 ? "" : `${width - offset + 14}px`;
}

// What the mouse does, for the keyboard, and in words.
function moveByKey(figure, event) {
  if (!figure.plot) return;
  if (event.key === "Escape") {
    figure.plot.setCursor({ left: -10, top: -10 }, true, true);
    return;
  }
  const [from, to] = figure.range.x;
  if (event.key === "+" || event.key === "-") {
    const centre = figure.plot.cursor.left >= 0 ? figure.plot.posToVal(figure.plot.cursor.left, "x") : (from + to) / 2;
    const half = (to - from) * (event.key === "+" ? 0.25 : 1);
    const zoom = [Math.max(centre - half, figure.whole[0]), Math.min(centre + half, figure.whole[1])];
    choice.zoom = zoom[0] === figure.whole[0] && zoom[1] === figure.whole[1] ? null : zoom;
    drawAll();
    return;
  }
  figure.positions ??= [...new Set(figure.curves.flatMap(({ columns }) => columns[0]))].filter((x) => x >= from && x <= to).sort((one, other) => one - other);
  const last = figure.positions.length - 1;
  const isShown = figure.plot.cursor.left >= 0;
  const current = isShown ? nearest([figure.positions, figure.positions], figure.plot.posToVal(figure.plot.cursor.left, "x")) : null;
  const stride = event.shiftKey ? 10 : 1;
  const targets = {
    ArrowLeft: current == null ? last : Math.max(current - stride, 0),
    ArrowRight: current == null ? 0 : Math.min(current + stride, last),
    Home: 0,
    End: last,
  };
  if (!(event.key in targets) || last < 0) return;
  event.preventDefault();
  const left = figure.plot.valToPos(figure.positions[targets[event.key]], "x");
  figure.plot.setCursor({ left, top: figure.plot.over.clientHeight / 2 }, true, true);
  const words = (valuesAt(figure) ?? []).slice(0, MAX_IN_TIP).map(({ entry, y }) => `${entry.label} ${shown(y)}`);
  document.getElementById("spoken").textContent = `${figure.at.textContent}: ${words.join(", ")}`;
}

// --- the figures ---

function makeFigure(chart) {
  const heading = element("h3", { textContent: chart.title });
  const at = element("output", { className: "at" });
  const save = (kind, action) => {
    const button = element("button", { type: "button", className: "save", textContent: kind, title: `Download as ${kind}` });
    button.setAttribute("aria-label", `Download ${chart.title} as ${kind}`);
    button.addEventListener("click", () => action(figures.get(chart.id)));
    return button;
  };
  const holder = element("div", { className: "plot", tabIndex: 0 });
  holder.setAttribute("role", "img");
  holder.setAttribute("aria-label", chart.title);
  const tip = element("ul", { className: "tip", hidden: true });
  const unseen = element("p", { className: "note unseen", hidden: true });
  const gaps = element("p", { className: "note gaps", hidden: true });
  const legend = element("div", { className: "legend" });
  legend.setAttribute("role", "group");
  legend.setAttribute("aria-label", `Curves of ${chart.title}`);
  const caption = element("figcaption", {}, heading, at, element("span", { className: "saves" }, save("PNG", savePicture), save("CSV", saveTable)));
  const made = element("figure", { className: "chart" }, caption, ...(isOne ? [legend] : []), holder, unseen, gaps);
  if (chart.isSystem) heading.title = chart.name;
  const figure = { chart, element: made, holder, at, tip, unseen, gaps, legend, cells: new Map(), isNear: false, isStale: true };
  holder.addEventListener("keydown", (event) => moveByKey(figure, event));
  holder.addEventListener("dblclick", () => {
    choice.zoom = null;
    drawAll();
  });
  return figure;
}

function fillLegend(figure) {
  for (const entry of figure.chart.entries) {
    if (figure.cells.has(entry.label)) continue;
    const cell = element("b");
    const button = element("button", { type: "button", title: "Show or hide this curve" }, element("span", { textContent: entry.label }), cell);
    button.style.setProperty("--curve", `var(--c${entry.number % COLOURS})`);
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      const key = `${figure.chart.id}\n${entry.label}`;
      const isShown = choice.hiddenKeys.delete(key);
      if (!isShown) choice.hiddenKeys.add(key);
      button.setAttribute("aria-pressed", String(isShown));
      draw(figure);
    });
    figure.cells.set(entry.label, cell);
    figure.legend.append(button);
  }
}

function tellGaps(figure) {
  const said = figure.chart.entries.filter(({ curve }) => Object.keys(curve.gaps).length)
    .map(({ label, curve }) => `${label}: ${Object.entries(curve.gaps).map(([name, count]) => `${count.toLocaleString("en")} ${name}`).join(", ")}`);
  figure.gaps.hidden = !said.length;
  figure.gaps.textContent = `Gaps: ${said.slice(0, MAX_IN_TIP).join("; ")}${said.length > MAX_IN_TIP ? `; and ${said.length - MAX_IN_TIP} more` : ""}`;
}

// A page may have hundreds of charts: each is drawn when it comes near the window.
const nearby = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const figure = [...figures.values()].find((each) => each.element === entry.target);
    figure.isNear = entry.isIntersecting;
    if (figure.isNear && figure.isStale) draw(figure);
  }
}, { rootMargin: "300px" });

const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const { plot: drawn } = [...figures.values()].find((each) => each.holder === target);
    if (drawn && target.clientWidth && drawn.width !== target.clientWidth) drawn.setSize({ width: target.clientWidth, height: target.clientHeight });
  }
});

function drawAll() {
  for (const figure of figures.values()) {
    figure.isStale = true;
    if (figure.isNear) draw(figure);
  }
}

const groups = new Map(); // by name the element that holds the charts

function groupOf(chart, sizes) {
  if (chart.isSystem) return document.getElementById("system-charts");
  if (!groups.has(chart.group)) {
    const holder = element("div", { className: "charts" });
    const summary = element("summary", {}, element("span", { textContent: chart.group }), " ", element("small", { textContent: "" }));
    const folder = element("details", { className: "group", open: sizes.get(chart.group) <= OPEN_CHARTS }, summary, holder);
    groups.set(chart.group, holder);
    document.getElementById("chart-groups").append(folder);
  }
  return groups.get(chart.group);
}

// Makes the figures that are not there yet, and draws those in sight.
function buildCharts() {
  const charts = chartsOf();
  const sizes = new Map();
  for (const chart of charts.values()) if (!chart.isSystem) sizes.set(chart.group, (sizes.get(chart.group) ?? 0) + 1);
  const inOrder = [...charts.values()].sort((one, other) => one.group.endsWith("other") - other.group.endsWith("other"));
  for (const chart of inOrder) {
    if (!figures.has(chart.id)) {
      const figure = makeFigure(chart);
      figures.set(chart.id, figure);
      groupOf(chart, sizes).append(figure.element);
      nearby.observe(figure.element);
      resized.observe(figure.holder);
    }
    const figure = figures.get(chart.id);
    figure.chart = chart;
    if (isOne) fillLegend(figure);
    tellGaps(figure);
  }
  for (const [name, holder] of groups) {
    const count = sizes.get(name) ?? 0;
    holder.parentElement.querySelector("small").textContent = `${count} ${count === 1 ? "chart" : "charts"}`;
    holder.parentElement.classList.toggle("alone", groups.size === 1);
  }
  find();
}

function find() {
  const wanted = choice.find.toLowerCase();
  for (const figure of figures.values()) figure.element.hidden = !`${figure.chart.name} ${figure.chart.title}`.toLowerCase().includes(wanted);
  for (const holder of groups.values()) {
    const isFound = [...holder.children].some((child) => !child.hidden);
    holder.parentElement.hidden = !isFound;
    if (wanted && isFound) holder.parentElement.open = true;
  }
}

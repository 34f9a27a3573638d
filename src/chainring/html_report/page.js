"use strict";
// Draws the curves. What the page says without them is in its HTML already.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const figures = [...document.querySelectorAll(".chart")];
  const plots = new Map(); // of the figures that have been drawn
  const hiddenKeys = new Map(figures.map((figure) => [figure, new Set()]));
  const COLOURS = 6;
  const choice = { axis: null, logarithmic: false };

  for (const log of data.logs)
    for (const chart of log.charts)
      for (const curve of chart.curves) {
        let position = 0;
        curve.at = curve.at.map((step) => (position += step));
      }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const shown = (value) => (value == null ? "–" : String(Number(value.toPrecision(5))));
  const logOf = (figure) => data.logs[figure.dataset.log];
  const chartOf = (figure) => logOf(figure).charts[figure.dataset.chart];
  const axisOf = (figure) => (choice.axis in logOf(figure).axes ? choice.axis : Object.keys(logOf(figure).axes)[0]);
  const formatPosition = (axis, x) => (axis === "time" ? `${shown(x)} s` : `${axis} ${axis === "epoch" ? shown(x) : x}`);

  // The columns that uPlot draws. A row that a curve lacks is undefined, which it passes over; null is a gap.
  function columnsOf(figure) {
    const xs = logOf(figure).axes[axisOf(figure)];
    const curves = chartOf(figure).curves;
    const rows = [...new Set(curves.flatMap((curve) => curve.at))].filter((row) => xs[row] != null);
    rows.sort((one, other) => xs[one] - xs[other] || one - other);
    const index = new Map(rows.map((row, position) => [row, position]));
    let unseen = 0;
    const columns = curves.map((curve) => {
      const column = new Array(rows.length).fill(undefined);
      curve.at.forEach((row, position) => {
        if (!index.has(row)) return;
        let y = curve.y[position];
        if (choice.logarithmic && y != null && y <= 0) {
          y = null;
          unseen += 1;
        }
        column[index.get(row)] = y;
      });
      return column;
    });
    return { columns: [rows.map((row) => xs[row]), ...columns], unseen };
  }

  function drawMarks(plot, figure) {
    const axes = logOf(figure).axes;
    if (!axes.iteration) return;
    const context = plot.ctx;
    context.save();
    context.strokeStyle = colour("soft");
    context.lineWidth = devicePixelRatio;
    for (const mark of data.marks) {
      const row = axes.iteration.findLastIndex((iteration) => iteration != null && iteration <= mark);
      const at = axisOf(figure) === "iteration" ? mark : axes[axisOf(figure)][row];
      if (at == null) continue;
      const x = Math.round(plot.valToPos(at, "x", true)) + 0.5;
      const { left, top, width, height } = plot.bbox;
      if (x < left || x > left + width) continue;
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, top + height);
      context.stroke();
    }
    context.restore();
  }

  function showCursor(figure, plot) {
    const index = plot.cursor.idx;
    const axis = axisOf(figure);
    figure.querySelector(".at").textContent = index == null ? "" : formatPosition(axis, plot.data[0][index]);
    figure.querySelectorAll(".legend b").forEach((cell, curveIndex) => {
      // Not every row has each key: uPlot finds the nearest that has.
      cell.textContent = index == null ? "" : shown(plot.data[curveIndex + 1][plot.cursor.idxs[curveIndex + 1]]);
    });
  }

  function draw(figure) {
    plots.get(figure)?.destroy();
    const holder = figure.querySelector(".plot");
    const { columns, unseen } = columnsOf(figure);
    const note = figure.querySelector(".unseen");
    note.hidden = !unseen;
    note.textContent = `${unseen} values are not positive, and are not shown on a logarithmic axis.`;
    const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 } };
    const format = (_, values) => values.map((value) => (value == null ? "" : String(Number(value.toPrecision(6)))));
    const plot = new uPlot({
      width: holder.clientWidth,
      height: holder.clientHeight,
      legend: { show: false },
      cursor: { sync: { key: "run", setSeries: false }, points: { size: 7 } },
      scales: { x: { time: false }, y: { distr: choice.logarithmic ? 3 : 1 } },
      axes: [{ ...axis, values: format, size: 34 }, { ...axis, values: choice.logarithmic ? undefined : format, size: 58 }],
      series: [{}].concat(chartOf(figure).curves.map((curve, curveIndex) => ({
        label: curve.key,
        stroke: colour(`c${curveIndex % COLOURS}`),
        width: 1.75,
        show: !hiddenKeys.get(figure).has(curve.key),
        points: { show: curve.at.length < 40, size: 5 },
      }))),
      hooks: { setCursor: [(self) => showCursor(figure, self)], drawClear: [(self) => drawMarks(self, figure)] },
    }, columns, holder);
    plots.set(figure, plot);
  }

  function legend(figure) {
    const box = figure.querySelector(".legend");
    chartOf(figure).curves.forEach((curve, curveIndex) => {
      const button = document.createElement("button");
      button.type = "button";
      button.style.setProperty("--curve", `var(--c${curveIndex % COLOURS})`);
      button.setAttribute("aria-pressed", "true");
      button.title = "Show or hide this curve";
      const name = document.createElement("span");
      name.textContent = curve.key;
      button.append(name, document.createElement("b"));
      button.addEventListener("click", () => {
        const keys = hiddenKeys.get(figure);
        const show = keys.delete(curve.key);
        if (!show) keys.add(curve.key);
        button.setAttribute("aria-pressed", String(show));
        plots.get(figure)?.setSeries(curveIndex + 1, { show });
      });
      box.append(button);
    });
  }

  // What the mouse does, for the keyboard, and in words.
  function moveByKey(figure, event) {
    const plot = plots.get(figure);
    const last = plot.data[0].length - 1;
    const current = plot.cursor.idx;
    const stride = event.shiftKey ? 10 : 1;
    const targets = {
      ArrowLeft: current == null ? last : Math.max(current - stride, 0),
      ArrowRight: current == null ? 0 : Math.min(current + stride, last),
      Home: 0,
      End: last,
    };
    if (event.key === "Escape") {
      plot.setCursor({ left: -10, top: -10 }, true, true);
      return;
    }
    if (!(event.key in targets)) return;
    event.preventDefault();
    const left = plot.valToPos(plot.data[0][targets[event.key]], "x");
    plot.setCursor({ left, top: plot.over.clientHeight / 2 }, true, true);
    const values = [...figure.querySelectorAll(".legend button")].map((button) => [...button.children].map((child) => child.textContent).join(" "));
    document.getElementById("spoken").textContent = `${figure.querySelector(".at").textContent}: ${values.join(", ")}`;
  }

  const drawAll = () => [...plots.keys()].forEach(draw);

  // A run may have hundreds of charts: each is drawn when it comes near the window.
  const nearby = new IntersectionObserver((entries) => {
    for (const entry of entries)
      if (entry.isIntersecting && !plots.has(entry.target)) draw(entry.target);
  }, { rootMargin: "400px" });
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const plot = plots.get(target.closest(".chart"));
      if (plot && target.clientWidth && plot.width !== target.clientWidth)
        plot.setSize({ width: target.clientWidth, height: target.clientHeight });
    }
  });
  for (const figure of figures) {
    legend(figure);
    nearby.observe(figure);
    const holder = figure.querySelector(".plot");
    resized.observe(holder);
    holder.addEventListener("keydown", (event) => moveByKey(figure, event));
  }

  const controls = document.getElementById("controls");
  if (controls) {
    controls.hidden = document.getElementById("keys").hidden = false;
    document.getElementById("unscripted").hidden = true;
    choice.axis = controls.querySelector("[name=axis]:checked").value;
    controls.addEventListener("change", (event) => {
      if (event.target.name === "axis") choice.axis = event.target.value;
      else if (event.target.id === "logarithmic") choice.logarithmic = event.target.checked;
      else return;
      drawAll();
    });
    document.getElementById("find")?.addEventListener("input", (event) => {
      const wanted = event.target.value.toLowerCase();
      for (const figure of figures) figure.hidden = !figure.dataset.name.toLowerCase().includes(wanted);
    });
  }

  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const name = () => (theme.textContent = isDark() ? "Light" : "Dark");
  theme.hidden = false;
  name();
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    name();
    drawAll();
  });
  system.addEventListener("change", () => {
    name();
    drawAll();
  });
})();

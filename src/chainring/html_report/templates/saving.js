// Downloads of what a chart shows: a picture, and its points as a table.

function offer(name, blob) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const fileName = (figure, ending) => `${figure.chart.name.replace(/[^\w.-]+/g, "-").slice(0, 80) || "chart"}.${ending}`;

function savePicture(figure) {
  if (!figure.plot) draw(figure);
  const seen = figure.plot.ctx.canvas;
  const scale = devicePixelRatio;
  const [line, margin] = [20 * scale, 12 * scale];
  const canvas = element("canvas");
  const context = canvas.getContext("2d");
  context.font = `${13 * scale}px system-ui, sans-serif`;
  // The names in rows below the picture, as many in each as there is room for.
  const rows = [[]];
  let used = margin;
  for (const { entry } of figure.curves) {
    const width = context.measureText(entry.label).width + 36 * scale;
    if (used + width > seen.width && rows.at(-1).length) {
      rows.push([]);
      used = margin;
    }
    rows.at(-1).push({ entry, x: used });
    used += width;
  }
  canvas.width = seen.width + 2 * margin;
  canvas.height = seen.height + (rows.length + 2) * line;
  context.fillStyle = css("card");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = css("ink");
  context.font = `600 ${14 * scale}px system-ui, sans-serif`;
  context.fillText(figure.chart.title, margin, line);
  context.drawImage(seen, margin, 1.4 * line);
  context.font = `${13 * scale}px system-ui, sans-serif`;
  rows.forEach((row, number) => row.forEach(({ entry, x }) => {
    const y = seen.height + (number + 2) * line;
    context.fillStyle = colour(entry.number);
    context.fillRect(x, y - 6 * scale, 14 * scale, 3 * scale);
    context.fillStyle = css("ink");
    context.fillText(entry.label, x + 20 * scale, y);
  }));
  canvas.toBlob((blob) => offer(fileName(figure, "png"), blob));
}

function saveTable(figure) {
  if (!figure.plot) draw(figure);
  const cell = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  const number = (value) => (value == null ? "" : String(Number(value.toPrecision(7))));
  const lines = [["run", "key", choice.axis, choice.smoothing ? "smoothed" : "value"].join(",")];
  const [from, to] = figure.range.x;
  for (const { entry, smooth } of figure.curves)
    smooth[0].forEach((x, i) => {
      if (x >= from && x <= to) lines.push([cell(data.runs[entry.run].name), cell(entry.curve.key), String(x), number(smooth[1][i])].join(","));
    });
  offer(fileName(figure, "csv"), new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }));
}

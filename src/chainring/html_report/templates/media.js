// Images, texts and histograms: a slider over iterations shows one of each run at a time.

const chosen = new Map(); // by key the iteration that the slider is at, if it is not the last

function showMedia() {
  for (const series of document.querySelectorAll(".series")) {
    const iterations = [...new Set([...series.querySelectorAll("figure")].map((figure) => Number(figure.dataset.iteration)))].sort((one, other) => one - other);
    if (iterations.length < 2 || iterations.some(Number.isNaN)) continue;
    let slider = series.querySelector("input");
    if (!slider) {
      slider = element("input", { type: "range", min: 0, step: 1 });
      slider.setAttribute("aria-label", `Iteration of ${series.dataset.key}`);
      const label = element("label", { className: "when" }, slider, element("output"));
      series.querySelector("h3").after(label);
      slider.addEventListener("input", () => {
        if (slider.value === slider.max) chosen.delete(series.dataset.key);
        else chosen.set(series.dataset.key, Number(slider.dataset.iterations.split(",")[slider.value]));
        showOne(series, slider);
      });
    }
    slider.max = iterations.length - 1;
    slider.dataset.iterations = iterations;
    const wanted = chosen.get(series.dataset.key);
    slider.value = wanted === undefined ? slider.max : Math.max(iterations.findLastIndex((each) => each <= wanted), 0);
    showOne(series, slider);
  }
  const hidden = new Set([...choice.hiddenRuns].map((run) => data.runs[run].name));
  for (const media of document.querySelectorAll(".media")) media.hidden = hidden.has(media.dataset.run);
}

function showOne(series, slider) {
  const iteration = Number(slider.dataset.iterations.split(",")[slider.value]);
  slider.nextElementSibling.textContent = `iteration ${iteration}`;
  slider.setAttribute("aria-valuetext", `iteration ${iteration}`);
  for (const media of series.querySelectorAll(".media")) {
    const all = [...media.querySelectorAll("figure")];
    const last = all.findLastIndex((figure) => Number(figure.dataset.iteration) <= iteration);
    all.forEach((figure, index) => { figure.hidden = index !== last; });
  }
}

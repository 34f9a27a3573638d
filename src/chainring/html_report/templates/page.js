// The controls of the page.

function fillAxes() {
  const names = AXES.filter((name) => data.runs.some((run) => run.logs.some((log) => name in log.axes)));
  const fieldset = document.getElementById("axes");
  if (!names.includes(choice.axis)) choice.axis = names[0] ?? "iteration";
  if (fieldset.querySelectorAll("label").length === names.length) return;
  fieldset.querySelectorAll("label").forEach((label) => label.remove());
  for (const name of names) {
    const input = element("input", { type: "radio", name: "axis", value: name, checked: name === choice.axis });
    fieldset.append(element("label", {}, input, ` ${name}`));
  }
}

function fillRuns() {
  const list = document.getElementById("run-list");
  if (!list) return;
  document.getElementById("legend").hidden = false;
  for (const swatch of document.querySelectorAll(".swatch")) swatch.style.background = colour(Number(swatch.dataset.run));
  if (list.children.length === data.runs.length && list.dataset.dark === String(isDark())) return;
  list.dataset.dark = isDark();
  list.replaceChildren(...data.runs.map((run, index) => {
    const button = element("button", { type: "button", title: `Show or hide ${run.name}; a double-click shows it alone` }, element("span", { textContent: run.name }));
    button.style.setProperty("--curve", colour(index));
    button.setAttribute("aria-pressed", String(!choice.hiddenRuns.has(index)));
    button.addEventListener("click", () => {
      if (!choice.hiddenRuns.delete(index)) choice.hiddenRuns.add(index);
      changeRuns();
    });
    button.addEventListener("dblclick", () => {
      choice.hiddenRuns = new Set(data.runs.keys());
      choice.hiddenRuns.delete(index);
      changeRuns();
    });
    return element("li", {}, button);
  }));
  findRuns();
}

function findRuns() {
  const wanted = document.getElementById("find-run").value.toLowerCase();
  [...document.getElementById("run-list").children].forEach((item, index) => { item.hidden = !data.runs[index].name.toLowerCase().includes(wanted); });
}

function changeRuns() {
  [...document.getElementById("run-list").children].forEach((item, index) => item.firstChild.setAttribute("aria-pressed", String(!choice.hiddenRuns.has(index))));
  drawAll();
  showMedia();
}

function showAll() {
  fillAxes();
  fillRuns();
  buildCharts();
  showMedia();
  const hasCharts = figures.size > 0;
  document.getElementById("controls").hidden = document.getElementById("keys").hidden = !hasCharts;
  document.querySelector(".find").hidden = figures.size < 8;
  drawAll();
}

document.getElementById("unscripted").hidden = true;
document.getElementById("controls").addEventListener("change", (event) => {
  if (event.target.name === "axis") {
    choice.axis = event.target.value;
    choice.zoom = null;
  } else if (event.target.id === "logarithmic") choice.logarithmic = event.target.checked;
  else return;
  drawAll();
});
document.getElementById("smoothing").addEventListener("input", (event) => {
  choice.smoothing = Number(event.target.value);
  document.getElementById("smoothed").textContent = choice.smoothing;
  requestAnimationFrame(drawAll);
});
document.getElementById("find").addEventListener("input", (event) => {
  choice.find = event.target.value;
  find();
});
// Without its button, All shows the runs that are found and None hides them.
const foundRuns = () => [...document.getElementById("run-list").children].flatMap((item, index) => (item.hidden ? [] : [index]));
document.getElementById("show-all")?.addEventListener("click", () => {
  foundRuns().forEach((run) => choice.hiddenRuns.delete(run));
  changeRuns();
});
document.getElementById("show-none")?.addEventListener("click", () => {
  foundRuns().forEach((run) => choice.hiddenRuns.add(run));
  changeRuns();
});
document.getElementById("find-run")?.addEventListener("input", findRuns);
if (matchMedia("(max-width: 60rem)").matches) document.getElementById("legend")?.removeAttribute("open");

const theme = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
function changeTheme() {
  theme.textContent = isDark() ? "Light" : "Dark";
  fillRuns();
  drawAll();
}
theme.hidden = false;
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  changeTheme();
});
system.addEventListener("change", changeTheme);

showAll();
changeTheme();
if (data.mark) follow();

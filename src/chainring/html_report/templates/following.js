// A page that a server watches the runs for: what has changed takes the place of what is shown.

function follow() {
  const status = document.getElementById("following");
  const source = new EventSource(`events?${data.mark}`);
  let last = "";
  source.addEventListener("change", (event) => {
    const change = JSON.parse(event.data);
    for (const [index, run] of Object.entries(change.runs)) data.runs[index] = run;
    for (const [name, html] of Object.entries(change.parts)) replacePart(document.querySelector(`[data-part="${name}"]`), html);
    data.partings = change.partings;
    last = ` Last change at ${new Date().toLocaleTimeString("en-GB")}.`;
    status.textContent = `Following the runs.${last} ${change.trouble}`;
    showAll();
  });
  source.addEventListener("open", () => { status.textContent = `Following the runs.${last}`; });
  source.addEventListener("reload", () => location.reload());
  source.addEventListener("end", () => {
    source.close();
    status.textContent = `The command that followed the runs has ended.${last}`;
  });
  source.addEventListener("error", () => { status.textContent = `The command that follows the runs does not answer.${last}`; });
}

// What was unfolded stays so, and what was scrolled. A section is shown as soon as it has something.
function replacePart(part, html) {
  const section = part.closest("section");
  if (section && section.id !== "curves") section.hidden = document.querySelector(`nav a[href="#${section.id}"]`).hidden = !html;
  const unfolded = [...part.querySelectorAll("details")].map((each) => each.open);
  const places = [...part.querySelectorAll(".scroll")].map((each) => each.scrollTop);
  part.innerHTML = html;
  part.querySelectorAll("details").forEach((each, index) => { each.open = unfolded[index] ?? each.open; });
  part.querySelectorAll(".scroll").forEach((each, index) => { each.scrollTop = places[index] ?? 0; });
}

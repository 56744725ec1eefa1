/** Charts are as wide as their place at once; Plotly's own way waits, and the page is too wide meanwhile. */
const follow = new ResizeObserver((entries) => {
  for (const { target } of entries) Plotly.relayout(target, { autosize: true });
});

/** Buttons that switch curves on and off in all charts of their group, and smooth them. */
function connectSwitches(section, group) {
  const buttons = [...section.querySelectorAll(".curves button")], charts = [...section.querySelectorAll(".charts .chart")];
  const ready = () => charts.filter((chart) => chart.data);
  const show = (shown) => {
    group.shown = shown;
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", shown[i]));
    for (const chart of ready()) {
      Plotly.restyle(chart, { visible: chart.data.map((trace) => shown[trace.meta]) });
      const below = group.frames[chart.dataset.y]?.below ?? [], on = [...shown.keys()].filter((i) => shown[i]);
      if (on.length && on.every((i) => below.includes(i))) {
        Plotly.relayout(chart, { "xaxis.autorange": true, "yaxis.autorange": true }); // or they would not be seen
      }
    }
  };
  buttons.forEach((button, index) => {
    button.addEventListener("click", () => show(group.shown.map((on, i) => (i === index ? !on : on))));
    button.addEventListener("dblclick", () => show(group.shown.map((_, i) => i === index)));
  });
  for (const button of section.querySelectorAll("[data-all]")) {
    button.addEventListener("click", () => show(group.shown.map(() => button.dataset.all === "true")));
  }
  const smooth = section.querySelector(".smooth");
  smooth.setAttribute("aria-pressed", group.smooth);
  smooth.addEventListener("click", () => {
    group.smooth = !group.smooth;
    smooth.setAttribute("aria-pressed", group.smooth);
    for (const chart of ready()) redrawCurves(chart, group);
  });
}

/** A row of several seeds opens to them. */
function connectSeeds(body) {
  const button = body.querySelector("[aria-expanded]");
  button?.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", open);
    for (const row of [...body.rows].slice(1)) row.hidden = !open;
  });
}

/** A click on a column's title sorts by it, numbers from the largest; a second click turns it round. Seeds stay below their mean. */
function connectSorting(table) {
  const heads = [...table.tHead.rows[0].cells], cell = (body, column) => body.rows[0].cells[column];
  heads.forEach((head, column) => {
    const numeric = [...table.tBodies].some((body) => cell(body, column).classList.contains("number"));
    head.classList.toggle("number", numeric);
    const [usual, other] = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
    const value = (body) => cell(body, column).dataset.value;
    const compare = (a, b) => (numeric ? value(a) - value(b) : value(a).localeCompare(value(b)));
    head.addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === usual ? other : usual;
      heads.forEach((any) => any.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", direction);
      const sign = direction === "ascending" ? 1 : -1;
      table.append(...[...table.tBodies].sort((a, b) => sign * compare(a, b)));
    });
  });
}

/** Links to something inside closed blocks open them. */
function openTarget() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  for (let block = target; block; block = block.parentElement) if (block.tagName === "DETAILS") block.open = true;
  if (target) target.scrollIntoView();
}

/** The library lies in the page compressed: 5 MB of text as 2 MB. */
async function loadLibrary() {
  const text = atob(document.getElementById("library").textContent), packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const unpacked = new Response(packed).body.pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.text = await new Response(unpacked).text();
  document.head.append(script);
}

/** How far a block is from what is to be seen: that is drawn first. */
function away(block) {
  const { top, bottom } = block.getBoundingClientRect();
  return Math.max(top - innerHeight, -bottom, 0);
}

async function main() {
  const groups = JSON.parse(document.getElementById("data").textContent);
  for (const table of document.querySelectorAll(".overview table")) {
    connectSorting(table);
    for (const body of table.tBodies) connectSeeds(body);
  }
  const sections = [...document.querySelectorAll("[data-group]")];
  for (const section of sections) {
    const group = groups[section.dataset.group];
    group.shown = group.curves.map(() => true);
    group.smooth = group.curves.some((curve) => curve.round.length >= LONG);
    connectSwitches(section, group);
  }
  addEventListener("hashchange", openTarget);
  openTarget();
  await new Promise((done) => setTimeout(done, 20)); // tables are to be read while the library loads
  await loadLibrary();
  while (sections.length) {
    const [section] = sections.sort((a, b) => away(a) - away(b)).splice(0, 1);
    const group = groups[section.dataset.group];
    for (const chart of section.querySelectorAll(".chart")) {
      await (chart.classList.contains("clients") ? drawClients : drawCurves)(chart, group);
      follow.observe(chart);
      await new Promise((done) => setTimeout(done)); // a page of many charts can be read meanwhile
    }
  }
}

function fail(error) {
  document.documentElement.dataset.state = "failed";
  const place = document.getElementById("failure");
  place.textContent = `The charts could not be drawn: ${error}`;
  place.hidden = false;
}

addEventListener("error", (event) => fail(event.message));
main().then(() => { document.documentElement.dataset.state ??= "drawn"; }, fail);

"use strict";

const INK = "#1f2933", GRID = "#e4e7eb";
const SHADES = ["#e3edf7", "#7fb0d8", "#2b6cb0", "#173a5e"];
// Between powers of ten Plotly leaves the unit out.
const BARE = [..."23456789"].flatMap((digit) =>
  ["", "0", "00"].flatMap((zeros) => ["", "k", "M", "G", "T", "P"].map((unit) => digit + zeros + unit)));
const BYTES = { tickformat: "~s", ticksuffix: "B", labelalias: Object.fromEntries(BARE.map((text) => [text, `${text}B`])) };
const AXES = {
  accuracy: { title: { text: "accuracy, %" } },
  loss: { title: { text: "loss" }, type: "log", tickformat: "~g", nticks: 4 },
  round: { title: { text: "round" }, rangemode: "tozero" },
  uplink: { title: { text: "bytes sent up by all clients so far" }, type: "log", ...BYTES },
  traffic: { title: { text: "bytes sent up and down so far" }, type: "log", ...BYTES },
};
const FAMILY = getComputedStyle(document.body).fontFamily;
const BASE = {
  font: { family: FAMILY, size: 12, color: INK },
  hoverlabel: { font: { family: FAMILY, size: 12 } },
  margin: { l: 56, r: 14, t: 10, b: 46 },
  paper_bgcolor: "transparent",
  plot_bgcolor: "transparent",
  showlegend: false,
  hovermode: "closest",
  dragmode: "zoom",
  modebar: { bgcolor: "transparent", color: "#9aa5b1", activecolor: INK },
};
// Named one by one, as Plotly's own choice may have a button that sends the chart away.
const CONFIG = {
  displaylogo: false,
  displayModeBar: "hover",
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
};

/** An axis of every chart: quiet lines, no frame. */
function axis(more) {
  return { gridcolor: GRID, linecolor: GRID, zeroline: false, automargin: true, ...more };
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  const power = Math.max(0, Math.min(units.length - 1, Math.floor(Math.log10(bytes) / 3)));
  return `${Number((bytes / 1000 ** power).toPrecision(3))} ${units[power]}`;
}

const FIGURES = {
  accuracy: (value) => `${value.toFixed(2)} %`,
  loss: (value) => `${Number(value.toPrecision(4))}`,
};

/** What a curve says where it is pointed at. */
function tell(curve, y, i) {
  const [mean, low, high] = ["mean", "low", "high"].map((name) => curve[y][name]?.[i] ?? null);
  if (mean === null) return "";
  const show = FIGURES[y], seeds = curve.seeds[i];
  const figure = seeds > 1 ? `mean ${show(mean)}, ${show(low)} to ${show(high)} over ${seeds} seeds` : show(mean);
  return `${y} ${figure}<br>round ${curve.round[i]}, ${size(curve.uplink[i])} up, ${size(curve.traffic[i])} in all`;
}

function hover(curve, y, points) {
  return {
    name: curve.label,
    customdata: points.map((i) => tell(curve, y, i)),
    hovertemplate: "<b>%{fullData.name}</b><br>%{customdata}<extra></extra>",
  };
}

/** From the lowest to the highest of several seeds. */
function band(curve, x, y) {
  const { low, high } = curve[y], known = [...high.keys()].filter((i) => high[i] !== null), back = known.toReversed();
  return {
    x: [...known, ...back].map((i) => curve[x][i]),
    y: [...known.map((i) => high[i]), ...back.map((i) => low[i])],
    mode: "lines",
    fill: "toself",
    fillcolor: `${curve.color}2b`,
    line: { width: 0 },
    hoverinfo: "skip",
  };
}

function line(curve, x, y) {
  return {
    x: curve[x],
    y: curve[y].mean,
    mode: curve.round.length < 40 ? "lines+markers" : "lines",
    line: { color: curve.color, dash: curve.dash, width: 1.6 },
    marker: { color: curve.color, size: 5 },
    ...hover(curve, y, [...curve.round.keys()]),
  };
}

/** An arrow at the upper edge for each point above it. */
function arrows(curve, x, y, top) {
  const above = [...curve.round.keys()].filter((i) => curve[y].mean[i] > top);
  return {
    x: above.map((i) => curve[x][i]),
    y: above.map(() => top),
    mode: "markers",
    marker: { color: curve.color, size: 9, symbol: "triangle-up" },
    cliponaxis: false,
    ...hover(curve, y, above),
  };
}

/** Below some 1.5 decades Plotly would label every digit, one over the other, if it were given more. */
function numTicks(curves, x) {
  const values = curves.flatMap((curve) => curve[x]);
  const decades = Math.log10(values.reduce((a, b) => Math.max(a, b)) / values.reduce((a, b) => Math.min(a, b)));
  return decades < 1.6 ? 3 : 5;
}

/** One quantity of all curves of a group against rounds or bytes. */
function drawCurves(chart, group) {
  const { x, y } = chart.dataset, top = y === "loss" ? group.loss_top : null;
  const traces = (make, wanted = () => true) => group.curves.flatMap((curve, index) =>
    wanted(curve[y]) ? [{ type: "scatter", meta: index, visible: group.shown[index], ...make(curve, x, y, top) }] : []);
  const data = [...traces(band, ({ low }) => low), ...traces(line), ...traces(arrows, () => top)];
  const yaxis = axis({ ...AXES[y], ...(top && { autorangeoptions: { clipmax: top } }) });
  const xaxis = axis({ ...AXES[x], ...(AXES[x].type === "log" && { nticks: numTicks(group.curves, x) }) });
  const layout = { ...BASE, xaxis, yaxis };
  return Plotly.newPlot(chart, data, layout, CONFIG);
}

/** Clients from left to right, classes from top to bottom; the scale is a square root, white is exactly none. */
function drawClients(chart, group) {
  const last = SHADES.length - 1, scale = SHADES.map((shade, i) => [Math.max((i / last) ** 2, 1e-6), shade]);
  const few = group.clients[0].length <= 150;
  const trace = {
    type: "heatmap",
    z: group.clients,
    zmin: 0,
    zmax: Math.max(...group.clients.flat()),
    xgap: few ? 1 : 0,
    ygap: 1,
    colorscale: [[0, "#ffffff"], ...scale],
    colorbar: { title: { text: "samples", side: "right" }, thickness: 12, outlinewidth: 0 },
    hovertemplate: "client %{x}, class %{y}: <b>%{z}</b> samples<extra></extra>",
  };
  const layout = {
    ...BASE,
    margin: { ...BASE.margin, t: 30 },
    xaxis: axis({ title: { text: "client" }, showgrid: false, constrain: "domain" }),
    yaxis: axis({ title: { text: "class" }, showgrid: false, autorange: "reversed", ...(group.clients.length <= 10 && { dtick: 1 }) }),
  };
  return Plotly.newPlot(chart, [trace], layout, CONFIG);
}

/** Charts are as wide as their place at once; Plotly's own way waits, and the page is too wide meanwhile. */
const follow = new ResizeObserver((entries) => {
  for (const { target } of entries) Plotly.relayout(target, { autosize: true });
});

/** Buttons that switch curves on and off in all charts of their group. */
function connectSwitches(section, group) {
  const buttons = [...section.querySelectorAll(".switches [aria-pressed]")];
  const show = (shown) => {
    group.shown = shown;
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", shown[i]));
    for (const chart of section.querySelectorAll(".charts .js-plotly-plot")) {
      Plotly.restyle(chart, { visible: chart.data.map((trace) => shown[trace.meta]) });
    }
  };
  buttons.forEach((button, index) => {
    button.addEventListener("click", () => show(group.shown.map((on, i) => (i === index ? !on : on))));
    button.addEventListener("dblclick", () => show(group.shown.map((_, i) => i === index)));
  });
  for (const button of section.querySelectorAll("[data-all]")) {
    button.addEventListener("click", () => show(group.shown.map(() => button.dataset.all === "true")));
  }
}

/** A click on a column's title sorts by it, numbers from the largest; a second click turns it round. */
function connectSorting(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const numeric = [...body.rows].some((row) => row.cells[column].classList.contains("number"));
    head.classList.toggle("number", numeric);
    const [usual, other] = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
    const value = (row) => row.cells[column].dataset.value;
    const compare = (a, b) => (numeric ? value(a) - value(b) : value(a).localeCompare(value(b)));
    head.addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === usual ? other : usual;
      heads.forEach((any) => any.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", direction);
      const sign = direction === "ascending" ? 1 : -1;
      body.append(...[...body.rows].sort((a, b) => sign * compare(a, b)));
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
  const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
  const unpacked = new Response(packed).body.pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.text = await new Response(unpacked).text();
  document.head.append(script);
}

async function main() {
  const groups = JSON.parse(document.getElementById("data").textContent);
  connectSorting(document.querySelector(".overview table"));
  addEventListener("hashchange", openTarget);
  openTarget();
  await loadLibrary();
  for (const section of document.querySelectorAll("[data-group]")) {
    const group = groups[section.dataset.group];
    group.shown = group.curves.map(() => true);
    connectSwitches(section, group);
    for (const chart of section.querySelectorAll(".chart")) {
      await (chart.classList.contains("clients") ? drawClients : drawCurves)(chart, group);
      follow.observe(chart);
      await new Promise((done) => setTimeout(done)); // a page of many charts can be read meanwhile
    }
  }
  openTarget(); // what was drawn above it may have moved it
}

function fail(error) {
  document.documentElement.dataset.state = "failed";
  const place = document.getElementById("failure");
  place.textContent = `The charts could not be drawn: ${error}`;
  place.hidden = false;
}

addEventListener("error", (event) => fail(event.message));
main().then(() => { document.documentElement.dataset.state ??= "drawn"; }, fail);

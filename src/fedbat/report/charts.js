"use strict";

const LONG = 40; // rounds: shorter curves have a marker at each, longer ones are smoothed at first
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
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "autoScale2d", "resetScale2d"]],
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

/** Each point as the mean of the last five, of fewer at the beginning; a gap stays one until they are past it. */
function smooth(values) {
  return values.map((_, i) => {
    const last = values.slice(Math.max(0, i - 4), i + 1);
    return last.includes(null) ? null : last.reduce((a, b) => a + b) / last.length;
  });
}

/** What is drawn of a curve: as it is, or smoothed. */
function drawn(group, curve, y) {
  const smoothed = () => Object.fromEntries(Object.entries(curve[y]).map(([name, values]) => [name, smooth(values)]));
  return group.smooth ? { ...curve[y], ...smoothed() } : curve[y];
}

/** What a curve says where it is pointed at: always the figures of that round. */
function tell(curve, y, i) {
  const [mean, low, high] = ["mean", "low", "high"].map((name) => curve[y][name]?.[i] ?? null);
  if (mean === null) return "";
  const show = FIGURES[y], seeds = curve.seeds[i];
  const figure = seeds > 1 ? `mean ${show(mean)}, ${show(low)} to ${show(high)} over ${seeds} seeds` : show(mean);
  return `${y} ${figure}<br>round ${curve.round[i]}, ${size(curve.uplink[i])} up, ${size(curve.traffic[i])} in all`;
}

function hover(curve, y, points, smoothed) {
  const drawn = (i) => (smoothed && smoothed[i] !== null ? `<br>drawn: ${FIGURES[y](smoothed[i])}, mean of 5 rounds` : "");
  return {
    name: curve.label,
    customdata: points.map((i) => tell(curve, y, i) + drawn(i)),
    hovertemplate: "<b>%{fullData.name}</b><br>%{customdata}<extra></extra>",
  };
}

/** From the lowest to the highest of several seeds. */
function band(curve, x, { low, high }, { shade }) {
  const known = [...high.keys()].filter((i) => high[i] !== null), back = known.toReversed();
  return {
    x: [...known, ...back].map((i) => curve[x][i]),
    y: [...known.map((i) => high[i]), ...back.map((i) => low[i])],
    mode: "lines",
    fill: "toself",
    fillcolor: `${curve.color}${shade}`,
    line: { width: 0 },
    hoverinfo: "skip",
  };
}

function line(curve, x, { mean }, { y, smoothed }) {
  return {
    x: curve[x],
    y: mean,
    mode: curve.round.length < LONG ? "lines+markers" : "lines",
    line: { color: curve.color, dash: curve.dash, width: 1.6 },
    marker: { color: curve.color, size: 5 },
    ...hover(curve, y, [...curve.round.keys()], smoothed && mean),
  };
}

/** An arrow at the upper edge for each point above it. */
function arrows(curve, x, { mean }, { y, smoothed, top }) {
  const above = [...mean.keys()].filter((i) => mean[i] > top);
  return {
    x: above.map((i) => curve[x][i]),
    y: above.map(() => top),
    mode: "markers",
    marker: { color: curve.color, size: 9, symbol: "triangle-up" },
    cliponaxis: false,
    ...hover(curve, y, above, smoothed && mean),
  };
}

/** Below some 1.5 decades Plotly would label every digit, one over the other, if it were given more. */
function numTicks([low, high]) {
  return Math.log10(high / low) < 1.6 ? 3 : 5;
}

/** From where the first curve enters the frame to where the last one ends. */
function extent(curves, x, y, frame) {
  const inside = (value) => value !== null && (y === "loss" ? value <= frame.high : value >= frame.low);
  const entered = (curve) => (frame ? Math.max(0, curve[y].mean.findIndex(inside)) : 0);
  const near = curves.filter((_, i) => !frame?.below.includes(i));
  return [Math.min(...near.map((curve) => curve[x][entered(curve)])), Math.max(...near.map((curve) => curve[x].at(-1)))];
}

/** A range as Plotly wants it on a logarithmic axis, with a margin. */
function logarithmic(range, margin = 0) {
  const [low, high] = range.map(Math.log10), space = margin * (high - low);
  return [low - space, high + space];
}

function traces(chart, group) {
  const { x, y } = chart.dataset, top = y === "loss" ? group.loss_top : null;
  const banded = ({ [y]: { low } }) => low;
  const how = { y, top, smoothed: group.smooth, shade: group.curves.filter(banded).length > 4 ? "16" : "2b" };
  const make = (kind, wanted = () => true) => group.curves.flatMap((curve, index) => (wanted(curve)
    ? [{ type: "scatter", meta: index, visible: group.shown[index], ...kind(curve, x, drawn(group, curve, y), how) }]
    : []));
  return [...make(band, banded), ...make(line), ...make(arrows, () => top)];
}

/** One quantity of all curves of a group against rounds or bytes; first what is near the best. */
function drawCurves(chart, group) {
  const { x, y } = chart.dataset, frame = group.frames[y], top = y === "loss" ? group.loss_top : null;
  const yaxis = axis({ ...AXES[y], ...(top && { autorangeoptions: { clipmax: top } }) });
  const xaxis = axis(AXES[x]), wide = extent(group.curves, x, y, frame);
  if (frame) yaxis.range = y === "loss" ? logarithmic([frame.low, frame.high]) : [frame.low, frame.high];
  if (AXES[x].type === "log") xaxis.nticks = numTicks(wide);
  if (frame && AXES[x].type === "log") xaxis.range = logarithmic(wide, 0.03);
  return Plotly.newPlot(chart, traces(chart, group), { ...BASE, xaxis, yaxis }, CONFIG);
}

/** The same curves again, smoothed or not, on the axes as they are. */
function redrawCurves(chart, group) {
  return Plotly.react(chart, traces(chart, group), chart.layout, CONFIG);
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

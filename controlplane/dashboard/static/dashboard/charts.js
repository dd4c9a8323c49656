// Draws the figures that the server put into the page, in the colours of the theme in force. It makes no figure itself:
// without this file the same numbers are in the table below each chart.

import { inBrowserZone, stamp } from "./ages.js";

const COLOUR_TOKEN = /^--[a-z0-9-]+$/;
const OPTIONS = { displayModeBar: false, responsive: true, showTips: false };

// A custom property that says light-dark(…) only becomes a colour where it is used as one.
function colourOf(token, probe) {
  probe.style.color = `var(${token})`;
  return getComputedStyle(probe).color;
}

function resolved(value, probe) {
  if (typeof value === "string") return COLOUR_TOKEN.test(value) ? colourOf(value, probe) : value;
  if (Array.isArray(value)) return value.map((each) => resolved(each, probe));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, resolved(each, probe)]));
}

function themed(layout) {
  const axis = { gridcolor: "--line", linecolor: "--line", zerolinecolor: "--line", tickfont: { size: 11 }, fixedrange: true };
  const family = getComputedStyle(document.body).fontFamily;
  return {
    ...layout,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family, size: 12, color: "--ink-quiet" },
    margin: { l: 48, r: 8, t: 8, b: 40 },
    hovermode: "x unified",
    hoverlabel: { bgcolor: "--canvas", bordercolor: "--line-strong", font: { family, size: 12, color: "--ink" } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } },
    dragmode: false,
    xaxis: { ...axis, showgrid: false, spikecolor: "--line-strong", spikethickness: 1, spikedash: "solid", ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
  };
}

const UTC_STAMP = /^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$/;
const utcMs = (text) => Date.parse(`${text.replace(" ", "T")}Z`);

// Plotly shows times as they are written: the server's are UTC.
function inZone(value) {
  if (typeof value === "string") return UTC_STAMP.test(value) ? stamp(utcMs(value)) : value;
  if (Array.isArray(value)) return value.map(inZone);
  if (value === null || typeof value !== "object") return value;
  if (typeof value.x0 === "string" && value.dx) {
    const x = value.y.map((_, number) => stamp(utcMs(value.x0) + number * value.dx));
    const { x0, dx, ...rest } = value;
    return { ...rest, x };
  }
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, inZone(each)]));
}

function draw(place) {
  const written = JSON.parse(place.dataset.figure);
  const figure = inBrowserZone() ? inZone(written) : written;
  const layout = themed(figure.layout);
  if (layout.showlegend) layout.margin = { ...layout.margin, t: 28 };
  window.Plotly.react(place, resolved(figure.data, place), resolved(layout, place), OPTIONS);
}

function drawAll(within) {
  for (const place of within.querySelectorAll("[data-figure]")) draw(place);
}

// It is large and may come late: the page, its keys and its fragments do not wait for it.
if (!window.Plotly) {
  await new Promise((loaded) => document.getElementById("plotly").addEventListener("load", loaded, { once: true }));
}

document.body.addEventListener("htmx:beforeSwap", (event) => {
  for (const place of event.detail.target.querySelectorAll("[data-figure]")) window.Plotly.purge(place);
});

document.body.addEventListener("htmx:afterRequest", (event) => {
  const fragment = document.getElementById(event.detail.target.id);
  if (event.detail.successful && fragment) drawAll(fragment);
});

document.addEventListener("switchyard:zone", () => drawAll(document));
new MutationObserver(() => drawAll(document)).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(document));

drawAll(document);

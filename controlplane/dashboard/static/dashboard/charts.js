// Draws the figures that the server put into the page, in the colours of the theme in force. It makes no figure itself:
// without this file the same numbers stand in the table below each chart.

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

function draw(place) {
  const figure = JSON.parse(place.dataset.figure);
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

new MutationObserver(() => drawAll(document)).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(document));

drawAll(document);

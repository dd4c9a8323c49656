// Moves a page that shows the past to another time: by the slider, or ten seconds of the recording in each second. Every
// fragment is fetched again from the page's URL with the new `at`, and the URL can be shared.

const SPEED = 10;
const TICK_MS = 1000;
const AFTER_SCRUB_MS = 150;

let playing = 0;
let scrubbing = 0;

const banner = () => document.querySelector("[data-past]");

function move(at) {
  const url = new URL(location.href);
  url.searchParams.set("at", at.toISOString());
  url.searchParams.delete("page");
  history.replaceState(history.state, "", url);
  for (const fragment of document.querySelectorAll("main > .fragment")) {
    fragment.setAttribute("hx-get", url.pathname + url.search);
    window.htmx.process(fragment);
    window.htmx.trigger(fragment, "refetch");
  }
}

function step() {
  const { at, last } = banner().dataset;
  const next = new Date(new Date(at).getTime() + SPEED * TICK_MS);
  if (next > new Date() || next > new Date(last)) stop();
  else move(next);
}

function stop() {
  clearInterval(playing);
  playing = 0;
  show();
}

// What needs this script is shown by it, after each fetch again.
function show() {
  for (const button of document.querySelectorAll("[data-play]")) {
    button.hidden = false;
    button.textContent = playing ? "Stop" : "Play at 10x";
  }
  for (const slider of document.querySelectorAll(".past-slider")) slider.hidden = false;
}

document.addEventListener("click", (event) => {
  if (!event.target.closest("[data-play]")) return;
  if (playing) stop();
  else {
    playing = setInterval(step, TICK_MS);
    show();
    step();
  }
});

document.addEventListener("input", (event) => {
  if (!event.target.matches("[data-scrub]")) return;
  stop();
  clearTimeout(scrubbing);
  const at = new Date(1000 * Number(event.target.value));
  scrubbing = setTimeout(move, AFTER_SCRUB_MS, at);
});

show();
document.body.addEventListener("htmx:afterSettle", show);

// Keeps fragments fresh: hints from the WebSocket cause a refetch at once, a slow poll covers hints that were lost.
// Content always comes from the page's own URL; this file never builds any.

import { ageText, tickAges } from "./ages.js";

const AFTER_HINT_MS = 1000; // at most one refetch of a fragment in this time
const AFTER_LOAD_HINT_MS = 2000; // load changes all the time
const POLL_MS = 10000;
const STALE_AFTER_MS = 2 * POLL_MS;
const AHEAD = "50% 0px"; // of the window's height: fragments in it are fetched
const RECONNECT_FIRST_MS = 500;
const RECONNECT_LONGEST_MS = 10000;

const fetched = new Map(); // fragment id -> { at: performance.now() of its content, asOf: the server's clock then }
const waiting = new Map(); // fragment id -> timer of the refetch that is due
let socketOpen = false;
let unreachable = false;

// One without topics is rendered once: what a user is typing there must stay.
const fragments = () => [...document.querySelectorAll('[data-topics]:not([data-topics=""])')];

function note(fragment) {
  fetched.set(fragment.id, { at: performance.now(), asOf: Number(fragment.dataset.asOf) });
}

function beingRead(fragment) {
  const selection = getSelection();
  return !selection.isCollapsed && fragment.contains(selection.anchorNode);
}

function refetch(id) {
  waiting.delete(id);
  const fragment = document.getElementById(id);
  if (!fragment || document.hidden) return; // a hidden tab catches up when it is shown
  if (beingRead(fragment)) soon(fragment, AFTER_HINT_MS);
  else window.htmx.trigger(fragment, "refetch");
}

function soon(fragment, everyMs) {
  if (waiting.has(fragment.id)) return;
  const sinceMs = performance.now() - (fetched.get(fragment.id)?.at ?? -Infinity);
  waiting.set(fragment.id, setTimeout(refetch, Math.max(0, everyMs - sinceMs), fragment.id));
}

function now(wanted) {
  for (const fragment of wanted) {
    clearTimeout(waiting.get(fragment.id));
    refetch(fragment.id);
  }
}

function concerns(fragment, hint) {
  return fragment.dataset.topics.split(" ").some((entry) => {
    const [topic, key] = entry.split(/:(.*)/s);
    return topic === hint.topic && (!key || !hint.key || key === hint.key);
  });
}

function connect(waitMs) {
  const socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/live`);
  let opened = false;
  socket.addEventListener("open", () => {
    opened = socketOpen = true;
    if (waitMs > RECONNECT_FIRST_MS) now(fragments()); // hints were lost meanwhile
    showConnection();
  });
  socket.addEventListener("message", (message) => {
    const hint = JSON.parse(message.data);
    const everyMs = hint.topic === "load" ? AFTER_LOAD_HINT_MS : AFTER_HINT_MS;
    fragments().filter((fragment) => concerns(fragment, hint)).forEach((fragment) => soon(fragment, everyMs));
  });
  socket.addEventListener("close", () => {
    socketOpen = false;
    showConnection();
    const next = Math.min(RECONNECT_LONGEST_MS, opened ? 2 * RECONNECT_FIRST_MS : 2 * waitMs);
    setTimeout(connect, next * (0.5 + Math.random() / 2), next);
  });
}

// --- connection and age on screen ------------------------------------------------------------------------------------

function showConnection() {
  const state = unreachable ? "disconnected" : socketOpen ? "live" : "polling";
  const indicator = document.getElementById("connection");
  if (indicator.dataset.state !== state) indicator.dataset.state = state;
  document.getElementById("disconnected").hidden = !unreachable;
}

function showAges() {
  const nowMs = performance.now();
  let oldest = 0;
  for (const fragment of fragments()) {
    const { at, asOf } = fetched.get(fragment.id);
    oldest = Math.max(oldest, nowMs - at);
    tickAges(fragment, asOf + nowMs - at);
    const stale = nowMs - at > STALE_AFTER_MS;
    fragment.classList.toggle("stale", stale);
    const label = fragment.querySelector("[data-as-of-text]");
    if (label) label.textContent = stale ? `as of ${ageText((nowMs - at) / 1000)} ago` : "";
  }
  for (const element of document.querySelectorAll("[data-oldest]")) element.textContent = ageText(oldest / 1000);
}

function showProblems() {
  const problems = Number(document.querySelector("nav[data-problems]")?.dataset.problems ?? 0);
  const plain = document.documentElement.dataset.title;
  document.title = problems > 0 ? `✕ ${problems} · ${plain}` : plain;
  const icon = document.getElementById("favicon");
  const wanted = problems > 0 ? icon.dataset.problems : icon.dataset.healthy;
  if (icon.getAttribute("href") !== wanted) icon.setAttribute("href", wanted);
}

function tick() {
  for (const fragment of fragments()) {
    if (performance.now() - fetched.get(fragment.id).at > POLL_MS) soon(fragment, POLL_MS);
  }
  showAges();
}

// --- fetches ---------------------------------------------------------------------------------------------------------

const FOCUSABLE = "a, button, summary";
let before = { states: new Map(), open: [], focus: null, forms: [], field: null }; // of the fragment that is being replaced

function focusIn(fragment) {
  const focused = document.activeElement;
  if (!fragment.contains(focused)) return null;
  const row = focused.closest("[id]");
  return { row: row.id, nth: [...row.querySelectorAll(FOCUSABLE)].indexOf(focused) };
}

function refocus({ row, nth }) {
  document.getElementById(row)?.querySelectorAll(FOCUSABLE)[nth]?.focus({ preventScroll: true });
}

function isChanged(field) {
  if (field.type === "hidden") return false;
  if (field.type === "checkbox" || field.type === "radio") return field.checked !== field.defaultChecked;
  if (field.type === "file") return field.files.length > 0;
  if (!field.options) return "defaultValue" in field && field.value !== field.defaultValue;
  const first = field.multiple ? -1 : Math.max(0, [...field.options].findIndex((one) => one.defaultSelected));
  return [...field.options].some((one, at) => one.selected !== (first < 0 ? one.defaultSelected : at === first));
}

const OF_OPENING = ["csrfmiddlewaretoken", "submission", "seen", "opened"];

// What a form does, and to what.
function purposeOf(form) {
  const hidden = [...form.querySelectorAll("input[type=hidden]")].filter((field) => !OF_OPENING.includes(field.name));
  return JSON.stringify([form.getAttribute("action"), ...hidden.map((field) => [field.name, field.defaultValue])]);
}

// A form in use stays as it is, with the tokens and stored values that it was opened with.
function formsInUse(fragment) {
  return [...fragment.querySelectorAll("form[method=post]")].filter(
    (form) => form.hasAttribute("aria-busy") || form.contains(document.activeElement) || [...form.elements].some(isChanged),
  );
}

function putBack(fragment) {
  for (const form of before.forms) {
    const same = [...fragment.querySelectorAll("form[method=post]")].find((one) => purposeOf(one) === purposeOf(form));
    same?.replaceWith(form);
  }
  if (before.field && fragment.contains(before.field)) before.field.focus({ preventScroll: true });
  before.forms = [];
  before.field = null;
}

document.body.addEventListener("htmx:beforeSwap", (event) => {
  const old = event.detail.target;
  before = {
    states: new Map([...old.querySelectorAll("[data-watch]")].map((element) => [element.id, element.dataset.watch])),
    open: [...old.querySelectorAll("details[open]")].map((element) => element.id),
    focus: focusIn(old),
    forms: formsInUse(old),
    field: document.activeElement.form ? document.activeElement : null,
  };
});

document.body.addEventListener("htmx:afterRequest", (event) => {
  const fragment = document.getElementById(event.detail.target.id);
  if (!event.detail.successful || !fragment) return;
  note(fragment);
  for (const details of before.open) document.getElementById(details)?.setAttribute("open", "");
  for (const element of fragment.querySelectorAll("[data-watch]")) {
    const state = before.states.get(element.id);
    if (state !== undefined && state !== element.dataset.watch) element.classList.add("changed");
  }
  if (before.focus) refocus(before.focus);
  putBack(fragment);
  showProblems();
  reachable();
});

function reachable() {
  const back = unreachable;
  unreachable = false;
  showConnection();
  if (back) now(fragments());
}

function later(fragment) {
  clearTimeout(waiting.get(fragment.id));
  waiting.set(fragment.id, setTimeout(refetch, POLL_MS, fragment.id));
}

document.body.addEventListener("htmx:responseError", (event) => {
  const { xhr, target } = event.detail;
  const place = document.getElementById(target.id).querySelector("[data-failure]");
  place.querySelector("[data-why]").textContent =
    xhr.status === 404 ? "This no longer exists." : `The server returned ${xhr.status}.`;
  place.hidden = false;
  later(target);
  reachable();
});

// No response at all is a failure of the whole page, not of each fragment.
for (const silence of ["htmx:sendError", "htmx:timeout"]) {
  document.body.addEventListener(silence, (event) => {
    unreachable = true;
    showConnection();
    later(event.detail.target);
  });
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-retry]");
  if (!button) return;
  const failed = button.closest("[data-topics]");
  now(failed ? [failed] : fragments());
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) fragments().forEach((fragment) => soon(fragment, AFTER_HINT_MS));
});

// Deferred fragments are fetched shortly before they come into view.
const nearing = new IntersectionObserver(
  (seen) => {
    for (const { isIntersecting, target } of seen) {
      if (!isIntersecting) continue;
      nearing.unobserve(target);
      window.htmx.trigger(target, "refetch");
    }
  },
  { rootMargin: AHEAD },
);
// From this event on htmx handles the fragments.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("[data-later]").forEach((fragment) => nearing.observe(fragment));
});

fragments().forEach(note);
showProblems();
connect(RECONNECT_FIRST_MS);
document.addEventListener("switchyard:zone", showAges);
setInterval(tick, 1000);

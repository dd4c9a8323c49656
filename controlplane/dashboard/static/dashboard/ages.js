// Keeps times true between two fetches, in the zone that the reader chose: UTC, or the browser's. Ages count from the
// server's clock, so a wrong clock here does not matter. The server renders UTC (templatetags/switchyard.py).

const THIN_SPACE = "\u202f";
const UNITS = [["d", 86400], ["h", 3600], ["min", 60]];
const ZONE_KEY = "switchyard-zone";
const two = (number) => String(number).padStart(2, "0");

/** Largest unit of which there are two, as controlplane/dashboard/templatetags/switchyard.py formats it. */
export function ageText(ageS) {
  const whole = Math.max(0, Math.floor(ageS));
  for (const [unit, length] of UNITS) {
    if (whole >= 2 * length) return `${Math.floor(whole / length)}${THIN_SPACE}${unit}`;
  }
  return `${whole}${THIN_SPACE}s`;
}

export const inBrowserZone = () => localStorage.getItem(ZONE_KEY) === "browser";

const zoneName = () => (inBrowserZone() ? Intl.DateTimeFormat().resolvedOptions().timeZone : "UTC");

/** "2026-11-30 14:02:11" in the zone in force. */
export function stamp(ms) {
  const at = new Date(ms);
  if (!inBrowserZone()) return at.toISOString().slice(0, 19).replace("T", " ");
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/** A time without the parts that it shares with now: the date today, the year this year. */
function clockText(ms, nowMs) {
  const [at, now] = [stamp(ms), stamp(nowMs)];
  if (at.slice(0, 10) === now.slice(0, 10)) return at.slice(11);
  return at.slice(at.slice(0, 4) === now.slice(0, 4) ? 5 : 0, 16);
}

function say(time, text, title) {
  if (time.textContent !== text) time.textContent = text;
  if (time.title !== title) time.title = title;
}

/** Rewrites every time inside `root`; `serverNowMs` is the server's clock now. */
export function tickAges(root, serverNowMs) {
  for (const time of root.querySelectorAll("time[data-age]")) {
    const ms = Date.parse(time.dateTime);
    const ageS = (serverNowMs - ms) / 1000;
    const exact = `${stamp(ms)} ${zoneName()}`;
    const age = ageS >= 0 ? `${ageText(ageS)} ago` : `in ${ageText(-ageS)}`;
    if (time.dataset.age === "ago") {
      say(time, clockText(ms, serverNowMs), `${age}, ${exact}`);
    } else if (time.dataset.age === "at") {
      say(time, `${stamp(ms).slice(0, 16)} ${zoneName()}`, age);
    } else {
      say(time, ageText(ageS), `since ${exact}`);
    }
  }
}

function tableField(text, isNumber) {
  const field = document.createElement("td");
  if (isNumber) field.className = "number";
  field.append(text);
  return field;
}

/** The rows of an opened table, from the figure above it: hundreds, so they are made only when they are read. The newest
 * is first, and steps without a value are left out. */
function showRows(details) {
  const { data } = JSON.parse(details.parentElement.querySelector("[data-figure]").dataset.figure);
  const digits = Number(details.dataset.decimals);
  const form = new Intl.NumberFormat("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const written = (value) => (value === null ? "\u2013" : form.format(value).replaceAll(",", THIN_SPACE));
  const first = Date.parse(`${data[0].x0.replace(" ", "T")}Z`);
  const rows = [];
  for (let step = data[0].y.length - 1; step >= 0; step -= 1) {
    if (data.every((line) => line.y[step] === null)) continue;
    const time = document.createElement("time");
    const ms = first + step * data[0].dx;
    time.dateTime = new Date(ms).toISOString();
    time.textContent = stamp(ms).slice(5);
    const row = document.createElement("tr");
    row.append(tableField(time, false), ...data.map((line) => tableField(written(line.y[step]), true)));
    rows.push(row);
  }
  details.querySelector("tbody").replaceChildren(...rows);
}

const button = document.getElementById("zone");

function showZone() {
  if (!button) return;
  button.hidden = false;
  button.querySelector("[data-zone-name]").textContent = zoneName();
  document.querySelectorAll(".chart details[open]").forEach(showRows);
}

button?.addEventListener("click", () => {
  localStorage.setItem(ZONE_KEY, inBrowserZone() ? "utc" : "browser");
  showZone();
  document.dispatchEvent(new Event("switchyard:zone"));
});

document.addEventListener("toggle", (event) => {
  if (event.target.open && event.target.closest(".chart")) showRows(event.target);
}, true);

// The range goes along to the next page, in its URL, so that links can be shared.
const RANGE = ["range", "from", "to"];

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href]");
  const here = new URLSearchParams(location.search);
  if (!link || link.origin !== location.origin || !RANGE.some((name) => here.has(name))) return;
  const there = new URL(link.href);
  if (there.pathname === location.pathname || RANGE.some((name) => there.searchParams.has(name))) return;
  for (const name of RANGE) if (here.has(name)) there.searchParams.set(name, here.get(name));
  link.href = there.href;
}, true);

showZone();

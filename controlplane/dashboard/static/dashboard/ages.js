// Keeps "4 s ago" true between two fetches. Ages count from the server's clock, so a wrong clock here does not matter.

const THIN_SPACE = "\u202f";
const UNITS = [["d", 86400], ["h", 3600], ["min", 60]];

/** Largest unit of which there are two, as controlplane/dashboard/templatetags/switchyard.py formats it. */
export function ageText(ageS) {
  const whole = Math.max(0, Math.floor(ageS));
  for (const [unit, length] of UNITS) {
    if (whole >= 2 * length) return `${Math.floor(whole / length)}${THIN_SPACE}${unit}`;
  }
  return `${whole}${THIN_SPACE}s`;
}

/** Rewrites every time inside `root`; `serverNowMs` is the server's clock now. */
export function tickAges(root, serverNowMs) {
  for (const time of root.querySelectorAll("time[data-age]")) {
    const age = ageText((serverNowMs - Date.parse(time.dateTime)) / 1000);
    const text = time.dataset.age === "ago" ? `${age} ago` : age;
    if (time.textContent !== text) time.textContent = text;
  }
}

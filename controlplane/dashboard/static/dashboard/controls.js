// Keyboard, theme and menu. Everything here also works with a pointer or without this file.

const THEMES = ["auto", "light", "dark"];

const JUMP_WITHIN_MS = 1500;

const search = document.getElementById("search");
const searchText = document.getElementById("search-text");
const help = document.getElementById("help");
let jumpUntil = 0; // a letter before this time goes to a page

function typing(target) {
  return target.closest("input, textarea, select, [contenteditable]") !== null;
}

function rows() {
  const within = document.querySelector("dialog[open]") ?? document.querySelector("main");
  return [...within.querySelectorAll("[data-row]")].filter((row) => row.offsetParent !== null);
}

function moveRow(step) {
  const all = rows();
  if (all.length === 0) return;
  const at = all.indexOf(document.activeElement);
  const next = at === -1 ? (step > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + step));
  all[next].focus();
  all[next].scrollIntoView({ block: "nearest" });
}

function openSearch() {
  if (!search) return openFilter();
  if (!search.open) search.showModal();
  searchText.focus();
  searchText.select();
}

function openFilter() {
  const box = document.getElementById("find");
  box?.focus();
  box?.select();
}

function openActions() {
  const menu = document.getElementById("actions");
  if (!menu) return;
  menu.open = true;
  (menu.querySelector("a") ?? menu.querySelector("summary")).focus();
}

function closeActions() {
  const menu = document.getElementById("actions");
  if (!menu?.open) return false;
  menu.open = false;
  menu.querySelector("summary").focus();
  return true;
}

// Arrow keys move between the actions of an open menu.
function moveAction(step) {
  const menu = document.getElementById("actions");
  const links = menu?.open && menu.contains(document.activeElement) ? [...menu.querySelectorAll("a")] : [];
  if (links.length === 0) return false;
  links[(links.indexOf(document.activeElement) + step + links.length) % links.length].focus();
  return true;
}

function jumps() {
  return [...document.querySelectorAll("nav [data-jump]")];
}

function openHelp() {
  if (!help) return;
  const lines = jumps().map((link) => {
    const line = document.createElement("div");
    const [keys, name] = [document.createElement("dt"), document.createElement("dd")];
    for (const letter of ["g", link.dataset.jump]) {
      const key = document.createElement("kbd");
      key.textContent = letter;
      keys.append(key, " ");
    }
    name.textContent = link.firstChild.textContent.trim();
    line.append(keys, name);
    return line;
  });
  document.getElementById("help-jumps").replaceChildren(...lines);
  help.showModal();
}

const KEYS = {
  j: () => moveRow(1),
  k: () => moveRow(-1),
  "/": openSearch,
  f: openFilter,
  a: openActions,
  "?": openHelp,
  g: () => (jumpUntil = performance.now() + JUMP_WITHIN_MS),
};

function jump(letter) {
  jumpUntil = 0;
  jumps().find((link) => link.dataset.jump === letter)?.click();
}

function pressed(event) {
  const act = performance.now() < jumpUntil ? () => jump(event.key) : KEYS[event.key];
  if (!act || (document.querySelector("dialog[open]") && !"jk".includes(event.key))) return;
  act();
  event.preventDefault();
}

function keydown(event) {
  if ((event.ctrlKey || event.metaKey) && event.key === "k" && !document.querySelector("dialog[open]")) {
    openSearch();
    event.preventDefault();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step && (search?.open ? moveOption(step) : moveAction(step))) {
    event.preventDefault();
  } else if (event.key === "Escape" && !search?.open && closeActions()) {
    event.preventDefault();
  } else if (!typing(event.target)) {
    pressed(event);
  } else if (event.key === "Escape" && !search?.open) {
    event.target.blur();
  }
}

// The search is a combobox: the text keeps the focus, and arrow keys choose one of the results.

function options() {
  return [...(search?.querySelectorAll("[data-row]") ?? [])];
}

function choose(option) {
  for (const each of options()) each.setAttribute("aria-selected", String(each === option));
  if (option) searchText.setAttribute("aria-activedescendant", option.id);
  else searchText.removeAttribute("aria-activedescendant");
  option?.scrollIntoView({ block: "nearest" });
}

function moveOption(step) {
  const all = options();
  if (all.length === 0) return false;
  const at = all.findIndex((option) => option.id === searchText.getAttribute("aria-activedescendant"));
  choose(all[(at + step + all.length) % all.length]);
  return true;
}

// Without a script the results are a list of links. Here they become options, of which the first is chosen.
search?.addEventListener("htmx:afterSwap", () => {
  const list = search.querySelector("[data-options]");
  const all = options();
  searchText.setAttribute("aria-expanded", String(all.length > 0));
  if (all.length > 0) {
    list.id = "search-list";
    list.setAttribute("role", "listbox");
    list.setAttribute("aria-label", "Results");
  }
  for (const group of search.querySelectorAll("ul")) {
    group.parentElement.setAttribute("role", "group");
    group.parentElement.setAttribute("aria-labelledby", group.getAttribute("aria-labelledby"));
    group.setAttribute("role", "presentation");
    group.removeAttribute("aria-labelledby");
  }
  for (const title of search.querySelectorAll("[data-options] h3, [data-options] li")) title.setAttribute("role", "presentation");
  for (const option of all) {
    option.setAttribute("role", "option");
    option.tabIndex = -1;
  }
  choose(all[0]);
});

// Enter opens the chosen result, if the results are those of the text now in the box; else it opens the search page.
search?.querySelector("form").addEventListener("submit", (event) => {
  const results = search.querySelector("[data-query]");
  const chosen = document.getElementById(searchText.getAttribute("aria-activedescendant")) ?? options()[0];
  if (!chosen || results?.dataset.query !== searchText.value.trim()) return;
  event.preventDefault();
  chosen.click();
});

// An action without an object continues in the box.
search?.addEventListener("click", (event) => {
  const fill = event.target.closest?.("[data-fill]")?.dataset.fill;
  if (fill === undefined) return;
  event.preventDefault();
  searchText.value = fill;
  searchText.focus();
  searchText.dispatchEvent(new Event("input", { bubbles: true }));
});

search?.addEventListener("click", (event) => {
  if (event.target === search) search.close(); // beside the box
});

document.getElementById("search-open")?.addEventListener("click", (event) => {
  if (!search) return;
  event.preventDefault();
  openSearch();
});

// A choice on which another one depends: without the other's value, the form loads again with what fits.
document.addEventListener("change", (event) => {
  const dependent = event.target.dataset.resubmits;
  if (dependent === undefined) return;
  event.target.form.elements[dependent].value = "";
  event.target.form.requestSubmit();
});

// A file that the server would refuse is refused before it is sent, so that the form keeps what was typed.
document.addEventListener("change", (event) => {
  const most = Number(event.target.dataset.mostBytes);
  if (!most) return;
  const size = event.target.files[0]?.size ?? 0;
  event.target.setCustomValidity(size > most ? `The file has ${size} bytes and may have ${most}.` : "");
  event.target.reportValidity();
});

document.addEventListener("click", (event) => {
  const menu = document.getElementById("actions");
  if (menu?.open && !menu.contains(event.target)) menu.open = false;
});

function showTheme(button) {
  const theme = document.documentElement.dataset.theme;
  button.querySelector("[data-theme-name]").textContent = theme;
}

function offerThemes(button) {
  button.hidden = false;
  showTheme(button);
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    document.documentElement.dataset.theme = next;
    localStorage.setItem("switchyard-theme", next);
    showTheme(button);
  });
}

// From this event on htmx listens to the fields: a key that opened one before would lose what is typed into it.
document.addEventListener("DOMContentLoaded", () => {
  document.addEventListener("keydown", keydown);
  const themeButton = document.getElementById("theme");
  if (themeButton) offerThemes(themeButton);
});

const menuButton = document.getElementById("menu-button");
if (menuButton) {
  menuButton.addEventListener("click", () => {
    const open = menuButton.getAttribute("aria-expanded") !== "true";
    menuButton.setAttribute("aria-expanded", String(open));
    document.getElementById("menu").classList.toggle("open", open);
  });
}

// What scrolls must be reached by keyboard; what does not should not stop it. All sizes are read before the first change:
// a layout after each one would take a page with many tables tens of milliseconds.
function reachScrollers() {
  const panels = [...document.querySelectorAll(".panel")];
  const scrolls = panels.map((it) => it.scrollWidth > it.clientWidth || it.scrollHeight > it.clientHeight);
  panels.forEach((panel, place) => {
    if (panel.hasAttribute("tabindex") === scrolls[place]) return;
    if (scrolls[place]) panel.setAttribute("tabindex", "0");
    else panel.removeAttribute("tabindex");
  });
}

reachScrollers();
addEventListener("resize", reachScrollers);
document.addEventListener("toggle", reachScrollers, true); // a table inside details that opened
document.body.addEventListener("htmx:afterSettle", reachScrollers);

// A filter's empty fields do not belong in the URL.
document.body.addEventListener("htmx:configRequest", (event) => {
  const sent = event.detail.formData;
  for (const [name, value] of [...sent.entries()]) if (value === "") sent.delete(name);
});

document.querySelector("details:target")?.setAttribute("open", "");

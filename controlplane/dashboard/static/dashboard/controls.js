// Keyboard, theme and menu. Everything here also works with a pointer or without this file.

const THEMES = ["auto", "light", "dark"];

function typing(target) {
  return target.closest("input, textarea, select, [contenteditable]") !== null;
}

function rows() {
  return [...document.querySelectorAll("main [data-row]")].filter((row) => row.offsetParent !== null);
}

function moveRow(step) {
  const all = rows();
  if (all.length === 0) return;
  const at = all.indexOf(document.activeElement);
  const next = at === -1 ? (step > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + step));
  all[next].focus();
  all[next].scrollIntoView({ block: "nearest" });
}

function find() {
  const box = document.getElementById("find");
  if (box) {
    box.focus();
    box.select();
  } else {
    location.href = document.body.dataset.findUrl;
  }
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && typing(event.target)) {
    event.target.blur();
  } else if (!typing(event.target) && document.body.dataset.findUrl) {
    if (event.key === "j") moveRow(1);
    else if (event.key === "k") moveRow(-1);
    else if (event.key === "/") find();
    else return;
    event.preventDefault();
  }
});

function showTheme(button) {
  const theme = document.documentElement.dataset.theme;
  button.querySelector("[data-theme-word]").textContent = theme;
}

const themeButton = document.getElementById("theme");
if (themeButton) {
  themeButton.hidden = false;
  showTheme(themeButton);
  themeButton.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    document.documentElement.dataset.theme = next;
    localStorage.setItem("switchyard-theme", next);
    showTheme(themeButton);
  });
}

const menuButton = document.getElementById("menu-button");
if (menuButton) {
  menuButton.addEventListener("click", () => {
    const open = menuButton.getAttribute("aria-expanded") !== "true";
    menuButton.setAttribute("aria-expanded", String(open));
    document.getElementById("menu").classList.toggle("open", open);
  });
}

// A filter's empty fields do not belong in the URL.
document.body.addEventListener("htmx:configRequest", (event) => {
  const sent = event.detail.formData;
  for (const [name, value] of [...sent.entries()]) if (value === "") sent.delete(name);
});

if (location.hash === "#find") find();
else document.querySelector("details:target")?.setAttribute("open", "");

// Wizards: keeps what was typed in this tab until it is applied, adds rows to tables, and sends the CSRF token of the
// present session. The form works without this file.

const form = document.getElementById("wizard");
const STORE = `switchyard-wizard:${location.pathname}`;
const OWN = ["csrfmiddlewaretoken", "submission", "go", "pick", "revision"];

const secrets = new Set([...form.querySelectorAll("[type=password]")].map((input) => input.name));
const typed = () => [...new FormData(form)].filter(([name]) => !OWN.includes(name) && !secrets.has(name));

function keep() {
  sessionStorage.setItem(STORE, JSON.stringify(typed()));
}

function restore() {
  const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "[]");
  for (const input of form.querySelectorAll("[type=checkbox]")) input.checked = false;
  for (const [name, value] of kept) {
    if (!form.elements.namedItem(name)) addRowFor(name);
    for (const input of form.querySelectorAll(`[name="${CSS.escape(name)}"]`)) {
      if (input.type === "checkbox") input.checked ||= input.value === value;
      else input.value = value;
    }
  }
  form.dispatchEvent(new Event("change"));
}

function addRow(fieldset) {
  const number = fieldset.dataset.rows++;
  const row = fieldset.querySelector("template").content.cloneNode(true);
  for (const input of row.querySelectorAll("input, textarea")) input.name = input.name.replace("-INDEX-", `-${number}-`);
  fieldset.querySelector("tbody").append(row);
  return fieldset.querySelector("tbody tr:last-child :is(input, textarea)");
}

function addRowFor(name) {
  const fieldset = [...form.querySelectorAll("[data-rows]")].find((one) => {
    const input = one.querySelector("tbody :is(input, textarea)");
    return input && name.startsWith(`${input.name.split("-")[0]}-`);
  });
  while (fieldset && !form.elements.namedItem(name) && Number(fieldset.dataset.rows) < 200) addRow(fieldset);
}

// A login in another tab changes the token.
const token = () => document.cookie.match(/(?:^|; )csrftoken=([^;]*)/)?.[1] ?? form.elements.csrfmiddlewaretoken.value;

function markErrors() {
  for (const error of document.querySelectorAll("[data-error-of]")) {
    const input = document.getElementById(error.dataset.errorOf);
    const wrong = error.textContent.trim() !== "";
    if (wrong) error.closest("details")?.setAttribute("open", "");
    if (wrong) input?.setAttribute("aria-invalid", "true");
    else input?.removeAttribute("aria-invalid");
  }
}

function showRaw() {
  if (!form.elements.raw) return;
  const on = form.elements.raw.checked;
  form.querySelector(".wizard-steps").hidden = on;
  document.getElementById("raw-part").hidden = !on;
}

form.addEventListener("input", keep);
form.addEventListener("change", keep);
form.elements.raw?.addEventListener("change", showRaw);
form.dataset.keptAs = STORE; // submissions.js forgets it when another page answers
form.addEventListener("submit", () => (form.elements.csrfmiddlewaretoken.value = token()));
let lastChecked = "";
document.body.addEventListener("htmx:configRequest", (event) => {
  if (event.detail.elt !== form) return;
  const sent = event.detail.formData;
  for (const name of OWN) sent.delete(name); // a check is no press of a button
  const texts = JSON.stringify([...sent]);
  if (texts === lastChecked) event.preventDefault(); // only the focus moved
  lastChecked = texts;
  sent.set("csrfmiddlewaretoken", token());
});
for (const failure of ["htmx:responseError", "htmx:sendError", "htmx:timeout"]) {
  document.body.addEventListener(failure, () => (lastChecked = ""));
}

// A check that ends between press and release must not replace the button under the pointer.
let pressed = false;
document.addEventListener("pointerdown", (event) => (pressed = event.target.closest("#wizard-check button") !== null));
document.addEventListener("click", () => (pressed = false));
document.body.addEventListener("htmx:beforeSwap", (event) => {
  if (pressed && event.detail.target.id === "wizard-check") event.detail.shouldSwap = false;
});
document.body.addEventListener("htmx:afterSettle", () => {
  if (document.querySelector("[data-signed-out]")) lastChecked = "";
  markErrors();
  showRaw();
});

for (const button of form.querySelectorAll("[data-test]")) button.hidden = false;
for (const button of form.querySelectorAll("[data-add-row]")) {
  button.hidden = false;
  button.addEventListener("click", () => addRow(button.closest("[data-rows]")).focus());
}

function isChanged(input) {
  if (input.type === "checkbox") return input.checked !== input.defaultChecked;
  return input.defaultValue !== undefined && input.value !== input.defaultValue;
}

// htmx listens from this event on: what was typed or restored before has not been checked.
document.addEventListener("DOMContentLoaded", () => {
  const kept = sessionStorage.getItem(STORE);
  const offer = document.querySelector("[data-restore]");
  if (new URLSearchParams(location.search).has("kept")) restore();
  else if ([...form.elements].some(isChanged)) form.dispatchEvent(new Event("change"));
  else if (kept && "fresh" in form.dataset && kept !== JSON.stringify(typed())) {
    offer.hidden = false;
    offer.addEventListener("click", () => {
      restore();
      offer.hidden = true;
    });
  }
});

markErrors();
showRaw();

// Wizards: keeps what was typed in this tab until it is applied, adds rows to tables, and sends the CSRF token of the
// present session. The form works without this file.

const form = document.getElementById("wizard");
const STORE = `switchyard-wizard:${location.pathname}`;
const OWN = ["csrfmiddlewaretoken", "go", "pick", "revision"];

const typed = () => [...new FormData(form)].filter(([name]) => !OWN.includes(name));

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
  for (const input of row.querySelectorAll("input")) input.name = input.name.replace("-INDEX-", `-${number}-`);
  fieldset.querySelector("tbody").append(row);
  return fieldset.querySelector("tbody tr:last-child input");
}

function addRowFor(name) {
  const fieldset = [...form.querySelectorAll("[data-rows]")].find((one) => {
    const input = one.querySelector("tbody input");
    return input && name.startsWith(`${input.name.split("-")[0]}-`);
  });
  while (fieldset && !form.elements.namedItem(name) && Number(fieldset.dataset.rows) < 200) addRow(fieldset);
}

function useToken(token) {
  if (token) form.elements.csrfmiddlewaretoken.value = token[1];
}

// A login in another tab changes the token.
const freshToken = () => useToken(document.cookie.match(/(?:^|; )csrftoken=([^;]*)/));

function markErrors() {
  for (const error of document.querySelectorAll("[data-error-of]")) {
    const input = document.getElementById(error.dataset.errorOf);
    if (error.textContent.trim()) input?.setAttribute("aria-invalid", "true");
    else input?.removeAttribute("aria-invalid");
  }
}

function showRaw() {
  const on = form.elements.raw.checked;
  form.querySelector(".wizard-steps").hidden = on;
  document.getElementById("raw-part").hidden = !on;
}

form.addEventListener("input", keep);
form.addEventListener("change", keep);
form.elements.raw.addEventListener("change", showRaw);
form.addEventListener("submit", (event) => {
  freshToken();
  if (event.submitter?.value === "apply") sessionStorage.removeItem(STORE);
});
document.body.addEventListener("htmx:configRequest", (event) => {
  const token = document.cookie.match(/(?:^|; )csrftoken=([^;]*)/);
  if (token) event.detail.headers["X-CSRFToken"] = token[1];
});
document.body.addEventListener("htmx:afterSettle", () => {
  markErrors();
  showRaw();
});

for (const button of form.querySelectorAll("[data-add-row]")) {
  button.hidden = false;
  button.addEventListener("click", () => addRow(button.closest("[data-rows]")).focus());
}

const kept = sessionStorage.getItem(STORE);
const offer = document.querySelector("[data-restore]");
if (new URLSearchParams(location.search).has("kept")) restore();
else if (kept && "fresh" in form.dataset && kept !== JSON.stringify(typed())) {
  offer.hidden = false;
  offer.addEventListener("click", () => {
    restore();
    offer.hidden = true;
  });
}
markErrors();
showRaw();

// Forms on a bad network. A press is sent once, and only if Switchyard answers; until the next page appears, the form says
// what it waits for. If no page comes, what was typed is still here. The server carries a form out once (its field
// `submission`), so sending it again is safe. Forms work without this file.

const REACH = "/healthz";
const REACH_WITHIN_MS = 10000;
const SLOW_AFTER_MS = 3000;
const AGAIN_AFTER_MS = 20000;
const KEPT = "switchyard-sent"; // of this tab: the form that was sent last, until a page answers it
const SECRET = "[type=password], [type=file], [name=csrfmiddlewaretoken], [name=credential], [autocomplete=one-time-code]";
const RETRY_FIRST_MS = 1000;
const RETRY_LONGEST_MS = 10000;

const sending = new WeakMap(); // form -> { reached, timers } of a press that is under way

const lines = new WeakMap(); // form -> the line that says what it waits for

const isGuarded = (form) => form.getAttribute("method") === "post" && form.elements.namedItem("submission") !== null;

function say(form, text) {
  const line = lines.get(form) ?? document.createElement("p");
  line.className = "sending";
  line.setAttribute("role", "status");
  line.textContent = text;
  line.hidden = text === "";
  if (!line.isConnected) {
    const button = buttonsOf(form).find((one) => one.offsetParent !== null);
    (form.contains(button) ? form : (button?.parentElement ?? form)).append(line);
  }
  lines.set(form, line);
}

function buttonsOf(form) {
  const own = [...form.querySelectorAll("button:not([type=button])")];
  return form.id ? [...own, ...document.querySelectorAll(`button[form="${CSS.escape(form.id)}"]`)] : own;
}

function begin(form) {
  const state = { reached: false, timers: [] };
  sending.set(form, state);
  form.setAttribute("aria-busy", "true");
  for (const button of buttonsOf(form)) button.setAttribute("aria-disabled", "true");
  state.timers.push(setTimeout(say, 300, form, "Sending …"));
  state.timers.push(setTimeout(say, SLOW_AFTER_MS, form, "Waiting for Switchyard …"));
  return state;
}

function end(form, text) {
  for (const timer of sending.get(form)?.timers ?? []) clearTimeout(timer);
  sending.delete(form);
  form.removeAttribute("aria-busy");
  for (const button of buttonsOf(form)) button.removeAttribute("aria-disabled");
  say(form, text);
}

async function isReachable() {
  try {
    await fetch(REACH, { method: "HEAD", cache: "no-store", signal: AbortSignal.timeout(REACH_WITHIN_MS) });
    return true;
  } catch {
    return false;
  }
}

function fieldsOf(form) {
  return [...form.elements]
    .filter((field) => field.name && !field.matches(SECRET) && !field.matches("button") && !field.disabled)
    .filter((field) => !["checkbox", "radio"].includes(field.type) || field.checked)
    .flatMap((field) => (field.multiple ? [...field.selectedOptions].map((one) => one.value) : [field.value]).map((value) => [field.name, value]));
}

function keep(form, submitter) {
  const kept = { page: location.href, action: form.getAttribute("action"), fields: fieldsOf(form) };
  if (submitter?.value === "apply") kept.forgets = form.dataset.keptAs;
  sessionStorage.setItem(KEPT, JSON.stringify(kept));
}

function sayWhenBack(form, waitMs) {
  setTimeout(async () => {
    if (!form.isConnected || sending.has(form)) return;
    if (await isReachable()) say(form, "Switchyard is back. Nothing was sent yet: press again.");
    else sayWhenBack(form, Math.min(RETRY_LONGEST_MS, 2 * waitMs));
  }, waitMs * (0.5 + Math.random() / 2));
}

async function press(form, submitter) {
  const state = begin(form);
  if (!(await isReachable())) {
    end(form, "Not sent: Switchyard is unreachable. What you typed is still here.");
    sayWhenBack(form, RETRY_FIRST_MS);
    return;
  }
  if (sending.get(form) !== state) return;
  state.reached = true;
  form.requestSubmit(submitter);
}

// On the window, before any other listener: the others see a press once, when it is sent.
window.addEventListener("submit", (event) => {
  const form = event.target;
  if (!isGuarded(form)) return;
  const state = sending.get(form);
  if (state?.reached) {
    state.reached = false;
    if ("stays" in (event.submitter?.dataset ?? {})) return end(form, ""); // a download
    keep(form, event.submitter);
    state.timers.push(setTimeout(end, AGAIN_AFTER_MS, form, "No answer yet. You may press again: it is carried out once."));
    return;
  }
  event.preventDefault();
  event.stopImmediatePropagation();
  if (!state) press(form, event.submitter);
}, true);

function restore({ action, fields }) {
  const forms = [...document.forms].filter((form) => isGuarded(form) && form.getAttribute("action") === action);
  const names = new Set(fields.map(([name]) => name));
  const form = forms.find((one) => [...names].every((name) => one.elements.namedItem(name)));
  if (!form) return;
  for (const field of form.elements) {
    if (!field.name || field.matches(SECRET) || field.matches("button")) continue;
    const values = fields.filter(([name]) => name === field.name).map(([, value]) => value);
    if (["checkbox", "radio"].includes(field.type)) field.checked = values.includes(field.value);
    else if (field.multiple) for (const option of field.options) option.selected = values.includes(option.value);
    else if (values.length > 0) field.value = values[0];
  }
  form.closest("details")?.setAttribute("open", "");
  say(form, "This was sent and got no answer. What you typed is restored; sending it again is safe: it is carried out once.");
}

// A form that was sent is answered by a redirect, or by a page that its POST returned.
const isAnswer = () =>
  document.documentElement.dataset.method === "POST" || performance.getEntriesByType("navigation")[0]?.redirectCount > 0;

addEventListener("pageshow", (event) => {
  if (event.persisted) for (const form of document.forms) if (sending.has(form)) end(form, "");
  const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "null");
  if (!kept) return;
  if (isAnswer()) {
    sessionStorage.removeItem(KEPT);
    if (kept.forgets && new URL(kept.page).pathname !== location.pathname) sessionStorage.removeItem(kept.forgets);
  } else if (kept.page === location.href && !event.persisted) {
    sessionStorage.removeItem(KEPT);
    restore(kept);
  }
});

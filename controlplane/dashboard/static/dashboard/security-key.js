// Security keys: asks the browser for what a form's options say, and sends what it answers with the form.

const REFUSED = {
  NotAllowedError: "The browser got nothing from a security key. Try again.",
  InvalidStateError: "This security key is added already.",
};

async function credential(form) {
  const options = JSON.parse(form.dataset.options);
  if (form.dataset.securityKey === "create") {
    return navigator.credentials.create({ publicKey: PublicKeyCredential.parseCreationOptionsFromJSON(options) });
  }
  return navigator.credentials.get({ publicKey: PublicKeyCredential.parseRequestOptionsFromJSON(options) });
}

function say(form, text) {
  const line = form.querySelector("[role=alert]");
  line.textContent = text;
  line.hidden = text === "";
}

async function submitted(event) {
  event.preventDefault();
  const form = event.target;
  say(form, "");
  try {
    form.elements.credential.value = JSON.stringify((await credential(form)).toJSON());
    form.submit();
  } catch (error) {
    say(form, REFUSED[error.name] ?? `The browser refused: ${error.message}`);
  }
}

const isAble = typeof window.PublicKeyCredential?.parseRequestOptionsFromJSON === "function";

for (const form of document.querySelectorAll("form[data-security-key]")) {
  form.hidden = false;
  if (isAble) {
    form.addEventListener("submit", submitted);
  } else {
    form.querySelector("button").disabled = true;
    say(form, "This browser is too old for security keys, or this page is not served over HTTPS.");
  }
}

// A chat through the ingress, as applications send it. It lives in this page only: nothing is stored, and leaving the page,
// or Stop, closes the connection, which ends generation.

const THIN_SPACE = "\u202f";
const form = document.getElementById("chat");
const log = document.getElementById("chat-log");
const transcript = document.getElementById("chat-messages");
const box = document.getElementById("chat-text");
const send = document.getElementById("chat-send");
const stop = document.getElementById("chat-stop");
const status = document.getElementById("chat-status");
const empty = document.getElementById("chat-empty");

let messages = [];
let running = null; // the AbortController of the running request

function figure(name, text) {
  form.querySelector(`[data-part="${name}"]`).textContent = text || "–";
}

function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–";
  return ms >= 10000 ? `${(ms / 1000).toFixed(1)}${THIN_SPACE}s` : `${Math.round(ms)}${THIN_SPACE}ms`;
}

function showError(text) {
  status.textContent = text;
  status.hidden = text === "";
}

function bubble(role, text) {
  empty.hidden = true;
  const item = document.createElement("li");
  item.className = `message by-${role}`;
  const author = document.createElement("span");
  author.className = "quiet";
  author.textContent = role === "user" ? "You" : form.elements.deployment.value;
  const content = document.createElement("p");
  content.textContent = text;
  item.append(author, content);
  transcript.append(item);
  log.scrollTop = log.scrollHeight;
  return { author, content };
}

/** Events of a text/event-stream, as they arrive. */
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const [, kind, data] = /^event: (\w+)\ndata: (.*)$/s.exec(block) ?? [];
      if (kind) yield { kind, ...JSON.parse(data) };
    }
  }
}

function showFigures(event) {
  figure("ttft", milliseconds(event.ttft_ms));
  figure("took", milliseconds(event.took_ms));
  figure("tokens", String(event.tokens));
  figure("rate", event.tokens_per_s === null ? "" : String(event.tokens_per_s));
}

function show(event, reply) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  if (event.kind === "head") {
    figure("region", event.region);
    figure("cell", event.cell);
    if (event.cell) reply.author.textContent = `${event.cell} in ${event.region}`;
  } else if (event.kind === "text") {
    reply.content.textContent += event.text;
  } else {
    showFigures(event);
    if (event.kind === "error") showError(event.message);
  }
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function requestBody(text) {
  const of = form.elements;
  return JSON.stringify({
    deployment: of.deployment.value,
    region: of.region.value,
    messages: [...messages, { role: "user", content: text }],
    max_tokens: Number(of.max_tokens.value),
    temperature: Number(of.temperature.value),
    key: of.key.value.trim(),
  });
}

async function stream(text, reply, signal) {
  const response = await fetch(form.dataset.url, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-CSRFToken": form.elements.csrfmiddlewaretoken.value },
    body: requestBody(text),
    signal,
  });
  if (!response.ok || !response.headers.get("Content-Type")?.startsWith("text/event-stream")) {
    const error = await response.json().catch(() => ({}));
    showError(error.message ?? error.detail ?? `The server returned ${response.status}.`);
    return false;
  }
  let ended = false;
  for await (const event of eventsOf(response.body)) {
    show(event, reply);
    ended = event.kind === "end";
  }
  if (!ended && status.hidden) showError("The response was cut off.");
  return ended;
}

function busy(controller) {
  running = controller;
  send.hidden = controller !== null;
  stop.hidden = controller === null;
  log.setAttribute("aria-busy", String(controller !== null));
}

async function submit(text) {
  showError("");
  for (const name of ["ttft", "rate", "tokens", "took", "region", "cell"]) figure(name, "");
  bubble("user", text);
  const reply = bubble("assistant", "");
  busy(new AbortController());
  try {
    await stream(text, reply, running.signal);
  } catch (error) {
    showError(error.name === "AbortError" ? "Stopped." : "Switchyard is unreachable.");
  }
  busy(null);
  if (reply.content.textContent) {
    messages.push({ role: "user", content: text }, { role: "assistant", content: reply.content.textContent });
  } else {
    box.value ||= text; // no reply: it can be sent again
  }
  box.focus();
}

if (form) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = box.value.trim();
    if (text === "" || running) return;
    box.value = "";
    submit(text);
  });
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  stop.addEventListener("click", () => running?.abort());
  document.getElementById("chat-new").addEventListener("click", () => {
    running?.abort();
    messages = [];
    transcript.replaceChildren();
    empty.hidden = false;
    showError("");
    box.focus();
  });
}

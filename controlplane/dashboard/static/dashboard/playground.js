// A chat with one deployment, or with two at the same time, through the ingress as applications send it. It lives in this
// page only: nothing is stored, and leaving the page, or Stop, closes the connections, which ends generation.

const THIN_SPACE = "\u202f";
const form = document.getElementById("chat");
const log = document.getElementById("chat-log");
const transcript = document.getElementById("chat-messages");
const template = document.getElementById("chat-reply");
const box = document.getElementById("chat-text");
const send = document.getElementById("chat-send");
const stop = document.getElementById("chat-stop");
const status = document.getElementById("chat-status");
const empty = document.getElementById("chat-empty");
const code = document.getElementById("chat-code");
const imageInput = document.getElementById("chat-image");
const imageRemove = document.getElementById("chat-image-remove");
const imageWhy = document.getElementById("chat-image-why");

let histories = [[], []]; // the messages of each side
let image = null; // the data URL of the chosen image
let running = null; // the AbortController of the running requests

function milliseconds(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "–";
  return ms >= 10000 ? `${(ms / 1000).toFixed(1)}${THIN_SPACE}s` : `${Math.round(ms)}${THIN_SPACE}ms`;
}

function showError(text) {
  status.textContent = text;
  status.hidden = text === "";
}

/** The deployments that answer: one, or two that are compared. */
function sides() {
  return [form.elements.deployment.value, form.elements.compared.value].filter((name) => name !== "");
}

/** The chosen deployments whose versions take no images. */
function withoutImages() {
  const lists = [form.elements.deployment, form.elements.compared];
  return lists.map((list) => list.selectedOptions[0]).filter((one) => one?.value && !("images" in one.dataset)).map((one) => one.value);
}

function setImage(url) {
  image = url;
  if (url === null) imageInput.value = "";
  imageRemove.hidden = url === null;
}

function offerImages() {
  const refusing = withoutImages();
  imageInput.disabled = refusing.length > 0;
  if (refusing.length > 0) setImage(null);
  imageWhy.textContent = refusing.length > 0
    ? `The version of ${refusing.join(" and ")} takes no images.`
    : `At most ${Math.floor(Number(imageInput.dataset.most) / 1024)} KiB. It is sent with the chat and not stored.`;
}

function chooseImage() {
  const [file] = imageInput.files;
  showError("");
  if (!file) return setImage(null);
  if (!imageInput.accept.split(",").includes(file.type) || file.size > Number(imageInput.dataset.most)) {
    setImage(null);
    return showError(`${file.name} is not an image of an accepted type, or is larger than ${Math.floor(Number(imageInput.dataset.most) / 1024)} KiB.`);
  }
  const reader = new FileReader();
  reader.addEventListener("load", () => setImage(reader.result));
  reader.addEventListener("error", () => showError(`${file.name} cannot be read.`));
  reader.readAsDataURL(file);
}

/** A user's message: its text, or parts with the image. */
function contentOf(text, url) {
  return url === null ? text : [{ type: "text", text }, { type: "image_url", image_url: { url } }];
}

function addQuestion(text, url) {
  empty.hidden = true;
  const item = document.createElement("li");
  item.className = "message by-user";
  const author = document.createElement("span");
  author.className = "quiet";
  author.textContent = "You";
  const content = document.createElement("p");
  content.textContent = text;
  item.append(author, content);
  if (url !== null) {
    const shown = document.createElement("img");
    shown.src = url;
    shown.alt = "The image of this message";
    item.append(shown);
  }
  transcript.append(item);
}

function addReplies(names) {
  const item = document.createElement("li");
  item.className = "replies";
  const replies = names.map((name) => {
    const reply = template.content.firstElementChild.cloneNode(true);
    reply.querySelector("[data-part=author]").textContent = name;
    item.append(reply);
    return reply;
  });
  transcript.append(item);
  log.scrollTop = log.scrollHeight;
  return replies;
}

function figure(reply, name, text) {
  reply.querySelector(`[data-part="${name}"]`).textContent = text || "–";
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

/** Queue (ingress, network and cell), prefill and decode as parts of a bar, with the same numbers as text. */
function showTiming(reply, head, end) {
  const bar = reply.querySelector("[data-timing]");
  const prefill = Number(head.engine_ms ?? Number.NaN);
  const parts = Number.isNaN(prefill) || end.ttft_ms === null
    ? { queue: end.ttft_ms ?? 0, prefill: 0, decode: 0 }
    : { queue: Math.max(0, end.ttft_ms - prefill), prefill: Math.min(prefill, end.ttft_ms), decode: 0 };
  parts.decode = Math.max(0, end.took_ms - (end.ttft_ms ?? end.took_ms));
  for (const [name, ms] of Object.entries(parts)) {
    const part = bar.querySelector(`[data-share="${name}"]`);
    part.style.flexGrow = String(ms);
    part.hidden = ms === 0;
    figure(reply, name, milliseconds(ms));
  }
  bar.hidden = false;
}

function showEvent(event, reply, seen) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  if (event.kind === "head") {
    seen.head = event;
    for (const [name, text] of [["region", event.region], ["cell", event.cell], ["request", event.request_id]]) figure(reply, name, text);
  } else if (event.kind === "text") {
    reply.querySelector("[data-part=text]").textContent += event.text;
  } else {
    figure(reply, "tokens", String(event.tokens));
    figure(reply, "rate", event.tokens_per_s === null ? "" : String(event.tokens_per_s));
    figure(reply, "ttft", milliseconds(event.ttft_ms));
    showTiming(reply, seen.head ?? {}, event);
    if (event.kind === "error") showError(event.message);
  }
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function requestBody(history, deployment, content) {
  const system = form.elements.system.value.trim();
  const first = system === "" ? [] : [{ role: "system", content: system }];
  const of = form.elements;
  return JSON.stringify({
    deployment,
    region: of.region.value,
    messages: [...first, ...history, { role: "user", content }],
    max_tokens: Number(of.max_tokens.value),
    temperature: Number(of.temperature.value),
    parameters: of.parameters.value,
    key: of.key.value.trim(),
  });
}

function post(url, body, signal) {
  const headers = { "Content-Type": "application/json", "X-CSRFToken": form.elements.csrfmiddlewaretoken.value };
  return fetch(url, { method: "POST", headers, body, signal });
}

async function refusalOf(response) {
  const error = await response.json().catch(() => ({}));
  return error.message ?? error.detail ?? `The server returned ${response.status}.`;
}

async function stream(side, deployment, content, reply, signal) {
  const response = await post(form.dataset.url, requestBody(histories[side], deployment, content), signal);
  if (!response.ok || !response.headers.get("Content-Type")?.startsWith("text/event-stream")) {
    showError(await refusalOf(response));
    return;
  }
  const seen = { ended: false };
  for await (const event of eventsOf(response.body)) {
    showEvent(event, reply, seen);
    seen.ended = event.kind === "end" || event.kind === "error";
  }
  if (!seen.ended) showError("The response was cut off.");
}

function busy(controller) {
  running = controller;
  send.hidden = controller !== null;
  stop.hidden = controller === null;
  log.setAttribute("aria-busy", String(controller !== null));
}

async function submit(text) {
  showError("");
  const sent = image;
  const content = contentOf(text, sent);
  addQuestion(text, sent);
  setImage(null);
  const names = sides();
  const replies = addReplies(names);
  busy(new AbortController());
  const streams = names.map((name, side) => stream(side, name, content, replies[side], running.signal));
  for (const { reason } of await Promise.allSettled(streams)) {
    if (reason) showError(reason.name === "AbortError" ? "Stopped." : "Switchyard is unreachable.");
  }
  busy(null);
  const texts = replies.map((reply) => reply.querySelector("[data-part=text]").textContent);
  texts.forEach((answer, side) => {
    if (answer) histories[side].push({ role: "user", content }, { role: "assistant", content: answer });
  });
  if (!texts.some(Boolean)) { // no reply: it can be sent again
    box.value ||= text;
    if (sent !== null && withoutImages().length === 0) setImage(sent);
  }
  box.focus();
}

function startOver() {
  running?.abort();
  histories = [[], []];
  transcript.replaceChildren();
  empty.hidden = false;
  showError("");
  setImage(null);
  offerImages();
  box.focus();
}

/** Code for the message in the box, or for the last one that was sent. */
async function showCode() {
  showError("");
  const typed = box.value.trim();
  const [question] = histories[0].slice(-2);
  const history = typed ? histories[0] : histories[0].slice(0, -2);
  const body = requestBody(history, form.elements.deployment.value, image !== null ? contentOf(typed || "Hello", image) : typed || question?.content || "Hello");
  const response = await post(form.dataset.codeUrl, body).catch(() => null);
  if (response === null) return showError("Switchyard is unreachable.");
  if (!response.ok) return showError(await refusalOf(response));
  for (const [language, source] of Object.entries(await response.json())) {
    code.querySelector(`[data-language="${language}"]`).textContent = source;
  }
  code.showModal();
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
  document.getElementById("chat-new").addEventListener("click", startOver);
  document.getElementById("chat-code-open").addEventListener("click", showCode);
  form.elements.compared.addEventListener("change", startOver);
  form.elements.deployment.addEventListener("change", () => {
    offerImages();
    // Earlier images stay in the history, which every further message repeats.
    if (withoutImages().length > 0 && histories.flat().some((one) => typeof one.content !== "string")) startOver();
  });
  imageInput.addEventListener("change", chooseImage);
  imageRemove.addEventListener("click", () => setImage(null));
  offerImages();
}

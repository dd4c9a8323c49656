// Keeps a log at its newest line while "Follow" is checked, and where the reader left it otherwise.

let kept = { follow: true, top: 0 };

const log = () => document.querySelector("[data-log]");
const box = () => document.querySelector("[data-follow]");
const bottom = (place) => place.scrollHeight - place.clientHeight;

function place() {
  const lines = log();
  if (!lines) return;
  box().checked = kept.follow;
  lines.scrollTop = kept.follow ? bottom(lines) : kept.top;
}

document.addEventListener("change", (event) => {
  if (!event.target.matches("[data-follow]")) return;
  kept = { follow: event.target.checked, top: log().scrollTop };
  place();
});

// Scrolling up stops following; scrolling back to the newest line resumes it.
document.addEventListener("scroll", (event) => {
  if (!(event.target instanceof Element) || !event.target.matches("[data-log]")) return;
  kept = { follow: bottom(event.target) - event.target.scrollTop < 24, top: event.target.scrollTop };
  box().checked = kept.follow;
}, true);

document.body.addEventListener("htmx:afterRequest", (event) => {
  if (event.detail.successful) place();
});

place();

// Buttons that copy the text of another element. Without a clipboard they stay hidden: the text can be selected.

const COPIED_MS = 2000;

function offerCopies() {
  if (!navigator.clipboard) return;
  for (const button of document.querySelectorAll("[data-copy]")) button.hidden = false;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
  const note = document.querySelector("[data-copied]");
  if (note) {
    note.hidden = false;
    return;
  }
  const label = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = label), COPIED_MS);
});

offerCopies();
document.body.addEventListener("htmx:afterSettle", offerCopies);

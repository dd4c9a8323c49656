// A button that copies the text of another element. Without a clipboard it stays hidden: the text can be selected.

for (const button of document.querySelectorAll("[data-copy]")) {
  if (!navigator.clipboard) continue;
  button.hidden = false;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    document.querySelector("[data-copied]").hidden = false;
  });
}

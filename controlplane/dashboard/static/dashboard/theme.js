// Puts the chosen theme in force before anything is drawn. "auto" follows the system.
// The toggle itself lives in controls.js; both know the choice under the same name.
const chosen = localStorage.getItem("switchyard-theme");
document.documentElement.dataset.theme = chosen === "light" || chosen === "dark" ? chosen : "auto";
document.documentElement.classList.add("scripted");

// Light or dark before anything is painted: the reader's choice, else the system's.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("fallow-theme"); } catch { /* a page from a file may have no storage */ }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const show = (name) => { root.dataset.theme = name; document.dispatchEvent(new Event("theme")); };
  root.dataset.theme = chosen || (dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => { if (!chosen) show(dark.matches ? "dark" : "light"); });
  window.switchTheme = () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("fallow-theme", chosen); } catch { /* it lasts for this visit */ }
    show(chosen);
  };
})();

// What stands against runs, with what to try: a run that does not learn says so. Runs of which the same is said stand together.
function against() {
  const found = new Map();
  page.groups.forEach((group) => shown(group).forEach((run) => (run.warnings || []).forEach((w) => {
    const key = `${w.sentence} ${w.remedy}`;
    if (!found.has(key)) found.set(key, { ...w, runs: new Map() });
    const { runs } = found.get(key);
    runs.set(group, [...(runs.get(group) || []), run]);
  })));
  return [...found.values()];
}

const sentenced = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`.replaceAll(" %", "\u00a0%");

function whose(group, runs) {
  const seeds = group.runs.length > 1 && el("small", {}, ` ${runs.length > 1 ? "seeds" : "seed"} ${runs.map((run) => run.seed).join(", ")}`);
  return el("div", {}, swatch(group.number), el("span", {}, group.name, seeds));
}

wholeSection("Warnings", "What stands against these runs, and what to try.", () => against().length > 0, (card) => {
  card.replaceChildren(el("ul", { class: "warnings" }, against().map(({ runs, sentence, remedy }) => el("li", {},
    el("div", { class: "who" }, [...runs].map(([group, members]) => whose(group, members))),
    el("div", {}, el("b", {}, sentenced(sentence)), el("p", {}, `What to try: ${remedy}.`.replaceAll(" %", "\u00a0%")))))));
});

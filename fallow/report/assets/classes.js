// By class: accuracy, the prior, its bias; and who holds what.
const VECTORS = {
  class_accuracy: { title: "Accuracy by class", note: "test accuracy in %" },
  prior: { title: "Class prior", note: "share of each class among predictions for unlabelled samples, in %; dashed: an even share", even: true },
};
const PRIORS = { bias: "from an even share", labels: "from the classes of a client's labels", appu: "from the classes predicted for a client's data" };

cardSection("Classes", "How evenly the model has learnt. Dots: mean over seeds in the chosen round; bars: ± one standard deviation.", () => Object.entries(VECTORS).map(([name, words]) => ({ ...words, name, make: dotCard })));

cardSection("Prior bias", "Jensen-Shannon divergence of class accuracies, mean over clients; 0 is no bias. Solid: the global model, dashed: local ones.", () => {
  const found = new Set(below("prior_js").map((column) => column.slice("prior_js.".length).replace(/_local$/, "")));
  return [...Object.keys(PRIORS).filter((name) => found.has(name)), ...[...found].filter((name) => !PRIORS[name])].map((name) => ({
    title: name === "appu" ? "APP-U" : name[0].toUpperCase() + name.slice(1), note: PRIORS[name], zero: true,
    lines: () => [{ column: `prior_js.${name}` }, { column: `prior_js.${name}_local`, suffix: ", local", dashes: [6, 4] }],
  }));
});

function dotCard(spec) {
  const plot = el("div"), output = el("output"), state = { at: 1 };
  const slide = el("input", { type: "range", min: 0, max: 1000, value: 1000, "aria-label": `Round of ${spec.title}`, oninput: () => { state.at = slide.value / 1000; update(); } });
  const label = el("label", { class: "slide" }, slide, output);
  const card = el("article", { class: "card" }, el("header", {}, el("h3", {}, spec.title), el("p", {}, spec.note), label), plot);
  const having = () => page.runs.filter((run) => run.vectors[spec.name]);
  const update = () => {
    const rounds = [...new Set(having().flatMap((run) => run.vectors[spec.name].round))].sort((a, b) => a - b);
    const round = rounds[Math.round(state.at * (rounds.length - 1))];
    output.textContent = `round ${thousands(round)}`;
    label.hidden = rounds.length < 2;
    const classes = classNames(having()[0].vectors[spec.name].values[0].length);
    const entries = showing().map((group) => ({ group, ...byClass(shown(group), spec.name, round) })).filter((e) => e.values.length);
    const high = spec.even ? 1.04 * Math.max(...entries.flatMap((e) => e.values.map((v, k) => v + e.stds[k])), 1 / classes.length) : 1;
    const write = (v) => (v == null ? "–" : figures(100 * v));
    if (classes.length <= DOT_CLASSES) plot.replaceChildren(dots(inner(card), classes, entries, write, high, spec.even ? 1 / classes.length : null));
    else plot.replaceChildren(...entries.map((e) => el("div", {}, el("p", { class: "key" }, el("span", {}, swatch(e.group.number), e.group.name)), heat(inner(card), [e.group.name], classes, [e.values], ink(e.group.number), write, high))));
  };
  return { spec, card, update, has: () => having().length > 0 };
}

/** Names of so many classes; numbers where data sets of different names are beside each other. */
function classNames(count) {
  const known = ({ classes }) => (classes.at(-1) === "unknown" && classes.length === count + 1 ? classes.slice(0, -1) : classes);
  const found = page.federations.map(known).filter((classes) => classes.length === count);
  return found.length && found.every((classes) => classes.join() === found[0].join()) ? found[0] : [...Array(count).keys()].map(String);
}

/** Mean and deviation by class over runs, each at its last measured round up to the one asked for. */
function byClass(runs, name, round) {
  const found = runs.filter((run) => run.vectors[name]).map((run) => {
    const { round: rounds, values } = run.vectors[name];
    return values[rounds.findLastIndex((r) => r <= round)];
  }).filter(Boolean);
  if (!found.length) return { values: [], stds: [] };
  const columns = found[0].map((_, k) => found.map((row) => row[k]).filter((v) => v != null));
  return { values: columns.map((c) => (c.length ? mean(c) : null)), stds: columns.map((c) => (c.length > 1 ? spread(c) : 0)) };
}

// -- the federation ----------------------------------------------------------------------------------------------------
const federation = { at: 0 };
wholeSection("Federation", "Who holds how many samples of which class; the area of a disc is the count.", () => page.federations.length > 0, (card, width) => {
  federation.choose();
  const f = page.federations[Math.min(federation.at, page.federations.length - 1)], drawn = [f.fingerprint, width, dark()].join();
  if (card.dataset.drawn === drawn) return;  // while a run goes on it stays the same
  card.dataset.drawn = drawn;
  const notes = [
    `Fingerprint ${f.fingerprint.slice(0, 12)}.`,
    f.clients.length < f.all_clients && `Shown are ${thousands(f.clients.length)} of ${thousands(f.all_clients)} clients, evenly spaced.`,
    f.classes.length === 1 && f.classes[0] === "samples" && "The run did not store classes, so these are sizes.",
  ].filter(Boolean).join(" ");
  const apart = f.classes.length > BUBBLE_CLASSES && !f.totals.labelled;  // the server's row above the clients
  const wide = width > 760 && !apart ? (width - 40) / 2 : width;
  card.replaceChildren(el("div", { class: "sides" }, ["labelled", "unlabelled"].map((name) => holdings(f, name, wide))), el("p", { class: "key" }, notes));
}, (update) => {
  const select = el("select", { "aria-label": "Federation", onchange: () => { federation.at = select.selectedIndex; update(); } });
  federation.choose = () => {
    const texts = page.federations.map((f) => {
      const runs = page.runs.filter((run) => run.federation === f.fingerprint), seeds = [...new Set(runs.map((r) => r.seed))];
      return `${seeds.length === 1 ? `seed ${seeds[0]}` : `seeds ${seeds.join(", ")}`} · ${[...new Set(runs.map((r) => groupOf(r).name))].join(", ")}`;
    });
    if (texts.join("\n") === federation.texts) return;
    federation.texts = texts.join("\n");
    select.replaceChildren(...texts.map((text, i) => el("option", { value: i, selected: i === federation.at }, short(text, 60))));
    select.hidden = texts.length < 2;
  };
  return select;
});

/** One side of a federation; labels at the server are a row of their own. */
function holdings(f, name, width) {
  let rows = f.clients, counts = f[name], total = f.totals[name];
  const atServer = name === "labelled" && f.server.some(Boolean);
  if (atServer) {
    const [names, held] = total ? [rows, counts] : [[], []];
    rows = ["server", ...names]; counts = [f.server, ...held];
    total += f.server.reduce((a, b) => a + b, 0);
  }
  if (!total) return null;
  const discs = rows.length <= BUBBLE_CLIENTS && f.classes.length <= BUBBLE_CLASSES;
  const skew = f.skew[name] != null && !atServer ? `, skew R = ${f.skew[name].toFixed(3)}` : "";
  return el("div", {}, el("header", {}, el("h3", {}, `${thousands(total)} ${name}`), el("p", {}, `largest: ${thousands(largest(counts.flat()))}${skew}`)),
    discs ? bubbles(width, rows, f.classes, counts, name) : [heat(width, rows, f.classes, counts, colour(name), (v) => `${thousands(v)} ${name}`), el("p", { class: "key" }, `${rows.length > 1 ? `a row for each of ${thousands(rows.length)} holders, ` : "at the server, "}a column for each of ${thousands(f.classes.length)} classes`)]);
}

// Sections of curves: accuracy, pseudo-labels, gradient diversity, bytes and seconds, what methods log.
cardSection("Accuracy over rounds", ["Line: mean over the runs that differ only in seed; band: ± one standard deviation.", el("span", { class: "wideonly" }, " Drag to zoom in, double-click to zoom out.")], () => [
  { ...chart("Test accuracy in %", "accuracy"), ...shares, full: true, marks: publishedMarks, control: zoomButtons },
  chart("Test loss", "test_loss", { note: "mean over the test set" }),
  chart("Training loss", "loss", { note: "mean over a round's steps" }),
  { ...chart("Validation accuracy", "validation_accuracy", { note: "on labels held out of training, in %" }), ...shares },
  { ...chart("Balanced accuracy", "balanced_accuracy", { note: "mean of the classes' accuracies on the test set, in %" }), ...shares },
  chart("Macro F1", "macro_f1", { note: "mean over classes, on the test set" }),
  { ...chart("Calibration error", "calibration_error", { note: "mean gap between confidence and share right, in %" }), ...shares, zero: true },
]);

function publishedMarks() {
  const marks = showing().flatMap((g) => published(g).map((p) => ({ value: p.mean, group: g.number, text: `${p.row}, published ${p.mean}` })));
  const list = [...new Map(marks.map((m) => [`${m.group} ${m.value}`, m])).values()].slice(0, 8);
  return list.length > 5 ? list.map((m) => ({ ...m, text: "" })) : list;  // the table above names them
}

/** All rounds, or those in which it is decided. */
function zoomButtons() {
  const half = () => { const last = Math.max(...page.runs.map((run) => run.done)); return { min: Math.round(last / 2), max: last }; };
  const button = (text, zoom) => el("button", { type: "button", "data-zoom": text, onclick: () => { page.zoom = zoom(); render(); } }, text);
  return el("div", { class: "choice", role: "group", "aria-label": "Rounds shown" }, button("all rounds", () => null), button("last half", half));
}

cardSection("Pseudo-labels", "What the unlabelled samples were given. True labels serve only to measure.", () => [
  { ...chart("Pseudo-labelled", "label_ratio", { note: "accepted, of the unlabelled samples, in %" }), ...shares, zero: true },
  { ...chart("Right among the accepted", "label_accuracy", { note: "share of right labels, in %" }), ...shares },
  { ...chart("Right among all", "label_accuracy_all", { note: "whether accepted or not, in %" }), ...shares },
  {
    title: "Right by who labels", note: "in %; solid: the model that a client keeps, dashed: the global one", ...shares,
    lines: () => [{ column: "label_accuracy_local", suffix: ", local" }, { column: "label_accuracy_global", suffix: ", global", dashes: [6, 4] }],
  },
]);

// -- gradient diversity ------------------------------------------------------------------------------------------------
const diversity = { column: null };
cardSection("Gradient diversity", "How far the parties of a round pull apart: the sum of their vectors' norms over the norm of the sum.", () => [
  { title: "Diversity", note: "by the chosen definition", lines: () => [{ column: definition() }], control: definitions },
  { title: "Skew R", note: "of the federation: 0 is IID, 1 a class for each client", make: barCard, write: figures, parts: () => (has("R") ? [{ name: "R", value: (g) => (lasts(g, "R").length ? mean(lasts(g, "R")) : null) }] : []) },
]);

function definition() {
  const names = below("diversity");
  if (!names.includes(diversity.column)) diversity.column = names.find((n) => n === "diversity.update/users/l2-squared") || names[0] || null;
  if (diversity.select && diversity.select.options.length !== names.length) {
    diversity.select.replaceChildren(...names.map((n) => el("option", { value: n, selected: n === diversity.column }, n.slice("diversity.".length))));
    diversity.select.hidden = names.length < 2;
  }
  return diversity.column;
}

function definitions(update) {
  diversity.select = el("select", { "aria-label": "Definition", onchange: () => { diversity.column = diversity.select.value; update(); } });
  return diversity.select;
}

// -- bytes and seconds -------------------------------------------------------------------------------------------------
const PHASES = ["clients", "server", "statistics", "test", "merge", "measure"];
const TRAFFIC = { bytes_up: "up", bytes_down: "down", optimizer_bytes_up: "optimiser states up", optimizer_bytes_down: "optimiser states down" };

function phases() {
  const known = below("seconds").map((c) => c.slice("seconds.".length)).filter((p) => p !== "round");
  return [...PHASES.filter((p) => known.includes(p)), ...known.filter((p) => !PHASES.includes(p))].filter((p) => page.groups.some((g) => average(g, `seconds.${p}`) > 0));
}

cardSection("Bytes and seconds", "What a round costs. Bytes are those of the tensors that travel, all clients of a round together.", () => [
  { title: "Sent a round, by direction", note: "mean over rounds", make: barCard, write: bytes, parts: () => Object.entries(TRAFFIC).filter(([c]) => has(c)).map(([c, name]) => ({ name, value: (g) => average(g, c) })) },
  { title: "Time a round, by phase", note: "mean over rounds", make: barCard, write: seconds, parts: () => phases().map((name) => ({ name, value: (g) => average(g, `seconds.${name}`) })) },
  { title: "Bytes over rounds", note: "solid: up, dashed: down", format: bytes, tick: (v) => bytes(v, round3), zero: true, lines: () => [{ column: "bytes_up", suffix: ", up" }, { column: "bytes_down", suffix: ", down", dashes: [6, 4] }] },
  { title: "Seconds over rounds", note: "a whole round", format: seconds, tick: (v) => seconds(v, round3), zero: true, lines: () => [{ column: "seconds.round" }] },
]);

const KNOWN = /^(round|accuracy|test_loss|loss|label_.*|validation_.*|balanced_accuracy|macro_f1|calibration_error|(optimizer_)?bytes_.*|seconds\..*|prior_js(_min|_max)?\..*|diversity\..*|R|lr|clients|client_steps)$/;
cardSection("What the method logs", null, () => [...new Set(page.runs.flatMap((run) => Object.keys(run.columns)))].filter((c) => !KNOWN.test(c)).sort().map((c) => chart(c, c)));

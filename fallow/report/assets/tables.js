// Tables: results, published figures, settings, runs.
wholeSection("Results", "Test accuracy in %, mean ± standard deviation over the runs of a group; each run is a dot, the bar is their mean.", () => page.runs.length > 0, (card) => {
  const scores = showing().flatMap((g) => lasts(g, "accuracy")), low = Math.min(...scores, 1), high = Math.max(...scores, 0);
  const air = Math.max(.004, .06 * (high - low)), last = (g) => mean(lasts(g, "accuracy"));
  const top = Math.max(...showing().filter((g) => lasts(g, "accuracy").length).map(last), -1);
  const columns = [
    ["last", (g) => statistic(lasts(g, "accuracy"), percent), (g) => (showing().length > 1 && last(g) === top ? "best" : null)],
    ["best", (g) => statistic(shown(g).map((r) => r.best), percent)],
    has("label_ratio") && ["pseudo-labelled", (g) => statistic(lasts(g, "label_ratio"), (v) => percent(v, 1))],
    has("label_accuracy") && ["labels right", (g) => statistic(lasts(g, "label_accuracy"), (v) => percent(v, 1))],
    has("bytes_up") && ["sent a round", (g) => [bytes(average(g, "bytes_up") + average(g, "bytes_down"))]],
    has("seconds.round") && ["time a round", (g) => [seconds(average(g, "seconds.round"))]],
    ["rounds", (g) => [progress(g)]],
  ].filter(Boolean);
  const title = ["runs", "n", scores.length > 1 && "", ...columns.map(([name]) => name)].filter((t) => t !== false);
  const rows = page.groups.map((g) => el("tr", { class: shown(g).length ? null : "off" },
    el("td", {}, named(g)), el("td", {}, shown(g).length),
    scores.length > 1 && el("td", { class: "text wideonly" }, strip(lasts(g, "accuracy"), g.number, low - air, high + air)),
    columns.map(([, value, kind]) => el("td", { class: kind ? kind(g) : null }, shown(g).length ? value(g) : "–"))));
  card.replaceChildren(table(title, rows, (i) => (title[i] === "" ? "wideonly" : null)));
});

const named = (group) => el("span", { class: "name", title: group.name }, swatch(group.number), el("span", {}, group.name));
const table = (titles, rows, kind = () => null) => el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, titles.map((t, i) => el("th", { class: kind(i), scope: "col" }, t)))), el("tbody", {}, rows)));

function progress(group) {
  const done = shown(group).map((r) => r.done), rounds = shown(group)[0].rounds;
  const least = Math.min(...done), most = Math.max(...done);
  const text = least === most ? thousands(least) : `${thousands(least)} to ${thousands(most)}`;
  return least === rounds ? text : `${text} of ${thousands(rounds)}`;
}

// -- published ---------------------------------------------------------------------------------------------------------
wholeSection("Beside the published figures", "Accuracy in %, finished runs only. “Within one std” is the published standard deviation or, where none is printed, ours; the rhomb is the published figure.", () => page.runs.some((run) => run.published.length), (card) => {
  const rows = page.groups.flatMap((g) => published(g).map((p) => ({ g, p, ours: shown(g).filter((r) => r.status === "finished" && r[p.statistic] != null).map((r) => 100 * r[p.statistic]) })));
  const all = rows.flatMap(({ p, ours }) => [p.mean, ...ours]), low = Math.min(...all) - 1, high = Math.max(...all) + 1;
  const titles = ["runs", "published in", "ours", "n", "published", "difference", "", "note"];
  const body = rows.map(({ g, p, ours }) => {
    const gap = ours.length ? mean(ours) - p.mean : null, std = p.std ?? (ours.length > 1 ? spread(ours) : null);
    const near = gap != null && std != null && Math.abs(gap) <= std + 1e-9;
    const note = [p.other, ours.length < shown(g).length && `${several(shown(g).length - ours.length, "run")} unfinished`].filter(Boolean).join("; ");
    return el("tr", {},
      el("td", {}, named(g)), el("td", { class: "text" }, `${p.paper}, ${/^\d/.test(p.table) ? "table " : ""}${p.tables.join(" and ")}: ${p.row}`, el("div", { class: "under" }, `${p.data} ${p.setting}, ${p.statistic} round`)),
      el("td", {}, ...statistic(ours, (v) => v.toFixed(2))), el("td", {}, ours.length || ""),
      el("td", {}, p.mean.toFixed(2), p.std != null && el("small", {}, ` ± ${p.std.toFixed(2)}`)), el("td", {}, gap == null ? "–" : `${gap >= 0 ? "+" : "−"}${Math.abs(gap).toFixed(2)} `, near && el("span", { class: "tag good" }, "within one std")),
      el("td", { class: "text wideonly" }, strip(ours, g.number, low, high, [p.mean])), el("td", { class: "text" }, note));
  });
  card.replaceChildren(table(titles, body, (i) => ([1, 7].includes(i) ? "text" : i === 6 ? "wideonly" : null)));
});

// -- settings ----------------------------------------------------------------------------------------------------------
const settings = { find: "" };
wholeSection("Settings", "Every key, as resolved when the run began. Keys in which the groups differ come first.", () => page.groups.length > 0, (card) => {
  const keys = [...new Set(page.groups.flatMap((g) => Object.keys(g.config)))].filter((k) => k !== "seed" && k.includes(settings.find));
  const differs = (k) => new Set(page.groups.map((g) => g.config[k])).size > 1;
  const value = (v) => (v === undefined || v === "" ? el("span", { class: "none" }, v === undefined ? "–" : "none") : v);
  const other = keys.filter(differs), same = keys.filter((k) => !differs(k));
  const differing = other.length > 0 && table(["key", ...page.groups.map((g) => g.name)], other.map((k) => el("tr", {}, el("td", { class: "mono" }, k), page.groups.map((g) => el("td", { class: "wrap" }, value(g.config[k]))))));
  const list = same.length > 0 && el("div", { class: "keys" }, same.map((k) => el("div", {}, el("span", { class: "mono" }, k), el("span", {}, value(page.groups[0].config[k])))));
  const title = page.groups.length > 1 && same.length > 0 && el("h3", {}, `The same in all ${page.groups.length} groups`);
  if (title) title.style.margin = "26px 0 8px";
  card.replaceChildren(...[differing, title, list].filter(Boolean));
}, (update) => {
  const input = el("input", { type: "search", placeholder: "find a key", "aria-label": "Find a key", oninput: () => { settings.find = input.value.trim().toLowerCase(); update(); } });
  return input;
});

// -- runs --------------------------------------------------------------------------------------------------------------
wholeSection("Runs", null, () => page.runs.length > 0, (card) => {
  const made = (run, k) => (run.made[k] || "–").slice(0, k === "commit" || k === "config_hash" ? 8 : 24);
  const alike = ["device", "fallow", "torch", "commit"].filter((k) => page.runs.length > 1 && new Set(page.runs.map((run) => made(run, k))).size === 1);
  const told = ["device", "fallow", "torch", "commit", "config_hash"].filter((k) => !alike.includes(k));
  const titles = ["run", "folder", "seed", "status", "rounds", "last", "best", "in round", "took", ...told.map((k) => (k === "config_hash" ? "config" : k))];
  const common = commonFolder(page.runs.map((run) => run.path));
  const rows = page.runs.map((run) => el("tr", { class: on(run) ? null : "off" },
    el("td", { class: "fold" }, el("label", { class: "name" }, el("input", { type: "checkbox", checked: on(run), "data-run": run.path, onchange: () => toggle([run]) }), swatch(run.group), el("span", {}, groupOf(run).name))),
    el("td", { class: "text mono fold", title: run.path }, run.path.slice(common.length)), el("td", {}, run.seed), el("td", { class: "text" }, el("span", { class: run.status === "finished" ? "tag good" : "tag" }, run.status)),
    el("td", {}, run.done === run.rounds ? thousands(run.done) : `${thousands(run.done)} of ${run.rounds ?? "?"}`), el("td", {}, percent(run.last)), el("td", {}, percent(run.best)), el("td", {}, run.best_round ?? "–"), el("td", {}, run.seconds ? seconds(run.seconds) : "–"),
    told.map((k) => el("td", { class: "text mono" }, made(run, k)))));
  card.replaceChildren(table(titles, rows, (i) => (i === 1 || i === 3 || i > 8 ? "text" : null)));
  const notes = [common && `The folders are in ${common}`, alike.length && `In all of them: ${alike.map((k) => `${k} ${made(page.runs[0], k)}`).join(", ")}`].filter(Boolean);
  if (notes.length) card.append(el("p", { class: "key" }, notes.map((note) => el("span", {}, note))));
});

/** The folder that all paths are in, with its slash. */
function commonFolder(paths) {
  let common = paths[0].slice(0, paths[0].lastIndexOf("/") + 1);
  while (common && !paths.every((path) => path.startsWith(common))) common = common.slice(0, common.lastIndexOf("/", common.length - 2) + 1);
  return common;
}

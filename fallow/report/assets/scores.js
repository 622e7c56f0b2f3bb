// What a finished run is worth beyond its accuracy: a table, confusions, calibration, accuracy by site.
const scored = (group, side = "test") => shown(group).map((run) => run.scores?.[side]).filter(Boolean);
const anyScored = (side, field) => page.runs.some((run) => on(run) && run.scores?.[side] && (!field || run.scores[side][field]));

cardSection("Scores", "Of the weights after the last round, on the test set; mean ± standard deviation over the runs of a group.", () => [
  { title: "In numbers", full: true, make: scoreTable },
  { title: "Who is taken for whom", note: "of each true class (row) the share predicted to be each class (column), in %", make: confusionCard },
  { title: "Calibration", note: "share right by confidence, in %; on the dashed line a model is as often right as it is sure", make: calibrationCard },
  { title: "Accuracy by site", make: siteCard },
]);

function scoreTable(spec) {
  const holder = el("div"), card = el("article", { class: "card full" }, holder);
  const update = () => {
    const value = (side, name, write) => (g) => statistic(scored(g, side).map((s) => s[name]), write);
    const decimals = (v) => v.toFixed(3);
    const columns = [
      ["accuracy", value("test", "accuracy", percent)], ["balanced", value("test", "balanced_accuracy", percent)], ["macro F1", value("test", "macro_f1", decimals)],
      ["AUROC", value("test", "auroc", decimals)], ["calibration error", value("test", "calibration_error", percent)],
      ...(anyScored("validation") ? [["validation", value("validation", "accuracy", percent)]] : []),
      ...(anyScored("best") ? [["its best", value("best", "accuracy", percent)], ["in round", value("best", "round", (v) => round3(v))], ["test there", value("best", "test", percent)]] : []),
    ];
    const having = showing().filter((g) => scored(g).length);
    holder.className = columns.length > 6 ? "many" : "";
    holder.replaceChildren(table(["runs", "n", ...columns.map(([name]) => name)], having.map((g) => el("tr", {}, el("td", {}, named(g)), el("td", {}, scored(g).length), columns.map(([, write]) => el("td", {}, write(g)))))));
  };
  return { spec, card, update, has: () => anyScored("test") };
}

// -- confusions --------------------------------------------------------------------------------------------------------
const confusion = { at: null };

function confusionCard(spec) {
  const plot = el("div");
  const select = el("select", { "aria-label": "Whose confusions", onchange: () => { confusion.at = select.value; update(); } });
  const card = el("article", { class: "card" }, el("header", {}, el("h3", {}, spec.title), el("p", {}, spec.note), select), plot);
  const having = () => showing().filter((g) => scored(g).some((s) => s.confusion));
  const update = () => {
    const groups = having(), group = groups.find((g) => g.name === confusion.at) || groups[0];
    select.hidden = groups.length < 2;
    select.replaceChildren(...groups.map((g) => el("option", { value: g.name, selected: g === group }, short(g.name, 40))));
    const found = scored(group).map((s) => s.confusion).filter(Boolean).filter((m, _, all) => m.length === all[0].length);
    const counts = found[0].map((row, i) => row.map((_, j) => found.reduce((sum, m) => sum + m[i][j], 0)));
    const shares = counts.map((row) => { const n = row.reduce((a, b) => a + b, 0); return row.map((v) => (n ? v / n : null)); });
    const names = classNames(counts.length);
    plot.replaceChildren(names.length <= BUBBLE_CLASSES ? matrix(inner(card), names, counts, shares, ink(group.number)) : heat(inner(card), names.map((n) => `true ${n}`), names.map((n) => `predicted ${n}`), shares, ink(group.number), (v) => `${percent(v, 1)} %`, 1));
  };
  return { spec, card, update, has: () => having().length > 0 };
}

/** A square of cells; rows are what is true, columns what is predicted. */
function matrix(width, names, counts, shares, fill) {
  const left = 30 + 6.6 * Math.min(12, Math.max(...names.map((n) => n.length))), tilted = Math.max(...names.map((n) => n.length)) > 3;
  const cell = Math.min(44, (width - left - 4) / names.length), top = 4, foot = top + cell * names.length, bottom = tilted ? 70 : 38;
  const root = svg("svg", { width, height: foot + bottom, role: "img", "aria-label": names.map((n, i) => `${n}: ${percent(shares[i][i], 0)} % right`).join("; ") });
  const dark_text = colour("ink"), [light_text, bright] = dark() ? ["#0e1210", .5] : ["#ffffff", .75];
  names.forEach((name, i) => {
    const y = top + cell * (i + .5);
    root.append(svg("text", { x: left - 8, y: y + 4, "text-anchor": "end", class: "ink" }, short(name, 12)));
    names.forEach((other, j) => {
      const share = shares[i][j], x = left + cell * (j + .5);
      root.append(svg("rect", { x: x - cell / 2 + .5, y: y - cell / 2 + .5, width: cell - 1, height: cell - 1, rx: 2, fill: share ? fill : colour("field"), "fill-opacity": share ? .08 + .92 * share ** .7 : 1 }));
      const text = share >= .005 && cell >= 21 ? Math.round(100 * share) : "";
      if (text !== "") root.append(svg("text", { x, y: y + 4, "text-anchor": "middle", class: "cell", fill: share > bright ? light_text : dark_text, style: `fill: ${share > bright ? light_text : dark_text}; font-size: ${cell < 27 ? 10 : 12}px` }, text));
      root.append(svg("rect", {
        x: x - cell / 2, y: y - cell / 2, width: cell, height: cell, fill: "transparent", onpointerleave: hush,
        onpointermove: (event) => tell(event, `true ${name}`, [["", i === j ? "predicted rightly" : `predicted ${other}`, thousands(counts[i][j]), share == null ? "" : ` ${percent(share, 1)} %`]]),
      }));
    });
  });
  names.forEach((name, j) => {
    const x = left + cell * (j + .5), y = foot + (tilted ? 12 : 15);
    root.append(svg("text", { x, y, "text-anchor": tilted ? "end" : "middle", transform: tilted ? `rotate(-45 ${x} ${y})` : null }, short(name, 10)));
  });
  const middle = left + cell * names.length / 2;
  root.append(svg("text", { x: middle, y: foot + bottom - 5, "text-anchor": "middle", class: "axis" }, "predicted"),
    svg("text", { x: 12, y: (top + foot) / 2, "text-anchor": "middle", class: "axis", transform: `rotate(-90 12 ${(top + foot) / 2})` }, "true"));
  return root;
}

// -- calibration -------------------------------------------------------------------------------------------------------
/** A group's bins, its runs pooled: [confidence, share right, samples]. */
function pooledBins(group) {
  const found = scored(group).map((s) => s.calibration).filter(Boolean);
  if (!found.length) return [];
  return found[0].samples.map((_, b) => {
    const here = found.filter((c) => c.samples[b]), n = here.reduce((sum, c) => sum + c.samples[b], 0);
    const over = (name) => here.reduce((sum, c) => sum + c.samples[b] * c[name][b], 0) / n;
    return [over("confidence"), over("accuracy"), n];
  }).filter(([, , n]) => n > 0);
}

function calibrationCard(spec) {
  const plot = el("div"), card = el("article", { class: "card" }, el("header", {}, el("h3", {}, spec.title), el("p", {}, spec.note)), plot);
  const update = () => plot.replaceChildren(reliability(Math.min(inner(card), 560), showing().map((g) => [g, pooledBins(g)]).filter(([, bins]) => bins.length)));
  return { spec, card, update, has: () => showing().some((g) => pooledBins(g).length) };
}

function reliability(width, entries) {
  const left = 34, right = width - 18, top = 8, foot = top + Math.min(right - left, 380);
  const x = (v) => left + (right - left) * v, y = (v) => foot - (foot - top) * v;
  const root = svg("svg", { width, height: foot + 40, role: "img", "aria-label": entries.map(([g, bins]) => `${g.name}: ${bins.map(([c, a]) => `${percent(a, 0)} % right at ${percent(c, 0)} %`).join(", ")}`).join("; ") });
  for (let v = 0; v <= 1.001; v += .2) {
    root.append(svg("line", { x1: x(v), x2: x(v), y1: top, y2: foot, stroke: colour("grid") }), svg("line", { x1: left, x2: right, y1: y(v), y2: y(v), stroke: colour("grid") }),
      svg("text", { x: x(v), y: foot + 17, "text-anchor": "middle" }, Math.round(100 * v)), svg("text", { x: left - 7, y: y(v) + 4, "text-anchor": "end" }, Math.round(100 * v)));
  }
  root.append(svg("line", { x1: x(0), x2: x(1), y1: y(0), y2: y(1), stroke: colour("soft"), "stroke-dasharray": "4 4" }), svg("text", { x: (left + right) / 2, y: foot + 34, "text-anchor": "middle", class: "axis" }, "confidence"));
  const most = largest(entries.flatMap(([, bins]) => bins.map((b) => b[2])));
  for (const [group, bins] of entries) {
    const stroke = ink(group.number), line = bins.map(([c, a], i) => `${i ? "L" : "M"}${x(c)} ${y(a)}`).join("");
    root.append(svg("path", { d: line, fill: "none", stroke, "stroke-width": 2, "stroke-dasharray": dash(group.number).join(" ") || null, "stroke-opacity": .8 }));
    bins.forEach(([c, a, n]) => root.append(svg("circle", {
      cx: x(c), cy: y(a), r: 2.5 + 6 * Math.sqrt(n / most), fill: stroke, "fill-opacity": .75, stroke: colour("card"), onpointerleave: hush,
      onpointermove: (event) => tell(event, group.name, [["", "mean confidence", `${percent(c, 1)} %`], ["", "right", `${percent(a, 1)} %`], ["", "samples", thousands(n)]]),
    })));
  }
  return root;
}

// -- sites -------------------------------------------------------------------------------------------------------------
const DOT_SITES = 40;

function siteCard(spec) {
  const plot = el("div"), note = el("p"), card = el("article", { class: "card" }, el("header", {}, el("h3", {}, spec.title), note), plot);
  const sites = (group) => scored(group, "sites");
  const update = () => {
    const groups = showing().filter((g) => sites(g).length), all = groups.flatMap(sites);
    const names = [...new Set(all.flatMap((s) => s.names))], of = new Set(all.map((s) => s.of));
    note.textContent = `${of.has("test") ? "on each site's test images" : ""}${of.size > 1 ? " or " : ""}${of.has("validation") ? "on the labels that each party holds out" : ""}, in %; ${all[0].all > all[0].names.length ? `${thousands(all[0].names.length)} of ${thousands(all[0].all)} sites` : several(names.length, "site")}`;
    const at = (g, name) => sites(g).map((s) => s.accuracy[s.names.indexOf(name)]).filter((v) => v != null);
    const entries = groups.map((group) => ({ group, values: names.map((n) => (at(group, n).length ? mean(at(group, n)) : null)), stds: names.map((n) => (at(group, n).length > 1 ? spread(at(group, n)) : 0)) }));
    const write = (v) => (v == null ? "–" : figures(100 * v));
    plot.replaceChildren(names.length <= DOT_SITES ? dots(inner(card), names, entries, write, 1, null) : heat(inner(card), entries.map((e) => e.group.name), names, entries.map((e) => e.values), ink(0), write, 1));
  };
  return { spec, card, update, has: () => showing().some((g) => sites(g).length) };
}

// What uPlot does not draw: discs, heat maps, dots by class, bars, strips.
const BUBBLE_CLIENTS = 24, BUBBLE_CLASSES = 20, DOT_CLASSES = 24;
const short = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

/** A disc for each row and class, its area as the count. */
function bubbles(width, rows, classes, counts, name) {
  const left = 16 + 6.6 * Math.min(14, Math.max(6, ...rows.map((r) => r.length)));
  const tilted = Math.max(...classes.map((c) => c.length)) > 3;
  const cell = Math.min(46, (width - left - 8) / classes.length), tall = Math.min(32, Math.max(17, cell));
  const top = 22, bottom = tilted ? 62 : 24, most = Math.max(1, largest(counts.flat()));
  const at = (row, column) => [left + cell * (column + .5), top + tall * (row + .5)];
  const right = left + cell * classes.length, foot = top + tall * rows.length;
  const root = svg("svg", { width, height: foot + bottom, role: "img", "aria-label": `${name} samples of each class at each party` });
  root.append(svg("text", { x: left - 8, y: 13, "text-anchor": "end", class: "axis" }, "client"), svg("text", { x: left - 8, y: foot + 16, "text-anchor": "end", class: "axis" }, "class"));
  for (let c = 0; c < classes.length; c++) root.append(svg("line", { x1: at(0, c)[0], x2: at(0, c)[0], y1: top, y2: foot, stroke: colour("grid") }));
  rows.forEach((row, r) => {
    const y = at(r, 0)[1];
    root.append(svg("line", { x1: left, x2: right, y1: y, y2: y, stroke: colour("grid") }), svg("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, short(row, 14)));
    classes.forEach((label, c) => {
      const held = counts[r][c];
      if (!held) return;
      const radius = Math.max(1.6, .47 * Math.min(cell, tall) * Math.sqrt(held / most));
      const [x] = at(r, c);
      root.append(svg("circle", { cx: x, cy: y, r: radius, fill: colour(name), "fill-opacity": .85 }), svg("rect", {
        x: x - cell / 2, y: y - tall / 2, width: cell, height: tall, fill: "transparent",
        onpointermove: (event) => tell(event, row, [["", label, thousands(held), ` ${name}`]]), onpointerleave: hush,
      }));
    });
  });
  classes.forEach((label, c) => {
    const [x] = at(0, c), y = foot + (tilted ? 12 : 16);
    root.append(svg("text", { x, y, "text-anchor": tilted ? "end" : "middle", transform: tilted ? `rotate(-45 ${x} ${y})` : null }, short(label, 10)));
  });
  return root;
}

/** A cell for each row and column, its depth as the value; one pixel each, stretched. */
function heat(width, rows, columns, values, fillColour, write, most = largest(values.flat()) || 1) {
  const canvas = el("canvas", { class: "heat", width: columns.length, height: rows.length, role: "img", "aria-label": `heat map of ${rows.length} rows and ${columns.length} columns` });
  const tall = Math.max(3, Math.min(26, 640 / rows.length));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${Math.min(700, Math.max(24, tall * rows.length))}px`;
  const context = canvas.getContext("2d"), picture = context.createImageData(columns.length, rows.length);
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(fillColour.slice(i, i + 2), 16));
  values.forEach((row, i) => row.forEach((value, j) => {
    const depth = value == null ? 0 : 255 * Math.sqrt(Math.max(0, value) / most);
    picture.data.set([r, g, b, depth], 4 * (i * columns.length + j));
  }));
  context.putImageData(picture, 0, 0);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const i = Math.min(rows.length - 1, Math.floor((event.clientY - box.top) / box.height * rows.length));
    const j = Math.min(columns.length - 1, Math.floor((event.clientX - box.left) / box.width * columns.length));
    if (values[i]?.[j] != null) tell(event, rows[i], [["", columns[j], write(values[i][j])]]);
  });
  canvas.addEventListener("pointerleave", hush);
  return canvas;
}

/** A row for each class, a dot for each group; `entries` are {group, values, stds}; `line` is a value to compare with. */
function dots(width, classes, entries, write, high, line) {
  const low = 0, left = 14 + 6.8 * Math.min(16, Math.max(...classes.map((c) => c.length))), right = width - 16;
  const stepY = Math.min(9, 24 / entries.length), tall = Math.max(24, stepY * entries.length + 7), foot = 4 + tall * classes.length;
  const at = (v) => left + (right - left) * (v - low) / (high - low || 1);
  const root = svg("svg", { width, height: foot + 26, role: "img", "aria-label": classes.map((c, k) => `${c}: ${entries.map((e) => `${e.group.name} ${write(e.values[k])}`).join(", ")}`).join("; ") });
  const step = ticks(low, high, width < 420 ? 4 : 6);
  for (let v = Math.ceil(low / step) * step; v <= high + 1e-9; v += step) root.append(svg("line", { x1: at(v), x2: at(v), y1: 2, y2: foot, stroke: colour("grid") }), svg("text", { x: at(v), y: foot + 17, "text-anchor": "middle" }, decimal(100 * step)(100 * v)));
  if (line != null) root.append(svg("line", { x1: at(line), x2: at(line), y1: 0, y2: foot, stroke: colour("soft"), "stroke-dasharray": "3 3" }));
  classes.forEach((label, k) => {
    const y = 4 + tall * (k + .5);
    root.append(svg("text", { x: left - 10, y: y + 4, "text-anchor": "end", class: "ink" }, short(label, 16)));
    if (k) root.append(svg("line", { x1: left, x2: right, y1: y - tall / 2, y2: y - tall / 2, stroke: colour("grid") }));
    entries.forEach((entry, e) => {
      const v = entry.values[k], s = entry.stds[k], row = y + stepY * (e - (entries.length - 1) / 2);
      if (v == null) return;
      if (s) root.append(svg("line", { x1: at(Math.max(low, v - s)), x2: at(Math.min(high, v + s)), y1: row, y2: row, stroke: ink(entry.group.number), "stroke-width": 2, "stroke-opacity": .45 }));
      root.append(svg("circle", { cx: at(v), cy: row, r: 4.2, fill: ink(entry.group.number), stroke: colour("card"), "stroke-width": 1 }));
    });
    root.append(svg("rect", {
      x: 0, y: y - tall / 2, width, height: tall, fill: "transparent", onpointerleave: hush,
      onpointermove: (event) => tell(event, label, entries.filter((e) => e.values[k] != null).map((e) => [swatch(e.group.number), e.group.name, write(e.values[k]), e.stds[k] ? ` ± ${write(e.stds[k])}` : null])),
    }));
  });
  return root;
}

/** A step of 1, 2 or 5 times a power of ten that gives about so many ticks. */
function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((m) => m * power >= rough);
}

const DEPTHS = [1, .62, .4, .25, .16, .1];

/** A bar for each group, in parts; `parts` are {name, value(group)}. */
function bars(width, all, parts, write) {
  const groups = all.filter((g) => parts.some((p) => p.value(g) != null));
  const left = Math.min(.36 * width, 14 + 6.8 * Math.max(...groups.map((g) => g.name.length))), right = width - 84;
  const totals = groups.map((g) => parts.reduce((sum, p) => sum + (p.value(g) || 0), 0)), most = Math.max(...totals, 1e-12);
  const root = svg("svg", { width, height: 32 * groups.length + 4, role: "img", "aria-label": groups.map((g, i) => `${g.name}: ${write(totals[i])}, of it ${parts.map((p) => `${p.name} ${write(p.value(g))}`).join(", ")}`).join("; ") });
  groups.forEach((group, i) => {
    const y = 32 * i + 5;
    let x = left;
    root.append(svg("text", { x: left - 10, y: y + 16, "text-anchor": "end", class: "ink" }, short(group.name, Math.floor((left - 14) / 6.8))));
    parts.forEach((part, p) => {
      const value = part.value(group) || 0, long = (right - left) * value / most;
      if (long > .2) root.append(svg("rect", { x, y, width: Math.max(.6, long - 1), height: 22, rx: 2, fill: ink(group.number), "fill-opacity": DEPTHS[Math.min(p, DEPTHS.length - 1)] }));
      x += long;
    });
    root.append(svg("text", { x: x + 8, y: y + 16 }, write(totals[i])), svg("rect", {
      x: 0, y, width, height: 26, fill: "transparent", onpointerleave: hush,
      onpointermove: (event) => tell(event, group.name, [...parts.filter((p) => p.value(group)).map((p) => ["", p.name, write(p.value(group))]), ["", "together", write(totals[i])]]),
    }));
  });
  const key = el("div", { class: "key" }, parts.map((part, p) => {
    const box = el("i");
    box.style.opacity = DEPTHS[Math.min(p, DEPTHS.length - 1)];
    return el("span", {}, box, part.name);
  }));
  return parts.length > 1 ? [root, key] : [root];
}

function barCard(spec) {
  const plot = el("div"), card = el("article", { class: "card" }, el("header", {}, el("h3", {}, spec.title), el("p", {}, spec.note)), plot);
  return { spec, card, has: () => spec.parts().length > 0, update: () => plot.replaceChildren(...(showing().length ? bars(inner(card), showing(), spec.parts(), spec.write) : [])) };
}

/** Each run as a dot on one line, the mean as a bar, published figures as a rhomb. */
function strip(values, group, low, high, marks = []) {
  const width = 160, at = (v) => 8 + (width - 16) * (v - low) / (high - low || 1);
  const root = svg("svg", { width, height: 20, "aria-hidden": "true" }, svg("line", { x1: 4, x2: width - 4, y1: 10, y2: 10, stroke: colour("line") }));
  values.forEach((v) => root.append(svg("circle", { cx: at(v), cy: 10, r: 4, fill: ink(group), "fill-opacity": .5 })));
  if (values.length) root.append(svg("line", { x1: at(mean(values)), x2: at(mean(values)), y1: 3, y2: 17, stroke: ink(group), "stroke-width": 2.5 }));
  marks.forEach((v) => root.append(svg("path", { d: `M${at(v)} 4l6 6-6 6-6-6z`, fill: colour("card"), stroke: colour("ink"), "stroke-width": 1.6 })));
  return root;
}

// Line charts over rounds, drawn by uPlot: a mean and a band for each group, or a line for each run.

/**
 * A card with a chart. `spec.lines()` gives what is drawn as {column, dashes, suffix}; `spec.scale` multiplies values,
 * `spec.format` writes them; `spec.zero` starts the axis at 0, `spec.top` ends it; `spec.marks()` gives horizontal lines
 * {value, group, text}.
 */
function lineCard(spec) {
  const plot = el("div", { class: "plot", tabindex: 0, role: "img" });
  const card = el("article", { class: spec.full ? "card full" : "card" }, el("header", {}, el("h3", {}, spec.title), spec.note && el("p", {}, spec.note), spec.control && spec.control(() => update(chart))), plot);
  const chart = { spec, card, plot, u: null, key: "" };
  plot.addEventListener("pointerleave", hush);
  plot.addEventListener("blur", () => { hush(); chart.u?.setCursor({ left: -10, top: -10 }); });
  plot.addEventListener("keydown", (event) => walk(chart, event));
  chart.has = () => page.runs.some((run) => spec.lines().some((line) => run.columns[line.column]));
  chart.update = () => update(chart);
  return chart;
}

function series(spec) {
  const out = [];
  for (const line of spec.lines()) {
    for (const group of showing()) {
      if (page.each) {
        for (const run of shown(group)) {
          const list = points(run, line.column).map(([round, value]) => ({ round, mean: value, std: 0, n: 1 }));
          if (list.length) out.push({ group, list, name: run.name + (line.suffix || ""), dashes: line.dashes || dash(group.number), id: run.path + line.column });
        }
      } else {
        const list = curve(group, line.column);
        if (list.length) out.push({ group, list, name: group.name + (line.suffix || ""), dashes: line.dashes || dash(group.number), id: group.name + line.column, band: true });
      }
    }
  }
  return out;
}

function update(chart) {
  const { spec, plot } = chart;
  const all = series(spec);
  chart.series = all;
  const marks = spec.marks ? spec.marks() : [];
  chart.marks = marks;
  const rounds = [...new Set(all.flatMap((s) => s.list.map((p) => p.round)))].sort((a, b) => a - b);
  const place = new Map(rounds.map((round, i) => [round, i]));
  const scale = spec.scale || 1, within = (v) => Math.min(Math.max(v, spec.zero ? 0 : -Infinity), spec.top ?? Infinity);
  const bands = [], middles = [];
  for (const s of all) {
    const [middle, high, low] = [0, 1, 2].map(() => new Array(rounds.length).fill(null));
    s.list.forEach((p) => {
      const i = place.get(p.round);
      middle[i] = scale * p.mean; high[i] = within(scale * (p.mean + p.std)); low[i] = within(scale * (p.mean - p.std));
    });
    if (s.band) bands.push(high, low);
    middles.push(middle);
  }
  const data = [rounds, ...bands, ...middles];  // bands first, so that no band covers a line
  const key = JSON.stringify([all.map((s) => [s.id, s.dashes]), marks, dark(), page.each, plot.clientWidth, spec.title]);
  if (chart.u && chart.key === key) {
    chart.u.setData(data, !page.zoom);
    if (page.zoom) chart.u.redraw();
  } else {
    chart.u?.destroy();
    chart.key = key;
    chart.u = new uPlot(options(chart, all), data, plot);
    if (page.zoom) chart.u.setScale("x", page.zoom);
  }
  plot.setAttribute("aria-label", describe(chart));
}

const describe = ({ spec, series: all }) => `${spec.title} over rounds. ` + all.map((s) => {
  const p = s.list[s.list.length - 1];
  return `${s.name}: ${write(spec, p.mean)} in round ${p.round}`;
}).join("; ");
const write = (spec, value) => (spec.format || figures)((spec.scale || 1) * value) + (spec.unit ? ` ${spec.unit}` : "");

function options(chart, all) {
  const { spec, plot } = chart;
  const width = plot.clientWidth, narrow = width < 560;
  const edges = [], lines = [], bands = [], unseen = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
  for (const s of all) {
    const stroke = ink(s.group.number);
    lines.push({ stroke, width: page.each || s.list.length > 250 ? 1.5 : 2.25, dash: s.dashes, spanGaps: true, points: { show: s.list.length < 3, size: 6, fill: stroke } });
    if (!s.band) continue;
    bands.push({ series: [edges.length + 1, edges.length + 2], fill: stroke + (dark() ? "33" : "26") });
    edges.push({ ...unseen }, { ...unseen });
  }
  const axis = { stroke: colour("soft"), font: `12px ${colour("font")}`, grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false } };
  const labels = spec.full && !narrow && !page.each;
  const gutter = labels ? 24 + Math.max(...all.map((s) => across(endOf(spec, s, s.list[s.list.length - 1]))), 0) : 14;
  return {
    width, height: spec.full ? (narrow ? 280 : 400) : 220, padding: [10, gutter, 0, 0], legend: { show: false }, series: [{}, ...edges, ...lines], bands,
    scales: { x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: (u, low, high) => reach(chart, low, high) } },
    axes: [
      { ...axis, size: 24, gap: 6, label: "round", labelSize: 20, labelGap: 0, labelFont: axis.font, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5], values: (u, ticks) => ticks.map((t) => (t === 0 || t % 1 ? "" : thousands(t))) },
      { ...axis, size: (u, texts) => 16 + 6.8 * Math.max(3, ...(texts || []).map((t) => t.length)), values: (u, ticks, at, space, step) => ticks.map(spec.tick || decimal(step)) },
    ],
    cursor: { sync: { key: "rounds" }, y: false, points: { size: 7 }, drag: { x: true, y: false }, focus: { prox: page.each ? 20 : -1 } },
    focus: { alpha: .25 },
    hooks: {
      setCursor: [(u) => hover(chart, u)],
      setScale: [(u, name) => zoomed(u, name)],
      draw: [(u) => { mark(chart, u); if (labels) ends(chart, u); }],
    },
  };
}

/** Ticks with as many decimals as their step needs. */
const decimal = (step) => (v) => (step < 1e-4 || step > 1e6 ? v.toExponential(1) : v.toFixed([0, 1, 2, 3, 4, 5].find((d) => Math.abs(step * 10 ** d - Math.round(step * 10 ** d)) < 1e-6) ?? 5));

/** The range of the values, with the marks, and some air. */
function reach(chart, low, high) {
  if (low == null) return [0, 1];
  const values = chart.marks.map((m) => m.value);
  low = Math.min(low, ...values); high = Math.max(high, ...values);
  const air = (high - low || Math.abs(high) || 1) * .06;
  return [chart.spec.zero ? Math.min(0, low) : low - air, Math.min(high + air, chart.spec.top ?? Infinity)];
}

function zoomed(u, name) {
  if (name !== "x" || !u.data[0].length) return;
  const { min, max } = u.scales.x, rounds = u.data[0];
  const whole = min <= rounds[0] && max >= rounds[rounds.length - 1];
  page.zoom = whole ? null : { min, max };
  document.querySelectorAll("[data-zoom]").forEach((b) => b.setAttribute("aria-pressed", String((b.dataset.zoom === "all rounds") === whole)));
}

function hover(chart, u) {
  const { idx, left } = u.cursor;
  const event = chart.event || u.cursor.event;
  if (left < 0 || idx == null || !event || !chart.plot.contains(event.target)) return;
  const round = u.data[0][idx];
  const rows = chart.series.map((s) => [s, s.list.find((p) => p.round === round)]).filter(([, p]) => p).sort((a, b) => b[1].mean - a[1].mean).slice(0, 14)
    .map(([s, p]) => [swatch(s.group.number, s.dashes), s.name, write(chart.spec, p.mean), p.n > 1 && ` ± ${(chart.spec.format || figures)((chart.spec.scale || 1) * p.std)}, n ${p.n}`]);
  if (rows.length) tell(event, `round ${thousands(round)}`, rows); else hush();
}

/** Arrow keys move the cursor from round to round. */
function walk(chart, event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step || !chart.u) return;
  event.preventDefault();
  const u = chart.u, rounds = u.data[0];
  const at = Math.max(0, Math.min(rounds.length - 1, (u.cursor.idx ?? (step > 0 ? -1 : rounds.length)) + step));
  const box = u.over.getBoundingClientRect(), left = u.valToPos(rounds[at], "x");
  chart.event = { target: chart.plot, clientX: box.left + left, clientY: box.top + 20 };
  u.setCursor({ left, top: 20 });
  chart.event = null;
}

/** Horizontal lines: published figures. */
function mark(chart, u) {
  const { ctx, bbox } = u, ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${11.5 * ratio}px ${colour("font")}`;
  let aside = 0, above = Infinity;
  for (const { value, group, text } of [...chart.marks].sort((a, b) => a.value - b.value)) {
    const y = Math.round(u.valToPos(value, "y", true));
    aside = above - y < 15 * ratio ? aside + ctx.measureText(text).width + 14 * ratio : 0;
    above = y;
    ctx.strokeStyle = ctx.fillStyle = ink(group);
    ctx.lineWidth = 1.25 * ratio;
    ctx.setLineDash([2 * ratio, 4 * ratio]);
    ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
    ctx.textAlign = "left"; ctx.textBaseline = "bottom";
    if (chart.plot.clientWidth > 560) ctx.fillText(text, bbox.left + 6 * ratio + aside, y - 3 * ratio);
  }
  ctx.restore();
}

/** What stands at a line's end, and how wide that is in pixels. */
const endOf = (spec, s, p) => `${short(s.name, 28)}  ${(spec.format || figures)((spec.scale || 1) * p.mean)}`;
const pen = document.createElement("canvas").getContext("2d");
function across(text) {
  pen.font = `600 12.5px ${colour("font")}`;
  return Math.ceil(pen.measureText(text).width);
}

/** Names at the ends of the lines, pushed apart where they would overlap. */
function ends(chart, u) {
  const { ctx, bbox } = u, ratio = devicePixelRatio, gap = 17 * ratio;
  const labels = chart.series.map((s) => {
    const visible = s.list.filter((p) => p.round <= u.scales.x.max);
    const p = visible[visible.length - 1];
    return p && { s, p, y: u.valToPos((chart.spec.scale || 1) * p.mean, "y", true) };
  }).filter(Boolean).sort((a, b) => a.y - b.y);
  if (labels.length > 12) return;
  labels.forEach((l, i) => { if (i) l.y = Math.max(l.y, labels[i - 1].y + gap); });
  for (let i = labels.length - 1, floor = bbox.top + bbox.height; i >= 0; i--, floor -= gap) labels[i].y = Math.min(labels[i].y, floor);
  ctx.save();
  ctx.textAlign = "left"; ctx.textBaseline = "middle";
  for (const { s, p, y } of labels) {
    ctx.fillStyle = ink(s.group.number);
    ctx.font = `600 ${12.5 * ratio}px ${colour("font")}`;
    ctx.fillText(endOf(chart.spec, s, p), bbox.left + bbox.width + 10 * ratio, y);
  }
  ctx.restore();
}

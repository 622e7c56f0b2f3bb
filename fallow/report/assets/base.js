// Elements, numbers in words, colours, the tooltip.
const $ = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((c) => c != null && c !== false));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const dark = () => document.documentElement.dataset.theme === "dark";

// Six colours that stay apart for every kind of colour vision; groups beyond them repeat the colours in dashes.
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#8b3fe0", "#70280b", "#3f474f"];
const DARK = ["#4aa8f0", "#ff8f45", "#2cc79a", "#a866ff", "#f3dc5c", "#aab3bc"];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const ink = (group) => (dark() ? DARK : LIGHT)[group % 6];
const dash = (group) => DASHES[Math.floor(group / 6) % DASHES.length];

function swatch(group, dashes = dash(group)) {
  const line = svg("line", { x1: 1, x2: 17, y1: 5, y2: 5, stroke: ink(group), "stroke-width": 3, "stroke-dasharray": dashes.map((d) => d * .7).join(" ") || null, "stroke-linecap": dashes.length ? "butt" : "round" });
  return svg("svg", { class: "swatch", width: 18, height: 10, "aria-hidden": "true" }, line);
}

// Numbers.
const thousands = (n) => Math.round(n).toLocaleString("en");
const percent = (v, digits = 2) => (v == null ? "–" : (100 * v).toFixed(digits));
const figures = (v) => {
  if (v == null) return "–";
  const size = Math.abs(v);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e6) return v.toExponential(2);
  return size >= 100 ? v.toFixed(0) : size >= 10 ? v.toFixed(1) : size >= 1 ? v.toFixed(2) : v.toFixed(3);
};
const bytes = (v, write = figures) => {
  if (v == null) return "–";
  const step = v < 1e3 ? 0 : v < 1e6 ? 1 : v < 1e9 ? 2 : v < 1e12 ? 3 : 4;
  return `${write(v / 1000 ** step)} ${["B", "kB", "MB", "GB", "TB"][step]}`;
};
const seconds = (v, write = figures) => {
  if (v == null) return "–";
  if (v !== 0 && v < .1) return `${write(1000 * v)} ms`;
  return v < 100 ? `${write(v)} s` : v < 5400 ? `${Math.round(v / 60)} min` : `${(v / 3600).toFixed(1)} h`;
};
const round3 = (v) => String(+v.toPrecision(3));
const several = (n, one, many = `${one}s`) => `${thousands(n)} ${n === 1 ? one : many}`;
const largest = (values) => values.reduce((most, v) => Math.max(most, v ?? 0), 0);
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const spread = (values, m = mean(values)) => Math.sqrt(mean(values.map((v) => (v - m) ** 2)));

function statistic(values, format) {
  const known = values.filter((v) => v != null);
  if (!known.length) return ["–"];
  const m = mean(known);
  return known.length > 1 ? [format(m), el("small", {}, ` ± ${format(spread(known, m))}`)] : [format(m)];
}

// The tooltip.
function tell(event, title, rows) {
  const tip = $("tip");
  tip.replaceChildren(el("b", {}, title), ...rows.map(([mark, name, value, more]) => el("div", { class: "row" }, mark, el("span", {}, name), el("span", {}, value, more && el("small", {}, more)))));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const right = event.clientX + 16 + width < innerWidth;
  tip.style.left = `${Math.max(6, right ? event.clientX + 16 : event.clientX - width - 16)}px`;
  tip.style.top = `${Math.max(6, Math.min(event.clientY + 14, innerHeight - height - 6))}px`;
}
const hush = () => { $("tip").hidden = true; };

/** For JSON.parse: objects without a prototype, since a column may be named `constructor` or `__proto__`. */
const bare = (_, value) => (value && typeof value === "object" && !Array.isArray(value) ? Object.assign(Object.create(null), value) : value);

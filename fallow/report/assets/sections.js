// How the page is put together: sections, and cards in them, which are left out while they have nothing to show.
const sections = new Map();

function section(title, note, build) {
  const control = el("div", { class: "control" }), body = el("div");
  const root = el("section", { hidden: true }, el("div", { class: "head" }, el("h2", {}, title), note && el("p", {}, note), control), body);
  const made = build(body, control);
  sections.set(title, { root, update: () => { root.hidden = !made.has(); if (!root.hidden) made.update(); } });
}

/** A section of cards. `specs()` may give more of them as rounds come in; `spec.make` is lineCard unless it says otherwise. */
function cardSection(title, note, specs) {
  section(title, note, (body) => {
    const grid = el("div", { class: "grid" }), made = new Map();
    body.append(grid);
    const cards = () => specs().map((spec) => {
      if (!made.has(spec.title)) {
        made.set(spec.title, (spec.make || lineCard)(spec));
        grid.append(made.get(spec.title).card);
      }
      return made.get(spec.title);
    });
    return {
      has: () => cards().some((card) => card.has()),
      update: () => {
        const all = cards(), small = all.filter((card) => card.has() && !card.spec.full).length;
        all.forEach((card) => { card.card.hidden = !card.has(); });
        grid.className = small % 3 === 0 || small === 5 ? "grid three" : small === 1 && !all.some((c) => c.spec.full) ? "grid one" : "grid";
        all.filter((card) => !card.card.hidden).forEach((card) => card.update());
      },
    };
  });
}

/** A section with one card that is drawn anew for its width; where a table was scrolled, it stays so. */
function wholeSection(title, note, has, draw, control) {
  section(title, note, (body, head) => {
    const card = el("article", { class: "card" });
    body.append(card);
    const update = () => {
      const scrolled = card.querySelector(".scroll")?.scrollLeft || 0;
      draw(card, inner(card));
      if (scrolled) card.querySelector(".scroll").scrollLeft = scrolled;
    };
    if (control) head.append(control(update));
    return { has, update };
  });
}

const inner = (card) => Math.max(200, card.clientWidth - 2 * parseFloat(getComputedStyle(card).paddingLeft));
const chart = (title, column, more = {}) => ({ title, lines: () => [{ column }], ...more });
const below = (prefix) => [...new Set(page.runs.flatMap((run) => Object.keys(run.columns)))].filter((c) => c.startsWith(`${prefix}.`)).sort();
const shares = { scale: 100, unit: "%", format: (v) => v.toFixed(2), top: 100 };

// The page as a whole: title, legend, theme, and news from a run that goes on.
const ORDER = [
  "Warnings", "Results", "Beside the published figures", "Accuracy over rounds", "Scores", "Pseudo-labels", "Classes", "Prior bias", "Federation",
  "Gradient diversity", "Bytes and seconds", "Nodes", "What the method logs", "Settings", "Runs",
];

function toggle(runs, to) {
  const show = to ?? !runs.some(on);
  runs.forEach((run) => (show ? page.off.delete(run.path) : page.off.add(run.path)));
  render();
}

function only(group) {
  page.runs.forEach((run) => (run.group === group.number ? page.off.delete(run.path) : page.off.add(run.path)));
  render();
}

function legend() {
  const chips = el("div", { id: "chips" }, page.groups.map((group) => {
    const visible = shown(group), scores = lasts(group, "accuracy");
    const button = el("button", { type: "button", "aria-pressed": String(visible.length > 0), title: "show or hide", onclick: () => toggle(group.runs) },
      swatch(group.number), el("span", { class: "name" }, group.name), scores.length > 0 && el("span", { class: "value" }, `${percent(mean(scores), 1)} %`));
    const more = group.runs.length > 1 && el("button", { type: "button", class: "more", popovertarget: members(group).id, "aria-label": `Runs of ${group.name}` }, `${visible.length}/${group.runs.length}`);
    return el("div", { class: visible.length ? "chip" : "chip off" }, button, more);
  }));
  const choose = (each, text) => el("button", { type: "button", "aria-pressed": String(page.each === each), onclick: () => { page.each = each; render(); } }, text);
  const choice = page.groups.some((g) => g.runs.length > 1) && el("div", { class: "choice", role: "group", "aria-label": "What is drawn" }, choose(false, "mean and band"), choose(true, "each run"));
  const scrolled = $("chips")?.scrollLeft || 0;
  $("legend").replaceChildren(...[chips, choice].filter(Boolean));
  chips.scrollLeft = scrolled;
}

/** The list in which the runs of a group are switched one by one; it stays open while the page is drawn anew. */
function members(group) {
  const id = `members-${group.number}`;
  const pop = $(id) || document.body.appendChild(el("div", { id, class: "pop", popover: "auto", ontoggle: (event) => {
    const button = document.querySelector(`[popovertarget="${id}"]`);
    if (event.newState !== "open" || !button) return;
    const box = button.getBoundingClientRect();
    pop.style.top = `${box.bottom + 6}px`;
    pop.style.left = `${Math.max(8, Math.min(box.right - pop.offsetWidth, innerWidth - pop.offsetWidth - 8))}px`;
  } }));
  const box = (run) => el("label", {}, el("input", { type: "checkbox", checked: on(run), onchange: () => toggle([run]) }), el("span", {}, `seed ${run.seed}`), el("span", {}, run.last == null ? run.status : `${percent(run.last)} %`));
  const focused = [...pop.querySelectorAll("input")].indexOf(document.activeElement);
  pop.replaceChildren(...[group.runs.map(box), page.groups.length > 1 ? el("button", { type: "button", class: "quiet", onclick: () => only(group) }, "only these runs") : [], el("button", { type: "button", class: "quiet", onclick: () => toggle(page.runs, true) }, "all runs")].flat());
  pop.querySelectorAll("input")[focused]?.focus();
  return pop;
}

function heading() {
  const same = (key) => { const found = new Set(page.groups.map((g) => g.config[key])); return found.size === 1 ? [...found][0] : null; };
  const methods = [...new Set(page.groups.map((g) => g.method))], data = same("data");
  const listed = methods.length > 4 ? `${methods.length} methods` : methods.length > 1 ? `${methods.slice(0, -1).join(", ")} and ${methods[methods.length - 1]}` : methods[0];
  const where = data ? ` on ${data}` : "";
  $("title").textContent = document.title = listed + where;
  const f = one_size(page.federations), spread_of = [same("partition"), same("unlabelled_partition")].filter(Boolean).join(" and ");
  const seeds = new Set(page.runs.map((r) => r.seed)).size;
  $("facts").textContent = [
    several(page.runs.length, "run"), seeds > 1 && several(seeds, "seed"), same("clients") && several(+same("clients"), "client"), same("active") && `${+same("active")} active`,
    same("labels") && `labels=${same("labels")}`, f && `${thousands(f.totals.labelled + f.server.reduce((a, b) => a + b, 0))} labelled and ${thousands(f.totals.unlabelled)} unlabelled samples`,
    spread_of && `split ${spread_of}`, same("model"), same("rounds") && several(+same("rounds"), "round"),
  ].filter(Boolean).join(" · ");
  $("aside").textContent = page.notes.join(" ");
  $("made").textContent = `Made by fallow ${page.version}${page.made ? ` on ${page.made}` : ""}. Charts: uPlot, MIT licence.`;
}

function one_size(federations) {
  const sizes = new Set(federations.map((f) => `${f.totals.labelled} ${f.totals.unlabelled} ${f.server}`));
  return sizes.size === 1 ? federations[0] : null;
}

function status() {
  if (!page.live) return;
  const going = page.runs.filter((r) => r.status === "running"), run = going[0] || page.runs[page.runs.length - 1];
  const done = page.runs.reduce((n, r) => n + r.done, 0), all = page.runs.reduce((n, r) => n + (r.rounds || r.done), 0);
  const left = going.reduce((n, r) => n + (r.done ? (r.seconds / r.done) * Math.max(0, (r.rounds || 0) - r.done) : 0), 0);
  const bar = el("i");
  bar.style.width = `${100 * done / Math.max(1, all)}%`;
  const words = page.runs.length > 1 ? `${going.length} of ${page.runs.length} runs going on` : run.status === "running" ? (run.done ? "running" : "waiting for round 1") : run.status;
  $("live").replaceChildren(el("span", { class: going.length ? "dot on" : "dot" }), el("span", { id: "rounds" }, `${words} · round ${thousands(done)} of ${thousands(all)}`, going.length && left > 1 ? ` · ${left < 100 ? `${Math.round(left)} s` : seconds(left)} left` : ""), el("span", { class: "meter wideonly" }, bar));
}

function render() {
  heading();
  legend();
  status();
  $("theme").textContent = dark() ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`);
  ORDER.forEach((title) => sections.get(title).update());
}

// -- news --------------------------------------------------------------------------------------------------------------
async function listen() {
  let wait = 1000;
  try {
    const answer = await fetch(`runs.json?have=${encodeURIComponent(page.state)}`, { cache: "no-store" });
    const news = answer.status === 200 ? JSON.parse(await answer.text(), bare) : null;
    $("banner").hidden = !news?.error;
    if (news?.error) $("banner").textContent = news.error;
    else if (news) { take(news); render(); }
    if (!page.runs.some((r) => r.status === "running")) wait = 3000;
  } catch {
    $("banner").textContent = "The watcher has ended; this is what it last saw.";
    $("banner").hidden = false;
    wait = 5000;
  }
  setTimeout(listen, wait);
}

take(JSON.parse($("data").textContent, bare));
ORDER.forEach((title) => $("sections").append(sections.get(title).root));
$("theme").addEventListener("click", () => window.switchTheme());
document.addEventListener("theme", render);
addEventListener("scroll", () => { $("legend").classList.toggle("stuck", $("legend").getBoundingClientRect().top <= 0); hush(); }, { passive: true });
addEventListener("pointermove", (event) => { if (!event.target.closest?.(".plot, svg, canvas")) hush(); }, { passive: true });
let width = innerWidth, timer = 0;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; clearTimeout(timer); timer = setTimeout(render, 120); } });
render();
if (page.live) setTimeout(listen, 1000);

// What is shown: the runs, their groups, which of them are on, and curves over rounds.
const page = { runs: [], groups: [], federations: [], off: new Set(), each: false, zoom: null };

function take(data) {
  const switched = new Set([...page.off]);
  data.runs.filter((run) => run.aside && !page.runs.some((old) => old.path === run.path && old.aside)).forEach((run) => switched.add(run.path));
  page.runs.filter((old) => old.aside && !data.runs.some((run) => run.path === old.path && run.aside)).forEach((old) => switched.delete(old.path));
  Object.assign(page, data, { off: switched });
  page.groups.forEach((group, number) => {
    group.number = number;
    group.runs = page.runs.filter((run) => run.group === number);
  });
  page.runs.forEach((run) => {
    run.name = groupOf(run).runs.length > 1 ? `${groupOf(run).name} · seed ${run.seed}` : groupOf(run).name;
  });
}

const groupOf = (run) => page.groups[run.group];
const on = (run) => !page.off.has(run.path);
const shown = (group) => group.runs.filter(on);
const showing = () => page.groups.filter((group) => shown(group).length);
const has = (column) => page.runs.some((run) => run.columns[column]);

/** [round, value] pairs of a run's column, in the order of rounds; rounds without a value are left out. */
function points(run, column) {
  run.points ??= Object.create(null);
  const values = run.columns[column] || [];
  return (run.points[column] ??= values.map((value, i) => [run.columns.round[i], value]).filter(([, value]) => value != null));
}

/**
 * The mean of a group's runs with its standard deviation. A round counts only if every run that has come so far has a
 * value there, so that the mean does not jump where a single run has a row of its own.
 */
function curve(group, column) {
  const found = shown(group).map((run) => points(run, column)).filter((list) => list.length);
  const at = new Map();
  found.forEach((list) => list.forEach(([round, value]) => at.has(round) ? at.get(round).push(value) : at.set(round, [value])));
  const spans = found.map((list) => [list[0][0], list[list.length - 1][0]]);
  return [...at.keys()].sort((a, b) => a - b)
    .filter((round) => at.get(round).length === spans.filter(([first, last]) => first <= round && round <= last).length)
    .map((round) => ({ round, mean: mean(at.get(round)), std: spread(at.get(round)), n: at.get(round).length }));
}

/** The last value of a column in each of the group's runs that are on. */
const lasts = (group, column) => shown(group).map((run) => points(run, column).at(-1)?.[1]).filter((v) => v != null);

/** The mean of a column over the rounds of the group's runs that are on; a round without a value counts as 0. */
function average(group, column) {
  const having = shown(group).filter((run) => points(run, column).length);
  const rounds = having.reduce((n, run) => n + run.columns.round.length, 0);
  return rounds ? having.reduce((sum, run) => sum + points(run, column).reduce((s, [, value]) => s + value, 0), 0) / rounds : null;
}

/** The published figures that a group's runs stand beside; one that is printed in several tables comes once. */
function published(group) {
  const found = new Map();
  for (const p of shown(group).flatMap((run) => run.published)) {
    const key = [p.paper, p.row, p.data, p.setting, p.mean].join("|"), known = found.get(key);
    if (!known) found.set(key, { ...p, tables: [p.table] });
    else if (!known.tables.includes(p.table)) { known.tables.push(p.table); known.std ??= p.std; }
  }
  return [...found.values()];
}

// The machines of deployed runs: a row for each node.
const deployed = () => page.groups.flatMap((group) => shown(group).filter((run) => (run.nodes || []).length).map((run) => ({ group, run })));

wholeSection("Nodes", "Of deployed runs: the machines that hold the clients. Seconds and bytes are sums over all rounds.", () => deployed().length > 0, (card) => {
  const titles = ["runs", "client", "", "last seen", "rounds", "left out", "seconds", "up", "down", "last left out because"];
  const rows = deployed().flatMap(({ group, run }) => run.nodes.map((node) => el("tr", {},
    el("td", {}, named(group)), el("td", {}, node.client), el("td", { class: "text" }, el("span", { class: node.online ? "tag good" : "tag" }, node.online ? "online" : "away")),
    el("td", { class: "text" }, node.seen || "never"), el("td", {}, thousands(node.rounds)), el("td", {}, thousands(node.absent)),
    el("td", {}, seconds(node.seconds)), el("td", {}, bytes(node.bytes_up)), el("td", {}, bytes(node.bytes_down)), el("td", { class: "text" }, node.why || ""))));
  card.replaceChildren(table(titles, rows, (i) => ([2, 3, 9].includes(i) ? "text" : null)));
});

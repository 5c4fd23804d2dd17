// Shows the events of /v1/events. Text is only set through textContent: ids and errors come from other processes.

const at = (id) => document.getElementById(id);
const TONES = { critical: "bad", warning: "warn", info: "good" };
const FATES = { replayed: "is back in the queue", dropped: "is dropped" };
const WHY_NOT = {
  closed: "The trainer has counted it as dead and drawn the next prompt.",
  again: "A job with the same id has been submitted since.",
  no_job: "It holds no readable job.",
};

let picture = null;
let mayOperate = null; // null: /v1/caller has not answered yet
let olderPage = null; // null: the list follows the newest page

// --- small things ---------------------------------------------------------------------------------------------------

function say(id, text) {
  const node = typeof id === "string" ? at(id) : id;
  if (node.textContent !== text) node.textContent = text;
}

function element(name, text = "", attributes = {}) {
  const node = document.createElement(name);
  node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

function duration(seconds) {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${Math.round(Math.max(seconds, 0))} s`;
}

function figure(value) {
  if (value === 0) return "0";
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

const whole = (value) => value.toLocaleString("en");
const words = (name) => name.replaceAll("_", " ");
const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
const percent = (share) => (share > 0 && share < 0.01 ? "<1 %" : `${Math.round(100 * share)} %`);
const megabytes = (bytes) => `${whole(Math.round(bytes / 1e6))} MB`;
const seqOf = (version) => Number(version.split(":")[1] ?? 0);
const rate = (...names) => {
  const value = names.reduce((sum, name) => sum + (picture.rates[name] ?? 0), 0);
  return `${value >= 10 ? value.toFixed(0) : value.toFixed(1)}/s`;
};

// --- the picture ----------------------------------------------------------------------------------------------------

function showPicture() {
  say("run", picture.run_id);
  document.title = `${picture.error ? "broker away" : words(picture.health?.verdict ?? "")} – ${picture.run_id}`;
  showVerdict();
  if (!picture.health) return;
  showFlow(picture.health);
  showReplicas(picture.health.replicas);
  say("num-dead", whole(picture.health.dead));
  if (!olderPage) showLetters(picture.letters);
  if (mayOperate === false && picture.health.dead) say("dead-note", "Replaying and dropping need a token of scope operate; dvp-queue dead can do both.");
}

function showVerdict() {
  const verdict = picture.error ? "broker does not answer" : words(picture.health.verdict);
  const reasons = picture.error
    ? [{ severity: "critical", detail: picture.error, remedy: "restart the broker; what is shown below is its last known state" }]
    : picture.health.reasons;
  const tone = TONES[reasons[0]?.severity ?? "info"];
  at("verdict").className = `card ${tone}`;
  say("verdict-name", `${{ good: "✓", warn: "!", bad: "✕" }[tone]} ${verdict}`);
  const list = at("reasons");
  while (list.children.length > reasons.length) list.lastChild.remove();
  reasons.forEach((reason, index) => {
    const item = list.children[index] ?? list.appendChild(element("li"));
    if (item.children.length === 0) item.append(element("div"), element("span"));
    say(item.children[0], index === 0 ? reason.detail : `${words(reason.verdict)}: ${reason.detail}`);
    say(item.children[1], `→ ${reason.remedy}`);
  });
}

function showFlow(health) {
  const waiting = (stream) => {
    const oldest = stream.oldest_age_s === null ? "" : ` · oldest ${duration(stream.oldest_age_s)}`;
    return `waiting · ${whole(stream.pending)} held${oldest}`;
  };
  const live = health.replicas.filter((replica) => replica.state !== "lost");
  const newest = seqOf(picture.newest_version);
  say("jobs-big", whole(health.jobs.backlog));
  say("jobs-sub", `${waiting(health.jobs)} · ${rate("submitted")} in`);
  say("replicas-big", `${live.length} of ${health.replicas.length}`);
  say("replicas-sub", `alive · ${plural(live.reduce((sum, replica) => sum + replica.in_flight, 0), "sample")} in work`);
  say("committed", rate("committed"));
  say("groups-big", whole(health.groups.backlog));
  say("groups-sub", waiting(health.groups));
  say("settled", rate("trained", "dropped"));
  say("trainer-big", health.trainer ? `step ${whole(health.trainer.step)}` : "–");
  const busy = picture.trainer_waiting_s >= 1 ? `waits for groups ${duration(picture.trainer_waiting_s)}; ` : "";
  say("trainer-sub", health.trainer ? `${busy}seen ${duration(health.trainer.last_seen_s)} ago` : "never seen");
  say("weights-big", picture.newest_version ? `v${newest}` : "–");
  const current = live.filter((replica) => seqOf(replica.version) >= newest).length;
  say("weights-sub", picture.newest_version ? `served by ${current} of ${live.length}` : "none announced");
  const limit = picture.maxmemory ? ` of ${megabytes(picture.maxmemory)}` : "";
  say("facts", [
    `${plural(health.in_flight, "train job")} in flight`,
    `${plural(health.uncheckpointed, "group")} without a checkpoint`,
    `jobs of clients: ${whole(health.client_jobs.backlog)} waiting, ${whole(health.client_jobs.pending)} held`,
    `${whole(health.jobs.redelivered + health.client_jobs.redelivered)} redelivered`,
    `${plural(health.duplicates, "duplicate")} discarded`,
    `broker memory ${megabytes(picture.used_memory)}${limit}`,
  ].join(" · "));
}

function showReplicas(replicas) {
  const newest = seqOf(picture.newest_version);
  const body = at("replicas");
  const sorted = [...replicas].sort((a, b) => (b.state === "lost") - (a.state === "lost") || a.id.localeCompare(b.id, "en", { numeric: true }));
  while (body.rows.length > sorted.length) body.deleteRow(-1);
  sorted.forEach((replica, index) => {
    const row = body.rows[index] ?? body.insertRow();
    while (row.cells.length < 6) row.insertCell();
    const seq = seqOf(replica.version);
    const behind = Math.max(newest - seq, 0);
    row.className = replica.state === "lost" ? "bad" : seq < picture.min_seq ? "warn" : "";
    const note = seq < picture.min_seq ? " (too old)" : "";
    const texts = [replica.id, replica.state, `v${seq}`, `${behind}${note}`, whole(replica.in_flight), `${duration(replica.last_seen_s)} ago`];
    texts.forEach((text, column) => say(row.cells[column], text));
    row.cells[2].title = replica.version;
  });
}

// --- dead letters ---------------------------------------------------------------------------------------------------

const cards = new Map();

function showLetters(page) {
  const list = at("letters");
  const nodes = page.letters.map((letter) => cards.get(letter.entry_id) ?? makeCard(letter));
  const kept = new Set(nodes);
  for (const node of [...list.children]) if (!kept.has(node)) node.remove();
  // Cards that stay are not moved, so that keyboard focus does not jump.
  nodes.forEach((node, index) => {
    if (list.children[index] !== node) list.insertBefore(node, list.children[index] ?? null);
  });
  cards.clear();
  page.letters.forEach((letter, index) => {
    cards.set(letter.entry_id, nodes[index]);
    updateCard(nodes[index], letter);
  });
  at("older").hidden = page.next === null;
  at("newest").hidden = olderPage === null;
  at("older").dataset.before = page.next ?? "";
}

function makeCard(letter) {
  const card = element("li");
  const buttons = element("div", "", { class: "buttons" });
  for (const [verb, path] of [["Replay", "replay"], ["Drop", "drop"]]) {
    const button = element("button", verb, { type: "button", "aria-label": `${verb} job ${letter.job_id || letter.entry_id}` });
    button.addEventListener("click", () => change(path, letter));
    buttons.append(button);
  }
  const head = element("div");
  head.append(element("strong", letter.job_id || "not a job"), element("p", "", { class: "muted" }));
  card.append(head, buttons, element("pre", letter.error, { tabindex: "0", "aria-label": "error" }));
  return card;
}

function updateCard(card, letter) {
  const [replay, drop] = card.querySelectorAll("button");
  const facts = [letter.sink, `died ${duration(picture.at - letter.died_at)} ago`, `${letter.deliveries} failed ${letter.deliveries === 1 ? "delivery" : "deliveries"}`];
  if (letter.replica_id) facts.push(`last on ${letter.replica_id}`);
  if (letter.prospect !== "open") facts.push(`cannot be replayed: ${WHY_NOT[letter.prospect]}`);
  say(card.querySelector(".muted"), facts.join(" · "));
  replay.hidden = drop.hidden = !mayOperate;
  replay.disabled = letter.prospect !== "open";
}

async function change(path, letter) {
  if (path === "drop" && !confirm(`Drop job ${letter.job_id || letter.entry_id}? It cannot be brought back.`)) return;
  const answer = await ask(`/v1/dead/${path}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ entry_ids: [letter.entry_id] }),
  });
  const fate = answer?.fates[0];
  if (fate) say("dead-note", `Job ${letter.job_id} ${FATES[fate.outcome] ?? `was left alone: ${fate.detail}`}.`);
  if (olderPage) await turnTo(olderPage);
}

async function turnTo(before) {
  const page = await ask(`/v1/dead?before=${encodeURIComponent(before)}`);
  if (!page) return;
  olderPage = before;
  showLetters(page);
}

async function ask(path, options = {}) {
  try {
    // An absolute URL without credentials: the address bar may hold a password, and fetch refuses such URLs.
    const response = await fetch(location.origin + path, options);
    const body = await response.json();
    if (response.ok) return body;
    say("dead-note", body.detail);
  } catch (error) {
    say("dead-note", `dvp-monitor does not answer: ${error.message}`);
  }
  return null;
}

at("older").addEventListener("click", (event) => turnTo(event.target.dataset.before));
at("newest").addEventListener("click", () => {
  olderPage = null;
  showLetters(picture.letters);
});

// --- curves ---------------------------------------------------------------------------------------------------------

function showCurves(curves) {
  at("curves-section").hidden = false;
  say("curves-note", curves.error || (curves.panels.length ? "" : "no step has been logged yet"));
  const histogram = curves.staleness ? [drawHistogram(curves.staleness)] : [];
  at("curves").replaceChildren(...curves.panels.map(draw), ...histogram);
}

function draw(panel) {
  const box = element("figure", "", { class: "card" });
  const points = panel.lines.flatMap((line) => line.points);
  const [xs, ys] = [points.map((point) => point[0]), points.map((point) => point[1])];
  const [left, right] = [Math.min(...xs), Math.max(...xs)];
  let [low, high] = [Math.min(...ys), Math.max(...ys)];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const place = ([x, y]) => [right > left ? ((x - left) / (right - left)) * 300 : 150, 118 - ((y - low) / (high - low)) * 116];
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const legend = element("div", "", { class: "legend" });
  const spoken = [];
  panel.lines.forEach((line, index) => {
    const single = line.points.length === 1;
    const shape = document.createElementNS(svg.namespaceURI, single ? "path" : "polyline");
    const places = line.points.map((point) => place(point).map((number) => number.toFixed(1)).join(","));
    shape.setAttribute(single ? "d" : "points", single ? `M${places[0]}h0` : places.join(" "));
    shape.setAttribute("class", `s${index}`);
    svg.append(shape);
    const [first, last] = [line.points[0][1], line.points.at(-1)[1]];
    legend.append(element("span", `${line.label} ${figure(last)}`, { class: `s${index}` }));
    spoken.push(`${line.label} from ${figure(first)} to ${figure(last)}`);
  });
  svg.setAttribute("viewBox", "0 0 300 120");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${panel.title}: ${spoken.join("; ")}`);
  const axis = (...texts) => {
    const line = element("div", "", { class: "axis" });
    line.append(...texts.map((text) => element("span", text)));
    return line;
  };
  const caption = element("figcaption", panel.caption, { class: "muted" });
  box.append(element("h3", panel.title), caption, legend, axis(figure(high)), svg, axis(figure(low), `step ${whole(Math.round(left))} to ${whole(Math.round(right))}`));
  return box;
}

function drawHistogram(histogram) {
  const box = element("figure", "", { class: "card" });
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const labels = element("div", "", { class: "bins" });
  const width = 300 / histogram.bars.length;
  const highest = Math.max(...histogram.bars.map(([, share]) => share));
  const spoken = histogram.bars.map(([label, share], index) => {
    const bar = document.createElementNS(svg.namespaceURI, "rect");
    const height = (share / highest) * 118;
    const place = { x: (index + 0.1) * width, y: 120 - height, width: 0.8 * width, height };
    for (const [key, value] of Object.entries(place)) bar.setAttribute(key, value.toFixed(1));
    svg.append(bar);
    const bin = element("span", label);
    bin.append(element("b", percent(share)));
    labels.append(bin);
    return `${percent(share)} at ${label}`;
  });
  svg.setAttribute("viewBox", "0 0 300 120");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${histogram.title}: ${spoken.join("; ")}`);
  box.append(element("h3", histogram.title), element("figcaption", histogram.caption, { class: "muted" }), svg, labels);
  return box;
}

// --- the connection -------------------------------------------------------------------------------------------------

function connect() {
  const source = new EventSource("/v1/events");
  source.addEventListener("open", async () => {
    const viewer = await ask("/v1/caller");
    mayOperate = viewer && viewer.scope === "operate";
    if (picture) showPicture();
  });
  source.addEventListener("picture", (event) => {
    picture = JSON.parse(event.data);
    at("link").className = "";
    say("link", "live");
    showPicture();
  });
  source.addEventListener("curves", (event) => showCurves(JSON.parse(event.data)));
  source.addEventListener("error", () => {
    // After a refusal the browser does not reconnect by itself.
    const refused = source.readyState === EventSource.CLOSED;
    at("link").className = "lost";
    say("link", refused ? "refused; reload the page if this persists" : "dvp-monitor does not answer; trying again");
    mayOperate = null;
    if (picture) showPicture();
    if (refused) setTimeout(connect, 5000);
  });
}

connect();

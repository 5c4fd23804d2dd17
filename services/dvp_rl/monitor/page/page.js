// Shows the events of /v1/events.

import { showSteps } from "./completions.js";
import { showCurves } from "./curves.js";
import { ask, at, duration, element, ofRun, place, plural, run, say, whole, words } from "./elements.js";

const TONES = { critical: "bad", warning: "warn", info: "good" };
const RETRY_S = 5;
const FATES = { replayed: "back in the queue", dropped: "dropped" };
const WHY_NOT = {
  closed: "The trainer has counted it as dead and drawn the next prompt.",
  again: "A job with the same id has been submitted since.",
  no_job: "It holds no readable job.",
};

let picture = null;
let runs = { runs: [], total: 0 }; // of the broker
let mayOperate = null; // null: /v1/caller has not answered yet
let olderPage = null; // null: the list follows the newest page

// --- small things ---------------------------------------------------------------------------------------------------

const capital = (text) => text[0].toUpperCase() + text.slice(1);
const short = (text) => (text.length > 60 ? `${text.slice(0, 60).trimEnd()} …` : text).replaceAll(/\s+/g, " ");
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
  if (!olderPage) showLetters(picture.letters);
  if (mayOperate === false && picture.health.dead) say("dead-note", "Replaying and dropping need a token of scope operate; dvp-queue dead can do both.");
}

function showVerdict() {
  const verdict = picture.error ? "broker does not answer" : words(picture.health.verdict);
  const reasons = picture.error
    ? [{ severity: "critical", detail: picture.error, remedy: "restart the broker; what is shown below is its last known state" }]
    : picture.health.reasons;
  at("home").hidden = true;
  showReasons(TONES[reasons[0]?.severity ?? "info"], verdict, reasons);
}

/** The server shows nothing: it says why, and the page asks again. */
function showRefusal(why) {
  at("home").hidden = run === "";
  showReasons("bad", "refused", [{ detail: why, remedy: `the page tries again every ${RETRY_S} s` }]);
}

function showReasons(tone, verdict, reasons) {
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

function waiting(stream, held = "held") {
  const oldest = stream.oldest_age_s === null ? "" : ` · oldest ${duration(stream.oldest_age_s)}`;
  return `waiting · ${whole(stream.pending)} ${held}${oldest}`;
}

function showFlow(health) {
  showEpisodes(health.episodes);
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
  const redelivered = [health.jobs, health.episodes, health.client_jobs].reduce((sum, stream) => sum + (stream?.redelivered ?? 0), 0);
  const limit = picture.maxmemory ? ` of ${megabytes(picture.maxmemory)}` : "";
  say("facts", [
    `${plural(health.in_flight, "train job")} in flight`,
    `${plural(health.uncheckpointed, "group")} without a checkpoint`,
    `of clients: ${plural(health.client_jobs.backlog, "job")} waiting, ${whole(health.client_jobs.pending)} held, ${plural(health.client_sessions, "session")}`,
    `${whole(redelivered)} redelivered`,
    `${plural(health.duplicates, "duplicate")} discarded`,
    `broker memory ${megabytes(picture.used_memory)}${limit}`,
  ].join(" · "));
}

function showEpisodes(episodes) {
  at("episodes").hidden = episodes === null;
  if (episodes === null) return;
  const silent = episodes.silent_s === null ? "" : ` · silent ${duration(episodes.silent_s)}`;
  say("episodes-big", whole(episodes.backlog));
  say("episodes-sub", `${waiting(episodes, "played")}${silent}`);
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
    row.className = replica.state === "lost" || replica.wrong ? "bad" : seq < picture.min_seq ? "warn" : "";
    const note = seq < picture.min_seq ? " (too old)" : "";
    const wrong = replica.wrong ? " (wrong)" : "";
    const texts = [replica.id, replica.state, `v${seq}${wrong}`, `${behind}${note}`, whole(replica.in_flight), `${duration(replica.last_seen_s)} ago`];
    texts.forEach((text, column) => say(row.cells[column], text));
    row.cells[2].title = replica.version;
  });
}

let rows = new Map(); // of the runs, by name, as they are shown

function showRuns() {
  const states = new Map(runs.runs.map((state) => [state.run_id, state]));
  const box = at("runs");
  box.hidden = [...states.keys()].every((name) => name === picture.run_id);
  const some = states.size < runs.total ? `, ${whole(states.size)} shown` : "";
  say(box.querySelector("summary"), `${plural(runs.total, "run")} on this broker${some}`);
  // Known rows keep their order, so that none moves away from the pointer or the focus.
  const kept = [...rows].filter(([name]) => states.has(name));
  const added = [...states.keys()].filter((name) => !rows.has(name)).map((name) => [name, makeRunRow(name)]);
  rows = new Map([...kept, ...added]);
  place(box.querySelector("tbody"), [...rows.values()]);
  for (const [name, row] of rows) updateRunRow(row, states.get(name));
}

function makeRunRow(name) {
  const row = element("tr");
  const link = element("a", name, { href: `?run=${encodeURIComponent(name)}` });
  if (name === picture.run_id) link.setAttribute("aria-current", "page");
  row.insertCell().append(link);
  for (let column = 1; column < 6; column += 1) row.insertCell();
  return row;
}

function updateRunRow(row, state) {
  const seen = state.seen_s === null ? "–" : `seen ${duration(state.seen_s)} ago`;
  const counts = [state.step, state.num_replicas, state.dead].map((number) => (number === null ? "–" : whole(number)));
  [state.error || words(state.verdict), seen, ...counts].forEach((text, column) => say(row.cells[column + 1], text));
}

// --- dead letters ---------------------------------------------------------------------------------------------------

let cards = new Map(); // by what their letters have in common, as they are shown
let changing = false; // whether a request to replay or drop is under way

function showLetters(page) {
  const list = at("letters");
  const groups = new Map();
  for (const letter of page.letters) {
    const key = JSON.stringify([letter.error, letter.sink]);
    groups.set(key, [...(groups.get(key) ?? []), letter]);
  }
  // Known cards keep their order, so that none moves away from the pointer or the focus.
  const kept = [...cards].filter(([key]) => groups.has(key));
  const added = [...groups].filter(([key]) => !cards.has(key)).map(([key, letters]) => [key, makeCard(letters[0])]);
  cards = new Map([...added, ...kept]);
  place(list, [...cards.values()]);
  for (const [key, card] of cards) updateCard(card, groups.get(key));
  const dead = picture.health.dead;
  say("num-dead", page.letters.length < dead ? `${whole(dead)}, ${whole(page.letters.length)} shown` : whole(dead));
  at("older").hidden = page.next === null;
  at("newest").hidden = olderPage === null;
  at("older").dataset.before = page.next ?? "";
}

/** A card of dead letters with the same error; its buttons act on all of them. */
function makeCard(letter) {
  const card = element("li");
  const rest = element("details");
  rest.append(element("summary"), element("ul"));
  card.append(...makeHead(), element("pre", letter.error, { tabindex: "0", role: "group", "aria-label": "error" }), rest);
  return card;
}

function makeHead() {
  const head = element("div");
  head.append(element("strong"), element("p", "", { class: "muted" }));
  const buttons = element("div", "", { class: "buttons" });
  buttons.append(element("button", "Replay", { type: "button" }), element("button", "Drop", { type: "button" }));
  return [head, buttons];
}

function updateCard(card, letters) {
  updateHead(card, letters);
  const rest = card.querySelector("details");
  rest.hidden = letters.length === 1;
  say(rest.querySelector("summary"), `the ${plural(letters.length, "job")} with this error`);
  const rows = rest.querySelector("ul");
  const known = new Map([...rows.children].map((row) => [row.dataset.entry, row]));
  const shown = letters.length === 1 ? [] : letters;
  place(rows, shown.map((letter) => known.get(letter.entry_id) ?? makeRow(letter)));
  shown.forEach((letter, index) => updateHead(rows.children[index], [letter]));
}

function makeRow(letter) {
  const row = element("li", "", { "data-entry": letter.entry_id });
  row.append(...makeHead());
  return row;
}

function updateHead(node, letters) {
  const open = letters.filter((letter) => letter.prospect === "open");
  say(node.querySelector("strong"), letters.length === 1 ? letters[0].job_id || "not a job" : plural(letters.length, "job"));
  say(node.querySelector(".muted"), facts(letters, open).join(" · "));
  const [replay, drop] = node.querySelector(".buttons").children;
  for (const [button, path, those] of [[replay, "replay", open], [drop, "drop", letters]]) {
    button.hidden = !mayOperate;
    button.disabled = those.length === 0;
    button.setAttribute("aria-label", `${button.textContent} ${named(those.length ? those : letters)}`);
    button.onclick = (event) => event.detail < 2 && change(path, those); // the second click of two would hit the card that moves up
  }
}

function named(letters) {
  const [first] = letters;
  return letters.length === 1 ? `job ${first.job_id || first.entry_id}` : `${plural(letters.length, "job")} with the error ${short(first.error)}`;
}

function facts(letters, open) {
  const ages = letters.map((letter) => picture.at - letter.died_at);
  const [newest, oldest] = [duration(Math.min(...ages)), duration(Math.max(...ages))];
  const failed = letters.reduce((sum, letter) => sum + letter.deliveries, 0);
  const replicas = [...new Set(letters.map((letter) => letter.replica_id).filter(Boolean))];
  const found = [letters[0].sink, `died ${newest === oldest ? newest : `${newest} to ${oldest}`} ago`, `${whole(failed)} failed ${failed === 1 ? "delivery" : "deliveries"}`];
  if (replicas.length) found.push(`last on ${replicas.slice(0, 3).join(", ")}${replicas.length > 3 ? ` and ${replicas.length - 3} more` : ""}`);
  const reasons = new Set(letters.map((letter) => WHY_NOT[letter.prospect]).filter(Boolean));
  const which = letters.length === 1 ? "" : `${whole(letters.length - open.length)} `;
  if (reasons.size) found.push(`${which}cannot be replayed: ${[...reasons].join(" ")}`);
  return found;
}

async function change(path, letters) {
  if (changing || (path === "drop" && !confirm(`Drop ${named(letters)}? There is no way back.`))) return;
  changing = true;
  const answer = await askOrSay(`/v1/dead/${path}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ entry_ids: letters.map((letter) => letter.entry_id) }),
  });
  if (answer) say("dead-note", outcome(letters.length === 1 ? named(letters) : plural(letters.length, "job"), answer.fates));
  if (olderPage) await turnTo(olderPage);
  changing = false;
}

function outcome(name, fates) {
  const done = fates.filter((fate) => fate.outcome in FATES);
  const left = fates.filter((fate) => !(fate.outcome in FATES));
  const sentences = [];
  if (done.length) sentences.push(`${done.length === fates.length ? capital(name) : `${done.length} of ${name}`} ${done.length === 1 ? "is" : "are"} ${FATES[done[0].outcome]}.`);
  if (left.length) sentences.push(`${fates.length === 1 ? capital(name) : plural(left.length, "job")} ${left.length === 1 ? "was" : "were"} left alone: ${[...new Set(left.map((fate) => fate.detail))].join("; ")}.`);
  return sentences.join(" ");
}

/** The answer to a request; null if there is none, and the note says why. */
async function askOrSay(path, options) {
  try {
    return await ask(path, options);
  } catch (error) {
    say("dead-note", error.message);
    return null;
  }
}

async function turnTo(before) {
  const page = await askOrSay(`/v1/dead?before=${encodeURIComponent(before)}`);
  if (!page) return;
  olderPage = before;
  showLetters(page);
}

at("older").addEventListener("click", (event) => turnTo(event.target.dataset.before));
at("newest").addEventListener("click", () => {
  olderPage = null;
  showLetters(picture.letters);
});

// --- the connection -------------------------------------------------------------------------------------------------

function connect() {
  const source = new EventSource(ofRun("/v1/events"));
  source.addEventListener("open", async () => {
    const viewer = await askOrSay("/v1/caller");
    mayOperate = viewer && viewer.scope === "operate";
    if (picture) showPicture();
  });
  source.addEventListener("picture", (event) => {
    const first = picture === null;
    picture = JSON.parse(event.data);
    at("link").className = "";
    say("link", "live");
    showPicture();
    if (first) showRuns(); // whose list can come before
  });
  source.addEventListener("curves", (event) => showCurves(JSON.parse(event.data)));
  source.addEventListener("runs", (event) => {
    runs = JSON.parse(event.data);
    if (picture) showRuns();
  });
  source.addEventListener("completions", (event) => showSteps(JSON.parse(event.data)));
  source.addEventListener("error", () => {
    // After a refusal the browser does not reconnect by itself.
    const refused = source.readyState === EventSource.CLOSED;
    at("link").className = "lost";
    say("link", refused ? "refused; trying again" : "dvp-monitor does not answer; trying again");
    mayOperate = null;
    if (picture) showPicture();
    if (!refused) return;
    refusal().then(showRefusal, () => {});
    setTimeout(connect, 1000 * RETRY_S);
  });
}

/** Why the stream is refused; an EventSource does not tell. */
async function refusal() {
  const stop = new AbortController();
  const response = await fetch(location.origin + ofRun("/v1/events"), { signal: stop.signal });
  if (!response.ok) return (await response.json()).detail;
  stop.abort();
  throw new Error("no longer refused");
}

connect();

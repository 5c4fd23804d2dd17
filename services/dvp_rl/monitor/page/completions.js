// Shows the completions of one step: of the newest, or of the one that the reader has chosen.

import { ask, at, element, figure, place, plural, say, whole } from "./elements.js";

const RETRY_MS = 5000;

let steps = []; // that have a record, newest first
let since = 0; // changes when the trainer writes a new file, in which a step can have other completions
let chosen = null; // step; null: follows the newest
let shown = ""; // key of the completions on the page
let retry = 0; // timer
const chooser = at("completions-step");
const wanted = () => chosen ?? steps[0];
const key = () => `${wanted()} since ${since}`;

export function showSteps(news) {
  at("completions-section").hidden = false;
  steps = news.steps.toReversed();
  if (chosen !== null && !steps.includes(chosen)) {
    if (news.since === since) steps.push(chosen); // too old for the list
    else chosen = null;
  }
  since = news.since;
  const options = new Map([...chooser.options].map((option) => [option.value, option]));
  place(chooser, steps.map((step) => options.get(String(step)) ?? element("option", whole(step), { value: step })));
  if (steps.length) chooser.value = wanted();
  at("completions-choice").hidden = steps.length === 0;
  if (steps.length === 0) showNothing(news.error || "no completions have been recorded yet");
  else if (shown !== key()) showStep();
}

async function showStep() {
  clearTimeout(retry);
  const asked = key();
  at("completions").ariaBusy = "true";
  try {
    const record = await ask(`/v1/completions?step=${wanted()}`);
    if (asked !== key()) return; // another one is wanted meanwhile
    shown = asked;
    showRecord(record);
  } catch (error) {
    if (asked !== key()) return;
    showNothing(error.message);
    retry = setTimeout(showStep, RETRY_MS);
  }
}

function showRecord(record) {
  const legend = record.pruned.flatMap((share, index) => [" ", element("mark", `${figure(100 * share)} %`, { class: `p${index + 1}` })]);
  const any = record.completions.some((completion) => completion.num_environment);
  const given = any ? [" ", element("span", "In italics", { class: "environment" }), ": given by the environment."] : [];
  at("completions-legend").replaceChildren("The best and the worst completion of a prompt. Marked: min-p removed at least", ...legend, " of the probability.", ...given);
  say("completions-note", "");
  at("completions").replaceChildren(...record.completions.map(card));
  at("completions").ariaBusy = "false";
}

function showNothing(why) {
  clearTimeout(retry);
  shown = "";
  say("completions-note", why);
  at("completions-legend").replaceChildren();
  at("completions").replaceChildren();
  at("completions").ariaBusy = "false";
}

function card(completion) {
  const facts = {
    reward: figure(completion.reward),
    advantage: figure(completion.advantage),
    training: completion.fate,
    weight: completion.weight === null ? null : figure(completion.weight),
    length: `${plural(completion.num_tokens, "token")}, ${completion.finish_reason}`,
    environment: completion.num_environment ? plural(completion.num_environment, "token") : null,
    forks: completion.num_forks ? whole(completion.num_forks) : null,
    row: whole(completion.row),
    answer: completion.answer,
  };
  const list = element("dl");
  for (const [name, fact] of Object.entries(facts)) {
    if (fact === null) continue;
    const pair = list.appendChild(element("div"));
    pair.append(element("dt", name), element("dd", fact));
  }
  const prompt = element("pre", "", { class: "prompt", tabindex: "0", role: "group", "aria-label": "prompt" });
  prompt.append(element("span", completion.prompt));
  const text = element("pre", "", { tabindex: "0", role: "group", "aria-label": "completion" });
  text.append(...completion.pieces.map(marked));
  if (completion.pieces.length === 0) text.append(element("span", "no text", { class: "muted" }));
  const node = element("article", "", { class: "card" });
  node.append(list, prompt, text);
  return node;
}

function marked([piece, mark]) {
  if (mark < 0) return element("span", piece, { class: "environment" });
  return mark ? element("mark", piece, { class: `p${mark}` }) : piece;
}

chooser.addEventListener("change", () => {
  chosen = Number(chooser.value) === steps[0] ? null : Number(chooser.value);
  showStep();
});

// Shows the completions of one step: of the newest, or of the one that the reader has chosen.

import { ask, at, element, figure, place, plural, say, whole } from "./elements.js";

let shown = null; // the step whose completions are on the page
const chooser = at("completions-step");

export function showSteps({ error, steps }) {
  at("completions-section").hidden = false;
  const following = chooser.selectedIndex <= 0;
  const options = new Map([...chooser.options].map((option) => [option.value, option]));
  place(chooser, steps.toReversed().map((step) => options.get(String(step)) ?? element("option", `step ${whole(step)}`, { value: step })));
  if (following) chooser.selectedIndex = 0;
  chooser.hidden = steps.length === 0;
  if (steps.length === 0) {
    say("completions-note", error || "no completions have been recorded yet");
    showNothing();
  } else if (Number(chooser.value) !== shown) showStep();
}

function showNothing() {
  shown = null;
  at("completions").replaceChildren();
}

async function showStep() {
  const step = Number(chooser.value);
  const record = await ask("completions-note", `/v1/completions?step=${step}`);
  if (step !== Number(chooser.value)) return; // another step has been chosen meanwhile
  if (!record) return showNothing();
  shown = step;
  const legend = record.pruned.flatMap((share, index) => [" ", element("mark", `${figure(100 * share)} %`, { class: `p${index + 1}` })]);
  at("completions-note").replaceChildren("the best and the worst completion of a prompt; marked where min-p removed at least", ...legend, " of the probability");
  at("completions").replaceChildren(...record.completions.map(card));
}

function card(completion) {
  const facts = {
    reward: figure(completion.reward),
    advantage: figure(completion.advantage),
    training: completion.fate,
    weight: completion.weight === null ? null : figure(completion.weight),
    length: `${plural(completion.num_tokens, "token")}, ${completion.finish_reason}`,
    row: whole(completion.row),
    answer: completion.answer,
  };
  const list = element("dl");
  for (const [name, fact] of Object.entries(facts)) {
    if (fact === null) continue;
    const pair = list.appendChild(element("div"));
    pair.append(element("dt", name), element("dd", fact));
  }
  const prompt = element("pre", "", { class: "prompt", tabindex: "0", "aria-label": "prompt" });
  prompt.append(element("span", completion.prompt));
  const text = element("pre", "", { tabindex: "0", "aria-label": "completion" });
  text.append(...completion.pieces.map(([piece, mark]) => (mark ? element("mark", piece, { class: `p${mark}` }) : piece)));
  const node = element("article", "", { class: "card" });
  node.append(list, prompt, text);
  return node;
}

chooser.addEventListener("change", showStep);

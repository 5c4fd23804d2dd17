// What every part of the page needs: text is only set through textContent, since ids and errors come from others.

/** The run that the page shows; "" is the monitor's own. */
export const run = new URLSearchParams(location.search).get("run") ?? "";

/** The path of the interface for this run. */
export const ofRun = (path) => (run === "" ? path : `${path}${path.includes("?") ? "&" : "?"}run=${encodeURIComponent(run)}`);

export const at = (id) => document.getElementById(id);

export function say(id, text) {
  const node = typeof id === "string" ? at(id) : id;
  if (node.textContent !== text) node.textContent = text;
}

export function element(name, text = "", attributes = {}) {
  const node = document.createElement(name);
  node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

/** Makes `nodes` the children of `list`. Nodes that stay are not moved, so that keyboard focus does not jump. */
export function place(list, nodes) {
  const kept = new Set(nodes);
  for (const node of [...list.children]) if (!kept.has(node)) node.remove();
  nodes.forEach((node, index) => {
    if (list.children[index] !== node) list.insertBefore(node, list.children[index] ?? null);
  });
}

export function duration(seconds) {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${Math.round(Math.max(seconds, 0))} s`;
}

/** The number with four significant digits, or with as many as it takes to tell multiples of `size` apart. */
export function figure(value, size = Math.abs(value)) {
  if (Math.abs(value) <= 1e-9 * size) return "0";
  const digits = Math.floor(Math.log10(Math.abs(value))) - Math.floor(Math.log10(size)) + 1;
  const number = Number(value.toPrecision(Math.min(Math.max(digits, 4), 15)));
  return Math.abs(number) >= 1e-4 && Math.abs(number) < 1e6 ? String(number) : number.toExponential().replace("e+", "e");
}

export const whole = (value) => value.toLocaleString("en");
export const words = (name) => name.replaceAll("_", " ");
export const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

/** The answer to a request. Throws an error whose message is for people. */
export async function ask(path, options = {}) {
  let response, body;
  try {
    // An absolute URL without credentials: the address bar may hold a password, and fetch refuses such URLs.
    response = await fetch(location.origin + ofRun(path), options);
    body = await response.json();
  } catch (error) {
    throw new Error(`dvp-monitor does not answer: ${error.message}`);
  }
  if (!response.ok) throw new Error(body.detail);
  return body;
}

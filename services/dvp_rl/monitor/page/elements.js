// What every part of the page needs: text is only set through textContent, since ids and errors come from others.

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

export const whole = (value) => value.toLocaleString("en");
export const words = (name) => name.replaceAll("_", " ");
export const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

// Creates elements. External text (addresses, model names, answers) becomes text nodes, never markup.

export const $ = (id) => document.getElementById(id);

export function element(name, { className = "", text = "", ...attributes } = {}, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  set(made, attributes);
  made.append(...children);
  return made;
}

export function svg(name, attributes) {
  return set(document.createElementNS("http://www.w3.org/2000/svg", name), attributes);
}

function set(made, attributes) {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** Sets the text if it differs, which keeps selections and does not disturb screen readers. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

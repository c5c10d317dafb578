// Makes elements. What is given as text becomes text, whatever it looks like: nothing here reads markup.

/** Returns a new element. Keys of `given`: `class`, `on…` (listeners), `data` (data attributes), and attributes. */
export function element(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "data") Object.assign(made.dataset, value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Sets an element's text if it is another one, so that a selection survives. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Gives a parent one child for each key, in this order. Those that it has are kept, with focus and all. */
export function keyed(parent, keys, make, update) {
  const old = parent.keyedChildren ?? new Map();
  const now = new Map();
  const wanted = new Set(keys);
  for (const [key, child] of old) if (!wanted.has(key)) child.remove(); // first, so that none that stays is moved, for a move costs the focus
  let after = null;
  for (const key of wanted) {
    const child = old.get(key) ?? make(key);
    now.set(key, child);
    const place = after === null ? parent.firstChild : after.nextSibling;
    if (child !== place) parent.insertBefore(child, place);
    update?.(child, key);
    after = child;
  }
  parent.keyedChildren = now;
}

/** Shows a number: its text, and in data attributes the metric that it is and its value. */
export function setValue(node, text, value, names) {
  setText(node, text);
  node.dataset.value = value;
  if (names) Object.assign(node.dataset, names);
}

const tip = () => byId("tip");

/** Shows lines beside an element for as long as it is pointed at or has the focus. */
export function tipped(node, lines) {
  const show = () => {
    const shown = tip();
    shown.replaceChildren(...lines().map((line) => element("p", {}, line)));
    shown.hidden = false;
    const at = node.getBoundingClientRect();
    const width = shown.offsetWidth;
    const left = Math.min(Math.max(8, at.left + at.width / 2 - width / 2), innerWidth - width - 8);
    const above = at.top - shown.offsetHeight - 8;
    shown.style.left = `${Math.max(8, left)}px`;
    shown.style.top = `${above > 8 ? above : at.bottom + 8}px`;
  };
  const hide = () => {
    tip().hidden = true;
  };
  node.addEventListener("pointerenter", show);
  node.addEventListener("focus", show);
  node.addEventListener("pointerleave", hide);
  node.addEventListener("blur", hide);
}

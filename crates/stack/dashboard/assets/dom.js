// Elements without HTML texts: names of objects are chosen by others and are never read as markup.

const SVG = "http://www.w3.org/2000/svg";

function dispatch(event) { this.handlers[event.type]?.(event); }

function fill(node, attributes, children) {
  node.handlers = {};
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) {
      node.handlers[name.slice(2)] = value;
      node.addEventListener(name.slice(2), dispatch);
    } else if (name === "value") {
      node.value = value;
      node.setAttribute("value", value);
    } else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== undefined && child !== null && child !== false) node.append(child);
  }
  return node;
}

/** An element: `h("a", {href: "#/", onclick: f}, "text", child)`. */
export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** The same of a picture. */
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const isSame = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName
  && (a.nodeType !== 1 || a.getAttribute("data-key") === b.getAttribute("data-key"));

/** Makes `old` like `fresh` and keeps the elements that stay, so that focus and a reader's place stay too. */
export function morph(old, fresh) {
  if (old.nodeType === 3) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  // What is inside lives on its own.
  if (old.hasAttribute("data-live")) return;
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (old.nodeName === "PROGRESS" && fresh.hasAttribute("value")) old.value = fresh.value;
  for (const type of Object.keys(fresh.handlers ?? {})) {
    if (!(type in (old.handlers ?? {}))) old.addEventListener(type, dispatch);
  }
  old.handlers = fresh.handlers ?? {};
  let place = old.firstChild;
  for (const next of [...fresh.childNodes]) {
    while (place && !isSame(place, next) && [...fresh.childNodes].every((other) => !isSame(place, other))) {
      const gone = place;
      place = place.nextSibling;
      gone.remove();
    }
    if (place && isSame(place, next)) {
      morph(place, next);
      place = place.nextSibling;
    } else old.insertBefore(next, place);
  }
  while (place) {
    const gone = place;
    place = place.nextSibling;
    gone.remove();
  }
}

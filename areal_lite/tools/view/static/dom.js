// Elements without markup: text only ever becomes text nodes.

const SVG = "http://www.w3.org/2000/svg";

function build(node, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(node, child);
    else node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Return an element; properties that are functions listen to the event of that name. */
export function el(tag, properties, ...children) {
  return build(document.createElement(tag), properties, children);
}

export function svg(tag, properties, ...children) {
  return build(document.createElementNS(SVG, tag), properties, children);
}

export function fill(node, ...children) {
  node.replaceChildren();
  append(node, children);
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Call `run` once, `wait` milliseconds after the last call. */
export function later(wait, run) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(run, wait, ...values);
  };
}

export function say(text) {
  let live = document.getElementById("live");
  if (!live) {
    live = el("div", { id: "live", class: "unseen", role: "status", "aria-live": "polite" });
    document.body.append(live);
  }
  setText(live, text);
}

// The tokens of a sequence, coloured by any per-token quantity that the episode has.

import { el, fill, setText } from "./dom.js";
import { picture, speaker } from "./conversation.js";
import { count, number, visible } from "./format.js";

const TOKENS_SHOWN = 4000;

function shade(name, share) {
  return share > 0 ? `color-mix(in srgb, var(--${name}) ${Math.round(100 * share)}%, transparent)` : "";
}

/** Return the function from a value to its colour, and the legend: texts, and colours as { color }. */
export function scale(quantity, values) {
  const known = values.filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  const low = known[Math.floor(known.length * 0.02)];
  const high = known[Math.ceil(known.length * 0.98) - 1];
  const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
  const distinct = new Map([...new Set(known)].map((value, place) => [value, `c${place % 8}`]));
  const surprise = quantity.kind === "surprise";
  const [from, to] = quantity.kind === "signed" ? [-most, most] : surprise ? [0, Math.min(low, -2)] : [low, high];
  const colors = {
    flag: (value) => shade("accent", value ? 0.24 : 0),
    category: (value) => shade(distinct.get(value), 0.3),
    signed: (value) => shade(value < 0 ? "down" : "up", 0.68 * Math.min(1, Math.abs(value) / most)),
  };
  const heat = (value) => shade("heat", 0.82 * Math.min(1, Math.max(0, (value - from) / (to - from || 1))));
  const color = colors[quantity.kind] ?? heat;
  const entry = (value) => ({ color: color(value) });
  const ramp = Array.from({ length: 10 }, (_, step) => entry(from + (step / 9) * (to - from)));
  const legends = {
    flag: [entry(1), "trained"],
    category: [...distinct.keys()].slice(0, 12).flatMap((value) => [entry(value), number(value)]),
  };
  const legend = known.length ? legends[quantity.kind] ?? [number(from, 2), ...ramp, number(to, 2)] : [];
  return { colorOf: (value) => (value === null || value === undefined ? "" : color(value)), legend };
}

function swatch(color) {
  const node = el("i", { class: "tok" }, "\u00a0\u00a0\u00a0");
  node.style.background = color;
  return node;
}

export function tokenView(episode, sequence, texts, color, onColor) {
  const turns = sequence.path.map((each) => {
    const turn = episode.turns[each.turn];
    return { turn, columns: { ...turn.columns, ...each.columns } };
  });
  const quantities = episode.quantities;
  const legend = el("div", { class: "legend", "aria-hidden": "true" });
  const info = el("div", { class: "token-info", role: "status" });
  const body = el("div", { class: "tokens-body" });
  const all = [];
  let current = null;

  const choice = el("div", { class: "segments", role: "radiogroup", "aria-label": "Colour tokens by" },
    [...quantities, { key: "none", label: "None", kind: "none" }].map((quantity) =>
      el("button", {
        role: "radio", "data-key": quantity.key, "aria-checked": "false",
        click: () => { paint(quantity.key); onColor(quantity.key); },
      }, visible(quantity.label))));

  function addTokens(node, each, from, to) {
    const ids = each.turn.ids ?? [];
    let base = each.turn.start ?? 0;
    for (let place = from; place < to; place += 1) {
      const image = each.turn.images?.find((one) => one.offset <= place && place < one.offset + one.length);
      if (image) {
        if (place === image.offset) node.append(picture(image));
        continue;
      }
      const text = texts?.[ids[place]];
      const shown = text === undefined ? String(ids[place]) : visible(text).replaceAll("\n", "↵\n") || "∅";
      const token = el("span", { class: "tok", "data-n": all.length, tabindex: all.length ? "-1" : "0" }, shown);
      all.push({ node: token, each, place, index: base + place });
      node.append(token);
      if (text === undefined) node.append(" ");
    }
  }

  for (const each of turns) {
    const length = each.turn.ids?.length ?? 0;
    const node = el("div", { class: `toks${texts ? "" : " ids"}` });
    const title = el("div", { class: "toks-title" }, el("b", {}, visible(speaker(each.turn) ?? "")), ` ${count(length, "token")}`);
    addTokens(node, each, 0, Math.min(length, TOKENS_SHOWN));
    body.append(el("section", { class: "turn-tokens", "data-role": each.turn.role }, title, node));
    if (length > TOKENS_SHOWN) {
      const more = el("button", { class: "more", click: () => { addTokens(node, each, TOKENS_SHOWN, length); more.remove(); paint(color); } }, `Show ${number(length - TOKENS_SHOWN)} more tokens`);
      body.append(more);
    }
  }

  function paint(key) {
    color = quantities.some((each) => each.key === key) || key === "none" ? key : quantities[0]?.key ?? "none";
    for (const button of choice.children) button.setAttribute("aria-checked", String(button.dataset.key === color));
    const quantity = quantities.find((each) => each.key === color) ?? { key: "none", kind: "none" };
    const { colorOf, legend: entries } = scale(quantity, turns.flatMap((each) => each.columns[quantity.key] ?? []));
    for (const token of all) token.node.style.background = colorOf(token.each.columns[quantity.key]?.[token.place]);
    fill(legend, entries.map((entry) => (typeof entry === "string" ? el("span", {}, entry) : swatch(entry.color))));
  }

  function describe(token) {
    const { each, place, index } = token;
    const text = texts?.[each.turn.ids[place]];
    const parts = [el("span", {}, `#${number(index)}`), el("span", {}, "id ", el("b", {}, String(each.turn.ids[place])))];
    if (text !== undefined) parts.push(el("code", {}, JSON.stringify(visible(text))));
    for (const quantity of quantities) {
      const value = each.columns[quantity.key]?.[place];
      if (value === undefined || value === null) continue;
      const shown = quantity.kind === "flag" ? (value ? "yes" : "no") : number(value, 4);
      const extra = quantity.key === "logprob" ? ` (${number(100 * Math.exp(value), 2)} %)` : "";
      parts.push(el("span", {}, `${quantity.label.toLowerCase()} `, el("b", {}, shown), extra));
    }
    fill(info, parts);
  }

  function show(token) {
    current?.node.classList.remove("current");
    current?.node.setAttribute("tabindex", "-1");
    current = token;
    token.node.classList.add("current");
    token.node.setAttribute("tabindex", "0");
    describe(token);
  }

  const find = (event) => all[Number(event.target.closest?.(".tok[data-n]")?.dataset.n ?? -1)];
  body.addEventListener("mouseover", (event) => { const token = find(event); if (token) describe(token); });
  body.addEventListener("focusin", (event) => { const token = find(event); if (token) show(token); });
  body.addEventListener("click", (event) => find(event)?.node.focus());
  body.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const token = find(event);
    if (!move || !token) return;
    event.preventDefault();
    event.stopPropagation();
    all[all.indexOf(token) + move]?.node.focus();
  });
  paint(color);
  setText(info, "Point at a token, or move with ← and →.");
  return el("div", { class: "token-view" }, el("div", { class: "token-tools" }, choice, legend), body, info);
}

// The tokens of a sequence, coloured by any per-token quantity that the episode has.

import { el, fill, setText } from "./dom.js";
import { speaker } from "./conversation.js";
import { count, number, visible } from "./format.js";

const TOKENS_SHOWN = 4000;
const STEPS = 9;

/** Return the function from a value to a class, and the legend's entries. */
export function scale(quantity, values) {
  const known = values.filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  if (!known.length) return { classOf: () => "", legend: [] };
  const low = known[Math.floor(known.length * 0.02)];
  const high = known[Math.ceil(known.length * 0.98) - 1];
  if (quantity.kind === "flag") {
    return { classOf: (value) => (value ? "flag" : ""), legend: [["flag", "trained"]] };
  }
  if (quantity.kind === "category") {
    const distinct = [...new Set(known)];
    const classes = new Map(distinct.map((value, place) => [value, `k${place % 8}`]));
    return {
      classOf: (value) => classes.get(value) ?? "",
      legend: distinct.slice(0, 12).map((value) => [classes.get(value), number(value)]),
    };
  }
  if (quantity.kind === "signed") {
    const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
    const name = (value) => {
      const step = Math.min(5, Math.round((Math.abs(value) / most) * 5));
      return step ? (value < 0 ? `n${step}` : `p${step}`) : "";
    };
    return { classOf: (value) => (value === null || value === undefined ? "" : name(value)), legend: [["", number(-most)], ...[5, 4, 3, 2, 1].map((step) => [`n${step}`, ""]), ["none", ""], ...[1, 2, 3, 4].map((step) => [`p${step}`, ""]), ["p5", number(most)]] };
  }
  const [from, to] = quantity.kind === "surprise" ? [0, Math.min(low, -2)] : [low, high];
  const width = to - from || 1;
  return {
    classOf: (value) => {
      if (value === null || value === undefined) return "";
      const step = Math.min(STEPS, Math.max(0, Math.round(((value - from) / width) * STEPS)));
      return step ? `q${step}` : "";
    },
    legend: [["none", number(from, 2)], ...[1, 2, 3, 4, 5, 6, 7, 8].map((step) => [`q${step}`, ""]), ["q9", number(to, 2)]],
  };
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
    const quantity = quantities.find((each) => each.key === color);
    if (!quantity) {
      for (const token of all) token.node.className = "tok";
      fill(legend);
      return;
    }
    const values = turns.flatMap((each) => each.columns[quantity.key] ?? []);
    const { classOf, legend: entries } = scale(quantity, values);
    for (const token of all) token.node.className = `tok ${classOf(token.each.columns[quantity.key]?.[token.place])}`;
    fill(legend, entries.map(([name, label]) => {
      const swatch = name ? el("i", { class: `tok ${name}` }, "\u00a0\u00a0\u00a0") : null;
      const words = label ? el("span", {}, label) : null;
      return name === "none" || !name ? [words, swatch] : [swatch, words];
    }));
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

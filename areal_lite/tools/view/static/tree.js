// The turns of an episode as a tree: one line for each turn, branches side by side.

import { el, svg } from "./dom.js";
import { gist, speaker } from "./conversation.js";
import { count, reward, seconds, visible } from "./format.js";

const TURN_LANE = 16;
const TURN_HEIGHT = 46;

/** Return the turns in order, each with its lane; the first child of a turn stays in the turn's lane. */
export function layout(turns) {
  const children = new Map();
  for (const turn of turns) {
    const parent = turns.some((each) => each.key === turn.parent) ? turn.parent : null;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(turn);
  }
  const lines = [];
  let lanes = 0;
  const stack = (children.get(null) ?? []).map((turn) => ({ turn, from: null, lane: null })).reverse();
  while (stack.length) {
    const { turn, from, lane } = stack.pop();
    const line = { turn, from, lane: lane ?? lanes++, place: lines.length };
    lines.push(line);
    const below = children.get(turn.key) ?? [];
    below.forEach((child, place) => { if (place) stack.push({ turn: child, from: line, lane: null }); });
    // The longest stays beside its parent, so that a conversation without branches is one straight line.
    if (below.length) stack.push({ turn: below[0], from: line, lane: line.lane });
  }
  return { lines, lanes };
}

export function treeView(episode, sequence, onSequence) {
  const { lines, lanes } = layout(Object.values(episode.turns));
  const width = Math.min(lanes, 24) * TURN_LANE + 8;
  const x = (lane) => Math.min(lane, 23) * TURN_LANE + 10;
  const y = (place) => place * TURN_HEIGHT + 16;
  const shown = new Set(sequence.path.map((each) => each.turn));
  const ends = new Map();
  episode.sequences.forEach((each, place) => {
    const last = each.path.at(-1)?.turn;
    if (last !== undefined) ends.set(last, [...(ends.get(last) ?? []), { ...each, place }]);
  });
  const drawing = svg("svg", { class: "tree-lines", width, height: Math.max(1, lines.length) * TURN_HEIGHT, "aria-hidden": "true" },
    lines.filter((line) => line.from).sort((a, b) => shown.has(a.turn.key) - shown.has(b.turn.key)).map((line) => {
      const [x0, y0, x1, y1] = [x(line.from.lane), y(line.from.place), x(line.lane), y(line.place)];
      const path = x0 === x1 ? `M${x0} ${y0}V${y1}` : `M${x0} ${y0}V${y1 - 14}Q${x0} ${y1 - 4} ${x0 + 8} ${y1 - 4}H${x1 - 4}Q${x1} ${y1 - 4} ${x1} ${y1}`;
      return svg("path", { d: path, class: shown.has(line.turn.key) ? "on" : "" });
    }),
    lines.map((line) => svg("circle", { cx: x(line.lane), cy: y(line.place), r: 5, "data-role": line.turn.role, class: shown.has(line.turn.key) ? "on" : "" })));
  const rows = lines.map(({ turn }) => {
    const [what, text] = gist(turn);
    return el("div", { class: `tree-turn${shown.has(turn.key) ? " on" : ""}`, role: "treeitem", "data-role": turn.role },
      el("div", { class: "tree-facts" },
        el("b", {}, visible(speaker(turn) ?? "")), what ? el("span", { class: "what" }, visible(what)) : null,
        (ends.get(turn.key) ?? []).map((each) =>
          el("button", { class: "link", click: () => onSequence(each.place) }, `sequence ${each.place + 1}: reward ${reward(each.reward)}`)),
        el("span", {}, `turn ${visible(turn.key.split("/").at(-1))}`), el("span", {}, count(turn.ids?.length ?? 0, "token")),
        turn.stop_reason ? el("span", {}, visible(turn.stop_reason)) : null,
        turn.latency_s === null ? null : el("span", {}, seconds(turn.latency_s))),
      el("div", { class: "tree-text" }, visible(text.slice(0, 300))));
  });
  const forks = lanes - 1;
  return el("div", { class: "tree" },
    el("p", { class: "quiet" }, `${count(lines.length, "turn")}, ${count(episode.sequences.length, "sequence")}, ` +
      (forks > 0 ? count(forks, "branch", "branches") : "no branches")),
    el("div", { class: "legend" }, [["prompt", "prompt"], ["assistant", "model"], ["environment", "environment"]].map(([role, label]) =>
      [el("i", { class: "key", "data-role": role }), el("span", {}, label)]), el("span", {}, "filled: in the chosen sequence")),
    el("div", { class: "tree-grid" }, drawing, el("div", { role: "tree", "aria-label": "Turns" }, rows)));
}

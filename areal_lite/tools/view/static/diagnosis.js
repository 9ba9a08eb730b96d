// Why a reward does not rise: the findings of each run, alarms first with their curves, then its rewards.

import { ask } from "./backend.js";
import { PanelView } from "./curves.js";
import { el, fill, svg } from "./dom.js";
import { number, visible } from "./format.js";

const SEVERITIES = { problem: "failed", warning: "rejected", ok: "accepted" };
const CELL = 14;
const BINS = 10;

function smallCurve(title, unit, points) {
  const steps = points.map(([step]) => step);
  const view = new PanelView({ title, unit, curves: { value: "" } }, { run: { value: points } }, [steps[0], steps.at(-1)],
    { move: (step) => view.mark(step), pick: () => {} });
  return view;
}

/** Return the mean of each tenth of the answers, by length, as (tokens, reward). */
function byLength(episodes) {
  const sorted = [...episodes].sort((a, b) => a[1] - b[1]);
  const size = Math.ceil(sorted.length / BINS);
  const mean = (part, column) => part.reduce((sum, each) => sum + each[column], 0) / part.length;
  return Array.from({ length: Math.ceil(sorted.length / size) || 0 }, (_, place) => sorted.slice(place * size, (place + 1) * size)).map((part) => [mean(part, 1), mean(part, 2)]);
}

/** Counts as cells, a column for each version and a row for each bin of rewards, the highest above. */
class RewardCells {
  constructor(episodes) {
    const rewards = episodes.map(([, , reward]) => reward);
    const low = rewards.reduce((a, b) => Math.min(a, b));
    const width = rewards.reduce((a, b) => Math.max(a, b)) - low || 1;
    const versions = new Map();
    for (const [version, , reward] of episodes) {
      if (!versions.has(version)) versions.set(version, Array(BINS).fill(0));
      versions.get(version)[Math.min(BINS - 1, Math.floor(((reward - low) / width) * BINS))] += 1;
    }
    this.rewards = [...versions].sort(([a], [b]) => a - b);
    this.edge = (bin) => low + (bin / BINS) * width;
    this.drawing = svg("svg", { class: "curve", role: "img", "aria-label": "Rewards by version" });
    this.node = el("figure", { class: "panel" }, el("figcaption", {}, el("b", {}, "Rewards"), el("span", { class: "quiet" }, " share of the episodes of a version")), this.drawing);
  }

  draw(width) {
    const rows = BINS;
    const wide = (width - 44) / Math.max(1, this.rewards.length);
    this.drawing.setAttribute("width", width);
    this.drawing.setAttribute("height", rows * CELL + 20);
    fill(this.drawing,
      [0, rows].map((edge) => svg("text", { x: 38, y: edge ? 10 : rows * CELL, "text-anchor": "end" }, number(this.edge(edge)))),
      this.rewards.map(([version, counts], place) => {
        const total = counts.reduce((sum, each) => sum + each, 0);
        return counts.map((each, bin) => each && svg("rect", {
          class: "dot s0", opacity: Math.max(0.08, each / total), x: 44 + place * wide, y: (rows - 1 - bin) * CELL, width: Math.max(1, wide - 0.5), height: CELL - 1 },
        svg("title", {}, `version ${version}: ${each} of ${total} from ${number(this.edge(bin))} to ${number(this.edge(bin + 1))}`)));
      }),
      [0, this.rewards.length - 1].map((place) => svg("text", { x: 44 + (place + 0.5) * wide, y: rows * CELL + 15, "text-anchor": place ? "end" : "start" }, number(this.rewards[place][0]))));
  }
}

function finding(each) {
  return el("details", { class: "cause", open: each.severity !== "ok" },
    el("summary", {},
      el("span", { class: "badge", "data-status": SEVERITIES[each.severity] }, each.severity), el("b", {}, visible(each.name.replaceAll("_", " "))),
      el("span", {}, number(each.figure)), el("span", { class: "quiet" }, `alarm ${each.below ? "below" : "above"} ${number(each.limit)}`)),
    el("p", {}, `${each.meaning}.`),
    el("p", {}, `To do: ${each.fix}: `, each.keys.map((key, place) => [place ? ", " : "", el("code", {}, key)])));
}

export async function diagnosisView(node, { filter }) {
  const { runs } = await ask("diagnosis", { filter });
  const views = [];
  const panel = (view) => { views.push(view); return view.node; };
  fill(node, el("div", { class: "page wide" }, el("h2", {}, "Why does the reward not rise?"),
    runs.map(({ run, findings, episodes }) => {
      const rewarded = episodes.filter(([, , reward]) => reward !== null && reward !== undefined);
      const alarms = findings.filter((each) => each.severity !== "ok");
      return el("section", {}, el("h3", {}, `${visible(run)}: ${alarms.length} of ${findings.length} figures are suspicious`),
        alarms.map(finding),
        el("div", { class: "panels" },
          rewarded.length ? [panel(new RewardCells(rewarded)), panel(smallCurve("Reward", "by trained tokens", byLength(rewarded)))] : null,
          alarms.map((each) => panel(smallCurve(each.name.replaceAll("_", " "), "by version or step", each.curve)))),
        findings.filter((each) => each.severity === "ok").map(finding));
    })));
  views.forEach((view) => view.draw(Math.max(200, view.node.clientWidth - 24)));
}

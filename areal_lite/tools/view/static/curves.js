// Curves of metrics.jsonl. The step under the cursor is the same in all panels, and links to its episodes.

import { ask, isExported } from "./backend.js";
import { el, fill, svg } from "./dom.js";
import { number, visible } from "./format.js";
import { quoted } from "./filter.js";
import { linkTo } from "./state.js";

const CURVE_HEIGHT = 150;
const CURVE_LEFT = 44;
const CURVE_RIGHT = 10;
const CURVE_TOP = 8;
const CURVE_BOTTOM = 20;

/** Return about `count` round numbers from `low` to `high`. */
export function ticks(low, high, wanted = 4) {
  const width = high - low || Math.abs(high) || 1;
  const rough = width / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let each = Math.ceil(low / step); each * step <= high + step * 1e-9; each += 1) found.push(each * step);
  return found;
}

export class PanelView {
  constructor(panel, runs, range, on) {
    this.range = range;
    this.on = on;
    this.series = [];
    const names = Object.keys(runs);
    Object.entries(panel.curves).forEach(([metric, label], number_) => {
      names.forEach((run, place) => {
        const points = runs[run][metric];
        if (!points) return;
        const color = names.length > 1 ? place : number_;
        this.series.push({
          run, points, color: color % 8, dashed: names.length > 1 && number_ % 2 === 1, dots: metric.startsWith("eval/"),
          label: [names.length > 1 ? run : "", label].filter(Boolean).join(" "), values: new Map(points),
        });
      });
    });
    this.legend = el("div", { class: "curve-legend" });
    this.drawing = svg("svg", { class: "curve", height: CURVE_HEIGHT, role: "img", "aria-label": `${panel.title} by training step` });
    this.node = el("figure", { class: "panel" },
      el("figcaption", {}, el("b", {}, visible(panel.title)), panel.unit && panel.unit !== panel.title.toLowerCase() ? el("span", { class: "quiet" }, ` ${panel.unit}`) : null), this.legend, this.drawing);
    this.drawing.addEventListener("mousemove", (event) => this.on.move(this.stepAt(event.offsetX)));
    this.drawing.addEventListener("click", (event) => this.on.pick(this.stepAt(event.offsetX)));
  }

  stepAt(x) {
    const [low, high] = this.range;
    const share = (x - CURVE_LEFT) / Math.max(1, this.width - CURVE_LEFT - CURVE_RIGHT);
    return Math.round(low + Math.min(1, Math.max(0, share)) * (high - low));
  }

  x(step) {
    const [low, high] = this.range;
    return CURVE_LEFT + ((step - low) / (high - low || 1)) * (this.width - CURVE_LEFT - CURVE_RIGHT);
  }

  draw(width) {
    this.width = width;
    const values = this.series.flatMap((each) => each.points.map(([, value]) => value)).filter(Number.isFinite);
    let low = Math.min(...values);
    let high = Math.max(...values);
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
    const space = (high - low) * 0.06;
    if (!(low >= 0 && low - space < 0)) low -= space;
    high += space;
    const y = (value) => CURVE_TOP + (1 - (value - low) / (high - low)) * (CURVE_HEIGHT - CURVE_TOP - CURVE_BOTTOM);
    this.y = y;
    this.cursor = svg("line", { class: "cursor", y1: CURVE_TOP, y2: CURVE_HEIGHT - CURVE_BOTTOM, x1: -10, x2: -10 });
    this.marks = svg("g", {});
    this.drawing.setAttribute("width", width);
    fill(this.drawing,
      ticks(low, high, 4).map((value) => [
        svg("line", { class: "grid", x1: CURVE_LEFT, x2: width - CURVE_RIGHT, y1: y(value), y2: y(value) }),
        svg("text", { x: CURVE_LEFT - 6, y: y(value) + 3, "text-anchor": "end" }, number(value)),
      ]),
      ticks(...this.range, 5).filter(Number.isInteger).map((step) => svg("text", { x: this.x(step), y: CURVE_HEIGHT - 5, "text-anchor": "middle" }, number(step))),
      this.series.map((each) => [
        svg("path", {
          class: `stroke s${each.color}${each.dashed ? " dashed" : ""}`,
          d: each.points.map(([step, value], place) => `${place ? "L" : "M"}${this.x(step).toFixed(1)} ${y(value).toFixed(1)}`).join(""),
        }),
        each.dots || each.points.length < 2 ? each.points.map(([step, value]) => svg("circle", { class: `dot s${each.color}`, cx: this.x(step), cy: y(value), r: 2.5 })) : null,
      ]),
      this.cursor, this.marks);
    this.mark(null);
  }

  mark(step) {
    this.cursor.setAttribute("x1", step === null ? -10 : this.x(step));
    this.cursor.setAttribute("x2", step === null ? -10 : this.x(step));
    fill(this.marks, step === null ? null : this.series.filter((each) => each.values.has(step)).map((each) =>
      svg("circle", { class: `dot s${each.color}`, cx: this.x(step), cy: this.y(each.values.get(step)), r: 3.5 })));
    fill(this.legend, this.series.slice(0, 10).map((each) => {
      const value = step === null ? each.points.at(-1)[1] : each.values.get(step);
      return el("span", {}, el("i", { class: `key s${each.color}` }), visible(each.label) || "value", " ", el("b", {}, number(value)));
    }));
  }
}

export async function curvesView(node, state, change) {
  const { runs, panels, names } = await ask("metrics", { extra: state.extra });
  const steps = [...new Set(Object.values(runs).flatMap((each) => Object.values(each).flatMap((points) => points.map(([step]) => step))))].sort((a, b) => a - b);
  if (!panels.length) {
    fill(node, el("div", { class: "page" }, el("h2", {}, "Curves"), el("p", { class: "quiet" }, "No metrics.jsonl here: training writes one beside its dumps, with a line for each step.")));
    return;
  }
  const strip = el("div", { class: "strip", role: "status" });
  const grid = el("div", { class: "panels" });
  let at = null;
  let pinned = null;
  const range = [steps[0], steps.at(-1)];
  const views = panels.map((panel) => new PanelView(panel, runs, range, {
    move: (step) => mark(nearest(step)),
    pick: (step) => { pinned = pinned === nearest(step) ? null : nearest(step); mark(pinned); },
  }));
  const nearest = (step) => steps.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best), steps[0]);

  function mark(step) {
    at = step;
    views.forEach((view) => view.mark(step));
    if (step === null) {
      fill(strip, el("span", { class: "quiet" }, "Point at a step for its values; click, or press Enter after ← and →, to keep it."));
      return;
    }
    const version = Math.max(0, step - 1);
    const links = Object.keys(runs).map((run) => {
      const where = Object.keys(runs).length > 1 ? ` run=${quoted(run)}` : "";
      return [
        Object.keys(runs).length > 1 ? el("b", {}, visible(run)) : null,
        el("a", { href: linkTo({ filter: `scope=rollout version=${version}${where}` }) }, `Episodes sampled by version ${version}`),
        el("a", { href: linkTo({ filter: `scope=eval-rollout version=${step}${where}` }) }, `Evaluation of version ${step}`),
        el("a", { href: linkTo({ view: "timeline", filter: `scope=rollout version=${version}${where}` }) }, "Timeline"),
      ];
    });
    fill(strip, el("b", {}, `Step ${step}`), pinned === step ? el("span", { class: "badge" }, "kept") : null, links);
  }

  const add = el("input", { list: "metric-names", placeholder: "Add a metric…", "aria-label": "Add a metric", class: "small-input",
    change: (event) => { if (names.includes(event.target.value)) change({ extra: [...state.extra.split(",").filter(Boolean), event.target.value].join(",") }); } });
  fill(node, el("div", { class: "page wide" },
    el("div", { class: "page-head" }, el("h2", {}, "Curves"), strip,
      isExported() ? null : [add, el("datalist", { id: "metric-names" }, names.map((name) => el("option", { value: name }))),
        state.extra ? el("button", { click: () => change({ extra: "" }) }, "Remove added") : null]),
    grid));
  grid.tabIndex = 0;
  grid.setAttribute("aria-label", "Curves; left and right arrows move by a step");
  grid.append(...views.map((view) => view.node));
  grid.addEventListener("mouseleave", () => mark(pinned));
  grid.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (move) {
      event.preventDefault();
      const place = at === null ? (move > 0 ? 0 : steps.length - 1) : Math.min(steps.length - 1, Math.max(0, steps.indexOf(at) + move));
      pinned = steps[place];
      mark(pinned);
    } else if (event.key === "Enter" && pinned !== null) strip.querySelector("a")?.click();
  });
  const draw = () => { views.forEach((view) => view.draw(Math.max(200, view.node.clientWidth - 24))); mark(at); };
  draw();
  let width = grid.clientWidth;
  new ResizeObserver(() => { if (grid.clientWidth !== width && grid.isConnected) { width = grid.clientWidth; draw(); } }).observe(grid);
}

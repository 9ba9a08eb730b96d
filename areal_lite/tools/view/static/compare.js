// Two runs, row by row: the same prompt, the rewards side by side.

import { ask } from "./backend.js";
import { el, fill } from "./dom.js";
import { count, number, reward, visible } from "./format.js";
import { question } from "./conversation.js";
import { quoted } from "./filter.js";
import { linkTo } from "./state.js";

const SHOWN = 300;

function rowsFilter(run, side, filter) {
  const tasks = side.tasks.map((task) => `task=${quoted(task)}`).join(" or ");
  return [filter && `(${filter})`, `run=${quoted(run)}`, `(${tasks})`].filter(Boolean).join(" ");
}

export async function compareView(node, state, change, runs) {
  const first = state.first || runs[0].name;
  const second = state.second || runs[1].name;
  const found = await ask("compare", { first, second, filter: state.filter });
  const chooser = (name, value) => el("select", { "aria-label": `${name} run`, change: (event) => change({ [name]: event.target.value }) },
    runs.map((run) => el("option", { value: run.name, selected: run.name === value }, visible(run.name))));
  const better = found.pairs.filter((each) => each.change > 1e-9).length;
  const worse = found.pairs.filter((each) => each.change < -1e-9).length;
  const changes = found.pairs.filter((each) => each.change !== null);
  const mean = changes.length ? changes.reduce((sum, each) => sum + each.change, 0) / changes.length : null;
  const body = el("tbody", {});
  const cell = (side, run) => {
    const bar = el("i", { class: "bar" });
    bar.style.width = `${Math.round(Math.min(1, Math.max(0, side.reward ?? 0)) * 80)}px`;
    return el("td", { class: "side" }, el("a", { href: linkTo({ filter: rowsFilter(run, side, state.filter) }) }, reward(side.reward)),
      el("span", { class: "side-bar" }, bar), el("span", { class: "quiet" }, `of ${number(side.lines)}`));
  };
  const show = (from, to) => body.append(...found.pairs.slice(from, to).map((each) => el("tr", {},
    el("td", { class: `right change ${each.change > 1e-9 ? "up" : each.change < -1e-9 ? "down" : ""}` },
      each.change === null ? "–" : `${each.change > 0 ? "+" : each.change < 0 ? "−" : ""}${number(Math.abs(each.change))}`),
    cell(each.sides[0], first), cell(each.sides[1], second),
    el("td", { class: "quiet" }, each.scope === "eval-rollout" ? "eval" : "train"),
    el("td", { class: "prompt", title: visible(question(each.prompt)).slice(0, 600) }, visible(question(each.prompt)).slice(0, 200)))));
  show(0, SHOWN);
  fill(node, el("div", { class: "page wide" },
    el("div", { class: "page-head" }, el("h2", {}, "Compare"), chooser("first", first), el("span", { class: "quiet" }, "with"), chooser("second", second)),
    found.both ? null : el("p", { class: "advice" },
      "These runs share no row, so there is nothing to compare. Rows are the same if their prompts have the same tokens: compare runs with the same dataset, " +
      "prompt and tokenizer, let both evaluate the same held-out rows (eval_dataset), or remove the filter. The curves of both are drawn together under Curves."),
    el("p", { class: "quiet" },
      `${count(found.both, "row")} in both: ${number(better)} better, ${number(worse)} worse in the second, mean change ${mean === null ? "–" : number(mean)}. ` +
      `Only in the first: ${number(found.only[0])}; only in the second: ${number(found.only[1])}. Rows are the same if their prompts have the same tokens. ` +
      "Green: better in the second; red: worse. " +
      `${found.cut ? "Only the first 20,000 sequences of each run were read: narrow with a filter." : ""}`),
    el("table", { class: "table" },
      el("thead", {}, el("tr", {}, ["Change", first, second, "Part", "Prompt"].map((name, place) => el("th", { scope: "col", class: place ? "" : "right" }, visible(name))))),
      body),
    found.pairs.length > SHOWN ? el("button", { class: "more", click: (event) => { show(SHOWN); event.target.remove(); } }, `Show ${number(found.pairs.length - SHOWN)} more`) : null));
}

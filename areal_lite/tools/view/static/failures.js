// Failures by cause, and lines of the dumps that could not be read.

import { ask } from "./backend.js";
import { el, fill } from "./dom.js";
import { count, number, visible } from "./format.js";
import { quoted } from "./filter.js";
import { linkTo } from "./state.js";

function causeFilter(failure) {
  const term = (key, value) => (value === null ? `${key}=none` : `${key}=${quoted(value)}`);
  const terms = [term("error_kind", failure.error_kind), term("error_type", failure.error_type)];
  if (failure.error_kind === null) terms.push("not error=none");
  return terms.join(" ");
}

export async function failuresView(node, { filter }) {
  const { runs, problems } = await ask("summary", { filter });
  const several = runs.length > 1;
  const all = runs.flatMap((run) => run.failures).sort((a, b) => b.count - a.count);
  const failures = all.filter((each) => each.error_kind !== "cancelled");
  const stopped = all.filter((each) => each.error_kind === "cancelled");
  const sum = (causes) => causes.reduce((total, each) => total + each.count, 0);
  const most = all[0]?.count ?? 1;
  const causes = (some) => some.map((each, place) => {
        const bar = el("i", { class: "bar" });
        bar.style.width = `${Math.max(2, Math.round((each.count / most) * 120))}px`;
        const where = several ? `run=${quoted(each.run)} ` : "";
        const narrowed = [filter && `(${filter})`, where + causeFilter(each)].filter(Boolean).join(" ");
        return el("details", { class: "cause", "data-status": each.status, open: some === failures && place < 3 },
          el("summary", {},
            el("span", { class: "cause-count" }, number(each.count)), el("span", { class: "cause-bar" }, bar),
            el("span", { class: "badge", "data-status": each.status }, visible(each.error_kind ?? each.status ?? "–")),
            el("b", {}, visible(each.error_type ?? "")),
            el("span", { class: "cause-text" }, visible(each.cause ?? "")),
            several ? el("span", { class: "quiet" }, visible(each.run)) : null),
          el("div", { class: "cause-links" },
            el("a", { href: linkTo({ filter: narrowed }) }, `List ${count(each.count, "sequence")}`),
            each.id ? el("a", { href: linkTo({ run: each.run, id: each.id, filter: narrowed }) }, `Open ${visible(each.id)}`) : null),
          each.error ? el("pre", { class: "text traceback" }, visible(each.error)) : null);
  });
  fill(node,
    el("div", { class: "page" },
      el("h2", {}, "Failures by cause"),
      el("p", { class: "quiet" }, failures.length ? `${count(sum(failures), "sequence")} not accepted for ${count(failures.length, "reason")}. One traceback each. Red: failed; yellow: rejected.` : "Nothing failed and nothing was rejected with a reason."),
      causes(failures),
      stopped.length ? [
        el("h2", {}, "Stopped by the run"),
        el("p", { class: "quiet" }, `${count(sum(stopped), "sequence")} that the run no longer needed, as at its end. These are no failures.`),
        causes(stopped)] : null,
      problems.length ? [
        el("h2", {}, "Lines that could not be read"),
        el("table", { class: "table" },
          el("thead", {}, el("tr", {}, ["File", "Line", "Kind", "Message"].map((name) => el("th", { scope: "col" }, name)))),
          el("tbody", {}, problems.map((each) => el("tr", {},
            el("td", {}, el("code", {}, visible(`${several ? `${each.run} ` : ""}${each.file}`))), el("td", { class: "right" }, number(each.line)),
            el("td", {}, visible(each.kind)), el("td", {}, visible(each.message)))))),
      ] : null));
}

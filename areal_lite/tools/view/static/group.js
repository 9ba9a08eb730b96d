// The episodes of one group side by side.

import { el } from "./dom.js";
import { count, number, reward, visible } from "./format.js";
import { rich, speaker, turnMessages } from "./conversation.js";
import { linkTo } from "./state.js";

export function groupView(group, current) {
  const rewarded = group.members.filter((each) => each.reward !== null);
  const rewards = rewarded.map((each) => each.reward);
  const [total, episodes] = rewarded.reduce(([sum, of], each) => [sum + each.reward * each.weight, of + each.weight], [0, 0]);
  const mean = rewards.length ? total / episodes : null;
  const spread = rewards.length ? Math.max(...rewards) - Math.min(...rewards) : null;
  const statuses = new Map();
  for (const each of group.members) statuses.set(each.status, (statuses.get(each.status) ?? 0) + 1);
  return el("div", { class: "group" },
    el("p", { class: "quiet" },
      `${count(group.members.length, "sequence")}: ${[...statuses].map(([status, n]) => `${n} ${status}`).join(", ")}. `,
      mean === null ? "No rewards." : `Mean reward ${reward(mean)}. `,
      spread === 0 && rewards.length > 1 ? "All rewards are equal, so a group baseline leaves no gradient." : ""),
    el("div", { class: "members" }, group.members.map((each) => member(group, each, mean, current))));
}

function member(group, each, mean, current) {
  const least = Math.min(0, ...group.members.map((one) => one.reward ?? 0));
  const most = Math.max(1, ...group.members.map((one) => one.reward ?? 0));
  const share = each.reward === null ? 0 : (each.reward - least) / (most - least || 1);
  const bar = el("i", { class: "bar" });
  bar.style.width = `${Math.round(share * 100)}%`;
  return el("article", { class: "member", "data-status": each.status, "aria-current": each.id === current ? "true" : null },
    el("a", { class: "member-head", href: linkTo({ run: group.run, id: each.id }) },
      el("b", {}, reward(each.reward)),
      el("span", { class: "badge", "data-status": each.status }, each.status ?? "–"),
      el("span", { class: "quiet" }, `#${number(each.member ?? each.sample)}`)),
    el("div", { class: "meter" }, bar),
    el("div", { class: "turn-facts" },
      el("span", {}, count(each.tokens ?? 0, "token")), el("span", {}, count(each.turns, "turn")),
      each.reward === null || mean === null ? null : el("span", { title: "reward minus the group's mean" }, `${each.reward >= mean ? "+" : "−"}${number(Math.abs(each.reward - mean))} to mean`),
      each.advantages ? el("span", { title: "of the tokens that trained" }, `advantage ${[...new Set(each.advantages)].map((value) => number(value)).join(" to ")}`) : null),
    each.cause ? el("details", { class: "why", open: true }, el("summary", {}, visible(each.cause)),
      each.error && each.error.trim() !== each.cause ? el("pre", { class: "text" }, visible(each.error)) : null) : null,
    each.answer ? el("div", { class: "member-text" }, each.answer.map((turn) => turn.text === null ? el("p", { class: "quiet" }, "No text.")
      : turnMessages(turn).map((part) => el("div", { class: "member-turn", "data-role": turn.role }, el("div", { class: "turn-role" }, visible(turn.role === "assistant" ? speaker(turn) : part.role ?? "")), rich(part.text, part.role))))) : null);
}

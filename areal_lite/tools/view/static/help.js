// Keys of the keyboard and of the filter.

import { el } from "./dom.js";
import { visible } from "./format.js";

const KEYBOARD = [
  ["j  k", "next, previous episode"], ["Enter", "open the episode"], ["Esc", "close, or empty the filter"], ["/", "go to the filter"],
  ["g  G", "first, last episode"], ["t", "tokens"], ["c", "conversation"], ["b", "branches (tree)"], ["s", "group side by side"],
  ["f", "last ended first, followed live"], ["1 – 6", "episodes, failures, curves, timeline, diagnosis, compare"], ["d", "dark or light"], ["?", "this help"],
];
const EXAMPLES = [
  ["not sure", "words alone search the texts, in any case"],
  ["reward/correct=0 counts/answers>3", "a part of the reward, and a count, by their names in the dump"],
  ["status=failed error~Timeout", "failures whose error has Timeout"],
  ["reward<0.5 turns>3 version>=4", "all three must hold"],
  ['text~"(?i)not sure" or stop=length', "a regular expression in any turn, or an answer cut off"],
  ["not (status=accepted) scope=rollout", "what training did not use"],
];

export function helpDialog(keys) {
  const dialog = el("dialog", { class: "help", "aria-label": "Help" });
  dialog.append(
    el("button", { class: "close", "aria-label": "Close", click: () => dialog.close() }, "×"),
    el("div", { class: "help-columns" },
      el("section", {}, el("h3", {}, "Keyboard"), el("dl", {}, KEYBOARD.map(([key, meaning]) =>
        el("div", {}, el("dt", {}, key.split("  ").map((each) => el("kbd", {}, each))), el("dd", {}, meaning)))),
        el("h3", {}, "Examples"), EXAMPLES.map(([filter, meaning]) => el("p", {}, el("code", {}, filter), el("br"), el("span", { class: "quiet" }, meaning)))),
      el("section", {}, el("h3", {}, "Filter keys"),
        el("p", { class: "quiet" }, "Numbers take = != < <= > >=, the others = != ~ !~. ~ finds a regular expression. KEY=none finds missing values."),
        el("dl", { class: "keys" }, keys.map((key) => el("div", {}, el("dt", {}, el("code", {}, key.name)), el("dd", {},
          visible(key.meaning.replaceAll("`", "")), key.values.length ? el("span", { class: "quiet" }, ` (${key.values.join(", ")})`) : null)))))));
  return dialog;
}

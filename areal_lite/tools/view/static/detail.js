// One episode: what it was, and its conversation, tokens, tree, group or record.

import { ask } from "./backend.js";
import { el, fill } from "./dom.js";
import { clock, count, number, reward, seconds, visible } from "./format.js";
import { conversation, failure, rewardParts } from "./conversation.js";
import { groupView } from "./group.js";
import { quoted } from "./filter.js";
import { linkTo } from "./state.js";
import { tokenView } from "./tokens.js";
import { treeView } from "./tree.js";

export const TABS = [["conversation", "Conversation"], ["tokens", "Tokens"], ["tree", "Tree"], ["group", "Group"], ["record", "Record"]];

export class Detail {
  constructor({ change, close }) {
    this.change = change;
    this.close = close;
    this.node = el("section", { class: "detail", "aria-label": "Episode", hidden: true });
    this.shown = "";
    this.place = null;
  }

  async show(state) {
    const key = `${state.run} ${state.id}`;
    this.state = state;
    this.node.hidden = !state.id;
    if (!state.id) {
      this.shown = "";
      return;
    }
    if (key !== this.shown) {
      this.shown = key;
      let episode;
      try {
        episode = await ask("episode", { run: state.run, id: state.id });
      } catch (error) {
        if (this.shown !== key) return;
        this.episode = null;
        fill(this.node, el("div", { class: "page" }, el("p", { class: "error" }, visible(error.message)), el("p", { class: "quiet" }, visible(error.hint ?? ""))));
        return;
      }
      if (this.shown !== key) return; // another one was chosen meanwhile
      this.episode = episode;
      this.texts = undefined;
      this.group = undefined;
      this.place = Math.max(0, episode.sequences.findIndex((each) => each.id === state.id));
    }
    if (this.episode) await this.draw();
  }

  head() {
    const { facts, sequences } = this.episode;
    const sequence = sequences[this.place];
    const { state } = this;
    const versions = facts.head_version === null || facts.head_version === undefined ? number(facts.version)
      : facts.head_version === facts.tail_version ? number(facts.tail_version) : `${facts.head_version}–${facts.tail_version}`;
    const calls = Object.values(this.episode.turns).filter((turn) => turn.started !== null);
    const began = Math.min(...calls.map((turn) => turn.started));
    const ended = Math.max(...calls.map((turn) => turn.started + (turn.latency_s ?? 0)));
    const entry = (name, ...value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
    return [
      el("header", { class: "detail-head" },
        el("div", { class: "detail-title" },
          el("h2", {}, `Task ${visible(facts.task_id ?? "–")}`, el("span", { class: "quiet" }, ` #${number(facts.member_idx ?? facts.sample_idx ?? null)}`)),
          el("span", { class: "badge", "data-status": facts.status }, visible(facts.status ?? "–")),
          el("span", { class: "big-reward" }, el("span", { class: "quiet" }, "reward "), reward(sequence.reward)),
          rewardParts(facts),
          el("button", { class: "close", "aria-label": "Close (Esc)", title: "Close (Esc)", click: this.close }, "×")),
        el("dl", { class: "facts" },
          entry("Version", versions),
          entry("Tokens", number(sequence.seqlen)),
          entry("Turns", number(sequence.path.length)),
          facts.trained_step === undefined ? null : entry("Trained in step", number(facts.trained_step)),
          ended > began ? entry("Took", seconds(ended - began)) : null,
          facts.timings?.run_s === undefined ? null : entry("Group took", seconds(facts.timings.run_s)),
          facts.timings?.finished_at === undefined ? null : entry("Ended", clock(facts.timings.finished_at)),
          entry("Group", el("a", { href: linkTo({ filter: `group=${quoted(facts.group_id ?? "")}${facts.run ? ` run=${quoted(facts.run)}` : ""}` }) }, visible(facts.group_id ?? "–"))),
          entry("Line", el("code", { title: visible(this.episode.file) }, visible(facts.id)))),
        sequences.length > 1 ? el("div", { class: "segments", role: "radiogroup", "aria-label": "Sequence" },
          sequences.map((each, place) => el("button", { role: "radio", "aria-checked": String(place === this.place), click: () => this.choose(place) },
            `Sequence ${place + 1} · ${reward(each.reward)}`))) : null,
        el("div", { class: "tabs", role: "tablist", "aria-label": "Views of the episode" },
          TABS.map(([name, label]) => el("button", { role: "tab", "aria-selected": String(state.tab === name), tabindex: state.tab === name ? "0" : "-1",
            click: () => this.change({ tab: name }),
            keydown: (event) => {
              const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
              if (!move) return;
              const next = (TABS.findIndex(([each]) => each === state.tab) + move + TABS.length) % TABS.length;
              this.change({ tab: TABS[next][0] });
              requestAnimationFrame(() => this.node.querySelector('[role="tab"][aria-selected="true"]')?.focus());
            } }, label)))),
    ];
  }

  choose(place) {
    this.place = place;
    this.draw();
  }

  async draw() {
    const { episode, state } = this;
    const sequence = episode.sequences[this.place];
    const body = el("div", { class: "detail-body", role: "tabpanel", tabindex: "-1" });
    const tab = TABS.some(([name]) => name === state.tab) ? state.tab : "conversation";
    if (tab === "conversation") body.append(conversation(episode, sequence));
    else if (tab === "tree") body.append(treeView(episode, sequence, (place) => this.choose(place)));
    else if (tab === "record") body.append(record(episode));
    else if (tab === "group") {
      const group = this.group ?? (await ask("group", { run: state.run, group: episode.facts.group_id }));
      if (this.episode !== episode || this.state.tab !== "group") return;
      this.group = group;
      body.append(groupView(group, state.id));
    } else {
      if (this.texts === undefined) {
        this.texts = null;
        const loading = el("p", { class: "quiet" }, "Loading the tokenizer…");
        fill(this.node, this.head(), el("div", { class: "detail-body" }, loading));
        const texts = await ask("texts", { run: state.run, id: state.id }).catch((error) => ({ texts: null, reason: error.message }));
        if (this.episode !== episode) return;
        this.texts = texts;
        if (this.state.tab !== "tokens") return;
      } else if (this.texts === null) return;
      if (this.texts.reason) body.append(el("p", { class: "quiet" }, visible(this.texts.reason)));
      body.append(failure(episode.facts) ?? "", tokenView(episode, sequence, this.texts.texts, state.color, (color) => this.change({ color }, { quiet: true })));
    }
    const top = this.bodyOf === `${this.shown} ${tab}` ? this.node.querySelector(".detail-body")?.scrollTop ?? 0 : 0;
    this.bodyOf = `${this.shown} ${tab}`;
    fill(this.node, this.head(), body);
    body.scrollTop = top;
  }
}

function record(episode) {
  const shown = { ...episode.facts, sequences: episode.sequences.map(({ path, ...rest }) => ({ ...rest, turns: path.length })) };
  return el("div", {}, el("p", { class: "quiet" }, `${visible(episode.file)} · without turns, ${count(Object.keys(episode.turns).length, "turn")} left out`),
    el("pre", { class: "text record" }, visible(JSON.stringify(shown, null, 2))));
}

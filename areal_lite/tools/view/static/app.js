// The page: its address is its state, keys and clicks change the address, and the views follow it.

import { ask, follow, isExported, start } from "./backend.js";
import { compareView } from "./compare.js";
import { curvesView } from "./curves.js";
import { Detail } from "./detail.js";
import { diagnosisView } from "./diagnosis.js";
import { el, fill, later, setText } from "./dom.js";
import { failuresView } from "./failures.js";
import { asFilter, termValue, withTerm } from "./filter.js";
import { count, number, visible } from "./format.js";
import { helpDialog } from "./help.js";
import { EpisodeList } from "./list.js";
import { readState, writeState } from "./state.js";
import { timelineView } from "./timeline.js";

const VIEWS = { episodes: "Episodes", failures: "Failures", curves: "Curves", timeline: "Timeline", diagnosis: "Diagnosis", compare: "Compare" };
const PANES = { failures: failuresView, curves: curvesView, timeline: timelineView, diagnosis: diagnosisView, compare: compareView };

class App {
  constructor(facts) {
    this.facts = facts;
    this.state = readState(location.hash);
    if (!location.hash && facts.filter) this.state.filter = facts.filter;
    this.views = Object.keys(VIEWS).filter((name) => name !== "compare" || facts.runs.length > 1);
    this.nav = el("nav", { class: "nav", "aria-label": "Views" });
    this.live = el("span", { class: "live", role: "status" });
    this.input = el("input", {
      id: "filter", type: "text", spellcheck: "false", autocomplete: "off", placeholder: "Words, or a filter such as reward<0.5 status=failed",
      "aria-label": "Filter", "aria-describedby": "filter-error", input: later(60, () => { this.suggest(); this.search(); }), keydown: (event) => this.filterKey(event),
      focus: () => this.suggest(), blur: () => { this.typed(); this.input.value = this.state.filter; this.suggestions.hidden = true; },
    });
    this.suggestions = el("div", { class: "suggestions", role: "listbox", "aria-label": "Filter keys", hidden: true });
    this.error = el("div", { id: "filter-error", class: "error", role: "alert", hidden: true });
    this.total = el("span", { class: "total" });
    this.order = el("select", { class: "order", "aria-label": "Sort by", change: () => this.change({ sort: this.order.value && `-${this.order.value}` }) });
    this.searchSoon = later(240, () => this.typed()); // words search all texts: not at every letter
    this.chips = el("div", { class: "chips", role: "group", "aria-label": "Quick filters" });
    this.notes = el("div", { class: "notes", hidden: true });
    this.list = new EpisodeList({
      runs: facts.runs,
      onOpen: (row) => this.open(row),
      onSort: (sort) => this.change({ sort }),
      onRows: (rows) => this.learn(rows),
      onTotal: (total, exact) => setText(this.total, `${exact ? "" : "more than "}${count(total, "episode")}`),
      // A filter that is being typed is often wrong for a moment.
      onError: (error) => { clearTimeout(this.wrong); if (error) this.wrong = setTimeout(() => this.showError(error), 350); else this.showError(null); },
    });
    this.detail = new Detail({ change: (values, how) => this.change(values, how), close: () => this.change({ id: "", run: "" }) });
    this.split = el("div", { class: "split" }, this.list.node, this.detail.node);
    this.pane = el("main", { class: "pane", tabindex: "-1" });
    this.help = helpDialog(facts.keys);
    this.loaded = null;
    this.build();
  }

  build() {
    const names = this.facts.runs.map((run) => run.name);
    fill(document.body,
      el("header", { class: "top" },
        el("a", { class: "brand", href: "#episodes", title: visible(this.facts.runs.map((run) => run.path).join("\n")) }, visible(names.length === 1 ? names[0] : count(names.length, "run"))),
        this.nav,
        el("div", { class: "top-right" }, this.live,
          el("button", { class: "icon", title: "Dark or light (d)", "aria-label": "Dark or light", click: () => this.theme() }, "◐"),
          el("button", { class: "icon", title: "Help (?)", "aria-label": "Help", click: () => this.help.showModal() }, "?"))),
      el("div", { class: "bar-row" },
        el("div", { class: "filter-box" }, el("span", { class: "slash", "aria-hidden": "true" }, "/"), this.input, this.error, this.suggestions), this.order, this.total),
      this.chips, this.notes, this.split, this.pane, this.help);
    this.input.value = this.state.filter;
    const theme = (() => { try { return localStorage.getItem("theme"); } catch { return null; } })();
    if (theme) document.documentElement.dataset.theme = theme;
    if (this.facts.notes.length) {
      this.notes.hidden = false;
      fill(this.notes, this.facts.notes.map((note) => el("p", {}, visible(note))), el("button", { class: "close", "aria-label": "Hide", click: () => { this.notes.hidden = true; } }, "×"));
    }
    if (isExported()) setText(this.live, "exported");
  }

  /** Show `values`; `quiet` keeps the views as they are. */
  change(values, { replace = false, quiet = false } = {}) {
    this.state = { ...this.state, ...values };
    const address = writeState(this.state);
    if (address !== location.hash) history[replace || quiet ? "replaceState" : "pushState"](null, "", address);
    if (!quiet) this.show();
  }

  async show() {
    const { state } = this;
    if (!this.views.includes(state.view)) state.view = "episodes";
    document.title = `${VIEWS[state.view]} · ${this.facts.runs.map((run) => run.name).join(", ")}`;
    fill(this.nav, this.views.map((name, place) => el("a", {
      href: writeState({ ...state, view: name, id: "", run: "" }), title: `${VIEWS[name]} (${place + 1})`, "aria-current": name === state.view ? "page" : null }, VIEWS[name])));
    if (document.activeElement !== this.input) this.input.value = state.filter;
    const lists = state.view === "episodes";
    this.split.hidden = !lists;
    this.pane.hidden = lists;
    this.chips.hidden = !lists;
    this.total.hidden = this.order.hidden = !lists;
    this.drawOrder();
    this.drawChips();
    if (!lists) {
      await this.showPane();
      return;
    }
    this.split.classList.toggle("open", Boolean(state.id));
    const wanted = `${state.filter}\n${state.sort}`;
    const shown = this.detail.show(state);
    if (this.loaded !== wanted) {
      this.loaded = wanted;
      await this.list.load(state.filter, state.sort, state.id ? state : null);
    }
    await shown;
    this.list.draw();
  }

  async showPane() {
    const { state } = this;
    try {
      await PANES[state.view](this.pane, state, (values) => this.change(values), this.facts.runs);
      this.showError(null);
    } catch (error) {
      this.showError(error);
    }
  }

  showError(error) {
    this.error.hidden = !error;
    this.input.setAttribute("aria-invalid", String(Boolean(error)));
    if (error) fill(this.error, visible(error.message), error.hint ? el("span", { class: "quiet" }, ` ${visible(error.hint)}`) : null);
  }

  /** Add what the rows record by a name of their own to the keys of filters and of the order. */
  learn(rows) {
    const known = new Set(this.facts.keys.map((key) => key.name));
    const found = new Set(rows.flatMap((row) => Object.keys(row.numbers)));
    for (const name of found) if (!known.has(name)) this.facts.keys.push({ name, alias: "", kind: "number", meaning: "recorded number", values: [] });
    this.drawOrder();
  }

  drawOrder() {
    const by = this.state.sort.replace(/^-/, "");
    const keys = this.facts.keys.filter((key) => key.kind === "number" || key.kind === "id");
    fill(this.order, el("option", { value: "" }, "newest first"), keys.map(({ name }) => el("option", { value: name, selected: name === by }, `by ${visible(name)}`)));
  }

  // -- filter

  search() {
    const filter = asFilter(this.input.value);
    if (filter === this.input.value.trim()) this.typed();
    else if (this.suggestions.hidden) this.searchSoon();
  }

  typed() {
    const filter = asFilter(this.input.value);
    if (filter !== this.state.filter) this.change({ filter, id: "", run: "" }, { replace: true });
  }

  word() {
    return this.input.value.slice(0, this.input.selectionStart).match(/(?:^|[\s(])(?:([a-z_]+)(!?[=~]))?([\w/-]*)$/);
  }

  suggest() {
    const match = this.word();
    const key = match?.[1] && this.facts.keys.find((each) => each.name === match[1] || each.alias === match[1]);
    const options = !match ? [] : match[1] ? (key?.values ?? []).map((value) => [value, ""])
      : match[3] ? this.facts.keys.filter((each) => each.name.startsWith(match[3]) || each.alias.startsWith(match[3])).map((each) => [each.name, each.meaning.replaceAll("`", "")]) : [];
    const open = options.filter(([name]) => name.startsWith(match[3]) && name !== match[3]).slice(0, 8);
    this.suggestions.hidden = !open.length || document.activeElement !== this.input;
    fill(this.suggestions, open.map(([name, meaning], place) => el("div", { role: "option", class: "suggestion", "aria-selected": String(!place), mousedown: (event) => { event.preventDefault(); this.accept(name); } },
      el("code", {}, name), el("span", { class: "quiet" }, meaning), place ? null : el("kbd", {}, "Tab"))));
  }

  accept(name) {
    const at = this.input.selectionStart;
    const begin = at - this.word()[3].length;
    this.input.setRangeText(name, begin, at, "end");
    this.suggest();
    this.search();
  }

  filterKey(event) {
    if (event.key === "Tab" && !event.shiftKey && !this.suggestions.hidden) {
      event.preventDefault();
      this.accept(this.suggestions.querySelector("code").textContent);
    } else if (event.key === "Enter" || event.key === "ArrowDown") {
      event.preventDefault();
      this.suggestions.hidden = true;
      this.typed();
      this.list.body.focus();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      if (!this.suggestions.hidden) this.suggestions.hidden = true;
      else if (this.input.value) {
        this.input.value = "";
        this.typed();
      } else this.list.body.focus();
    }
  }

  async drawChips() {
    const { filter } = this.state;
    const summary = this.summary;
    if (!summary) return;
    const statuses = {};
    const scopes = {};
    for (const run of summary.runs) {
      for (const [name, n] of Object.entries(run.status)) statuses[name] = (statuses[name] ?? 0) + n;
      for (const version of run.versions) if (version.scope) scopes[version.scope] = (scopes[version.scope] ?? 0) + version.lines;
    }
    const chip = (key, value, n, label) => {
      const on = termValue(filter, key) === value;
      return el("button", { class: "chip", "data-status": key === "status" ? value : null, "aria-pressed": String(on),
        click: () => this.change({ filter: withTerm(filter, key, on ? null : value), id: "", run: "" }) }, visible(label), el("span", {}, number(n)));
    };
    fill(this.chips,
      Object.entries(statuses).map(([name, n]) => chip("status", name, n, name)),
      Object.keys(scopes).length > 1 ? [el("span", { class: "gap" }), Object.entries(scopes).map(([name, n]) => chip("scope", name, n, name === "rollout" ? "training" : "evaluation"))] : null);
  }

  async readSummary() {
    try {
      this.summary = await ask("summary");
      this.drawChips();
    } catch (error) {
      this.showError(error);
    }
  }

  // -- rows

  open(row, replace = Boolean(this.state.id)) {
    this.change({ run: row.run, id: row.id }, { replace });
  }

  move(place) {
    const row = this.list.select(place);
    this.list.body.focus({ preventScroll: true });
    clearTimeout(this.opening);
    if (row && this.state.id) this.opening = setTimeout(() => this.open(row), 60);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.help.open) return;
    if (/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
    const { state, list } = this;
    const lists = state.view === "episodes";
    const inDetail = this.detail.node.contains(document.activeElement);
    const tab = (name) => () => { const row = list.current(); if (lists && (state.id || row)) this.change({ tab: name, ...(state.id ? {} : { run: row.run, id: row.id }) }); };
    const step = Math.max(1, Math.floor(list.body.clientHeight / 28) - 1);
    const rows = {
      j: () => this.move(list.selected + 1), k: () => this.move(list.selected - 1), g: () => this.move(0), G: () => this.move(list.total - 1),
      ...(inDetail ? {} : {
        ArrowDown: () => this.move(list.selected + 1), ArrowUp: () => this.move(list.selected - 1), Home: () => this.move(0), End: () => this.move(list.total - 1),
        PageDown: () => this.move(list.selected + step), PageUp: () => this.move(list.selected - step),
        Enter: () => { const row = list.current(); if (row) this.open(row, false); },
      }),
    };
    const anywhere = {
      "/": () => { this.input.focus(); this.input.select(); }, "?": () => this.help.showModal(), d: () => this.theme(),
      t: tab("tokens"), c: tab("conversation"), b: tab("tree"), s: tab("group"),
      f: () => this.change({ view: "episodes", sort: state.sort === "-finished" ? "" : "-finished", id: "", run: "" }),
      Escape: () => { if (state.id) { this.change({ id: "", run: "" }); list.body.focus(); } else if (state.filter) this.change({ filter: "" }); },
    };
    this.views.forEach((name, place) => { anywhere[String(place + 1)] = () => this.change({ view: name, id: "", run: "" }); });
    if (event.target.closest?.("a, button, summary") && (event.key === "Enter" || event.key === " ")) return;
    const action = (lists && rows[event.key]) || anywhere[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  // -- the rest

  theme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* a page of a file may not keep it */ }
  }

  follow() {
    const refresh = later(250, async () => {
      const { runs } = await ask("state");
      if (runs.length !== this.facts.runs.length) location.reload(); // its address has all of its state
      this.facts.runs = runs;
      this.drawLive(true);
      await this.readSummary();
      if (this.state.view === "episodes") await this.list.refresh();
      else if (this.state.view !== "timeline") await this.showPane();
    });
    follow(() => {
      this.live.classList.add("pulse");
      setTimeout(() => this.live.classList.remove("pulse"), 900);
      refresh();
    }, (connected) => this.drawLive(connected));
  }

  drawLive(connected) {
    const writes = connected && this.facts.runs.some((run) => run.writes);
    this.live.dataset.connected = connected;
    this.live.classList.toggle("on", writes);
    this.live.title = writes ? "A run writes; the page follows it" : connected ? "" : "Start the command again";
    setText(this.live, writes ? "live" : connected ? "" : "no server");
  }
}

async function main() {
  start();
  try {
    const app = new App(await ask("state"));
    addEventListener("popstate", () => { app.state = readState(location.hash); app.show(); });
    addEventListener("keydown", (event) => app.key(event));
    await app.show();
    app.list.body.focus({ preventScroll: true });
    document.documentElement.dataset.ready = "true";
    await app.readSummary();
    app.follow();
  } catch (error) {
    fill(document.body, el("p", { class: "error" }, visible(error.message), " ", visible(error.hint ?? "")));
    throw error;
  }
}

main();

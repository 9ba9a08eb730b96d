// The list of episodes. Only the rows in sight are in the document; pages of rows come when they are needed.

import { ask } from "./backend.js";
import { el, fill, say, setText } from "./dom.js";
import { question, spoken } from "./conversation.js";
import { valueOf } from "./filter.js";
import { clock, count, number, reward, seconds, visible } from "./format.js";

const ROW = 28;
const PAGE = 100;
const EXTRA = 8;
const MAX_HEIGHT = 30_000_000; // browsers end at about 33 million pixels

const COLUMNS = [
  { key: "status", label: "Status", text: (row) => row.status ?? "–" },
  { key: "bar", label: "", draw: drawBar },
  { key: "reward", label: "Reward", sort: "reward", right: true, text: (row) => reward(row.reward) },
  { key: "task", label: "Task", sort: "task", right: true, wide: true, text: (row) => visible(row.task ?? "–") },
  { key: "member", label: "#", sort: "member", right: true, wide: true, text: (row) => number(row.member ?? row.sample) },
  { key: "version", label: "Version", sort: "version", right: true, wide: true, text: (row) => number(row.version) },
  { key: "turns", label: "Turns", sort: "turns", right: true, wide: true, text: (row) => number(row.turns) },
  { key: "tokens", label: "Tokens", sort: "tokens", right: true, wide: true, text: (row) => number(row.tokens) },
  { key: "took_s", label: "Time", sort: "took_s", right: true, wide: true, text: (row) => seconds(row.took_s) },
  { key: "sorted", label: "", right: true, text: () => "" },
  { key: "text", label: "Prompt and answer", draw: drawText },
  { key: "run", label: "Run", wide: true, several: true, text: (row) => visible(row.run) },
];

function drawBar(cell, row) {
  const share = Math.min(1, Math.max(0, row?.reward ?? 0));
  cell.firstChild.style.width = `${Math.round(share * 100)}%`;
}

function drawText(cell, row) {
  fill(cell, row && [
    row.cause ? el("span", { class: "cause-of", title: visible(row.cause) }, visible(row.cause)) : null,
    row.scope === "eval-rollout" ? el("span", { class: "badge" }, "evaluation") : null,
    row.stop.includes("length") ? el("span", { class: "badge", title: "The answer was cut off at its longest." }, "cut off") : null,
    el("span", { class: "asked" }, visible(question(row.prompt))),
    el("span", { class: "answered" }, visible(spoken(row.answer))),
  ]);
}

function drawSorted(key) {
  return (row) => {
    const value = valueOf(row, key);
    return typeof value !== "number" ? visible(value ?? "–") : key === "finished" ? clock(value) : key.endsWith("_s") ? seconds(value) : number(value);
  };
}

function classOf(column) {
  return `cell c-${column.key}${column.right ? " right" : ""}${column.wide ? " wide" : ""}`;
}

export class EpisodeList {
  constructor({ runs, onOpen, onSort, onRows, onTotal, onError }) {
    this.on = { open: onOpen, sort: onSort, rows: onRows, total: onTotal, error: onError };
    this.columns = COLUMNS.filter((column) => runs.length > 1 || !column.several).map((column) => ({ ...column }));
    this.sorted = this.columns.find((column) => column.key === "sorted");
    this.pages = new Map();
    this.waiting = new Set();
    this.total = 0;
    this.selected = 0;
    this.generation = 0;
    this.query = { filter: "", sort: "" };
    this.lines = [];
    this.head = el("div", { class: "list-head", role: "row" });
    this.space = el("div", { class: "list-space", role: "rowgroup" });
    this.body = el("div", { class: "list-body", role: "grid", tabindex: "0", "aria-label": "Episodes",
      scroll: () => this.draw(), click: (event) => this.click(event) }, this.space);
    this.empty = el("div", { class: "empty" }, "Loading…");
    this.node = el("div", { class: "list" }, this.head, this.body, this.empty);
    this.node.style.setProperty("--run", `${Math.max(...runs.map((run) => run.name.length), 0)}ch`);
    new ResizeObserver(() => {
      this.head.style.paddingRight = `${14 + this.body.offsetWidth - this.body.clientWidth}px`;
      this.draw();
    }).observe(this.body);
    this.drawHead();
  }

  /** Show the rows of a filter from the beginning. Return whether the filter is right. */
  async load(filter, sort, selected = null) {
    const generation = ++this.generation;
    this.abort?.abort();
    this.abort = new AbortController();
    let page;
    try {
      page = await ask("episodes", { filter, sort, offset: 0, limit: PAGE }, this.abort.signal);
    } catch (error) {
      if (error.name !== "AbortError" && generation === this.generation) this.on.error(error);
      return false;
    }
    if (generation !== this.generation) return false;
    this.query = { filter, sort };
    this.on.error(null);
    this.on.rows(page.rows);
    this.pages = new Map([[0, page.rows]]);
    this.waiting.clear();
    this.exact = page.total !== null;
    this.setTotal(page.total ?? page.rows.length + PAGE);
    this.selected = selected ? page.rows.findIndex((row) => row.run === selected.run && row.id === selected.id) : 0;
    this.body.scrollTop = 0;
    this.drawHead();
    this.reveal();
    say(count(this.total, "episode"));
    return true;
  }

  /** Read the rows in sight again, because the run has written more. */
  async refresh() {
    const generation = this.generation;
    const first = Math.floor(this.firstRow() / PAGE);
    try {
      const page = await ask("episodes", { ...this.query, offset: first * PAGE, limit: PAGE });
      if (generation !== this.generation) return;
      this.pages = new Map([[first, page.rows]]);
      this.waiting.clear();
      if (page.total !== null) this.setTotal(page.total);
      this.draw();
    } catch (error) {
      this.on.error(error);
    }
  }

  setTotal(total) {
    this.total = total;
    const height = Math.min(total * ROW, MAX_HEIGHT);
    this.space.style.height = `${height}px`;
    this.body.setAttribute("aria-rowcount", this.exact ? total : -1);
    this.empty.hidden = total > 0;
    setText(this.empty, "No episode matches. Esc empties the filter.");
    this.on.total(total, this.exact);
  }

  row(place) {
    return this.pages.get(Math.floor(place / PAGE))?.[place % PAGE] ?? null;
  }

  current() {
    return this.row(this.selected);
  }

  /** Return the pixels of rows that one pixel of the scroll bar stands for: 1 unless the rows are too many. */
  scale() {
    const [all, drawn] = [this.total * ROW, this.space.offsetHeight].map((height) => height - this.body.clientHeight);
    return drawn > 0 && all > drawn ? all / drawn : 1;
  }

  firstRow() {
    return Math.floor((this.body.scrollTop * this.scale()) / ROW);
  }

  /** Return the first row to draw and the one after the last: some more than can be seen. */
  rowsInSight() {
    const first = Math.max(0, this.firstRow() - EXTRA);
    return [first, Math.min(this.total, first + Math.ceil(this.body.clientHeight / ROW) + 2 * EXTRA)];
  }

  async fetchPage(page) {
    if (this.waiting.has(page) || this.pages.has(page)) return;
    this.waiting.add(page);
    const generation = this.generation;
    try {
      const found = await ask("episodes", { ...this.query, offset: page * PAGE, limit: PAGE, count: 0 });
      if (generation !== this.generation) return;
      this.pages.set(page, found.rows);
      if (this.pages.size > 60) this.pages.delete(this.pages.keys().next().value);
      if (!this.exact) {
        this.exact = found.total !== null;
        this.setTotal(found.total ?? Math.max(this.total, (page + 2) * PAGE));
      }
    } catch (error) {
      if (generation === this.generation) this.on.error(error);
    } finally {
      this.waiting.delete(page);
    }
    this.draw();
  }

  draw() {
    if (!this.body.clientHeight) return;
    const [first, last] = this.rowsInSight();
    while (this.lines.length < last - first) this.lines.push(this.newLine());
    const shift = this.body.scrollTop * (1 - this.scale());
    // A line keeps its row while it is in sight: scrolling by one row draws one row.
    const size = this.lines.length;
    this.lines.forEach((line, place) => {
      const rest = first % size;
      const row = first - rest + place + (place < rest ? size : 0);
      const shown = row < last;
      if (line.node.hidden === shown) line.node.hidden = !shown;
      if (shown) this.drawLine(line, row, shift);
    });
    for (const page of [first, last - 1].map((row) => Math.floor(row / PAGE))) {
      if (page >= 0 && last > first && !this.pages.has(page)) this.askSoon(page);
    }
  }

  /** Ask for a page unless it is scrolled out of sight at once. */
  askSoon(page) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      const [first, last] = this.rowsInSight();
      for (let page = Math.floor(first / PAGE); page * PAGE < last; page += 1) this.fetchPage(page);
    }, this.waiting.size ? 60 : 15);
  }

  newLine() {
    const cells = this.columns.map((column) =>
      el("span", { class: classOf(column), role: "gridcell" }, column.key === "bar" ? el("i", { class: "bar" }) : null),
    );
    const node = el("div", { class: "line", role: "row" }, cells);
    this.space.append(node);
    return { node, cells, row: null, place: -1 };
  }

  drawLine(line, place, shift) {
    const row = this.row(place);
    const top = place * ROW + shift;
    if (line.top !== top) line.node.style.transform = `translateY(${top}px)`;
    line.top = top;
    const selected = place === this.selected;
    if (line.selected !== selected) {
      line.selected = selected;
      line.node.setAttribute("aria-selected", String(selected));
    }
    if (line.place === place && line.row === row) return;
    line.place = place;
    line.row = row;
    line.node.id = `row-${place}`;
    line.node.setAttribute("aria-rowindex", place + 1);
    line.node.dataset.status = row?.status ?? "";
    this.columns.forEach((column, index) => {
      if (column.draw) column.draw(line.cells[index], row);
      else setText(line.cells[index], row ? column.text(row) : index ? "" : "…");
    });
  }

  drawHead() {
    const { sort } = this.query;
    const by = sort.replace(/^-/, "");
    const other = Boolean(by) && !this.columns.some((column) => column !== this.sorted && column.sort === by);
    Object.assign(this.sorted, { label: by, sort: other ? by : null, text: drawSorted(by) });
    this.node.classList.toggle("other", other);
    fill(this.head, this.columns.map((column) => {
      const key = column.sort;
      if (!key) return el("span", { class: classOf(column), role: "columnheader" }, column.label);
      const active = by === key || (!sort && key === "version");
      const down = sort === `-${key}` || !sort;
      const next = active && sort ? down : key === "reward" || key === "version";
      return el("button", { class: `${classOf(column)} sort`, role: "columnheader", title: `Sort by ${key}`,
        "aria-sort": active ? (down ? "descending" : "ascending") : "none",
        click: () => this.on.sort(next ? key : `-${key}`) }, column.label, active ? (down ? " ↓" : " ↑") : "");
    }));
  }

  click(event) {
    const node = event.target.closest(".line");
    const line = this.lines.find((each) => each.node === node);
    if (!line || !line.row) return;
    this.selected = line.place;
    this.draw();
    this.on.open(line.row);
  }

  /** Select another row; return it if it is known. */
  select(place) {
    this.selected = Math.max(0, Math.min(this.total - 1, place));
    this.reveal();
    return this.current();
  }

  reveal() {
    if (this.selected < 0) {
      this.draw(); // the open episode is further down
      return;
    }
    const [top, scale] = [this.selected * ROW, this.scale()];
    const lowest = top + ROW - this.body.clientHeight;
    if (top < this.body.scrollTop * scale) this.body.scrollTop = top / scale;
    else if (lowest > this.body.scrollTop * scale) this.body.scrollTop = lowest / scale;
    this.body.setAttribute("aria-activedescendant", `row-${this.selected}`);
    this.draw();
  }
}

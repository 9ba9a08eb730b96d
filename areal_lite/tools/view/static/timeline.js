// When episodes waited, called the model, and waited for the rest of their group; and what the trainer did meanwhile.

import { ask } from "./backend.js";
import { gist } from "./conversation.js";
import { el, fill, svg } from "./dom.js";
import { clock, count, number, reward, seconds, visible } from "./format.js";
import { ticks } from "./curves.js";
import { linkTo } from "./state.js";

const LANE = 11;
const LEFT = 64;
const HEAD = 46;
const SLOT = 5;
const LABEL = 14;

/** Return for each episode the lowest lane that is free from its start to its end. */
export function lanes(episodes) {
  const free = [];
  return episodes.map((each) => {
    let lane = free.findIndex((end) => end <= each.start + 1e-6);
    if (lane < 0) lane = free.length;
    free[lane] = each.end;
    return lane;
  });
}

/** Return by group the member whose last call ended last: the others waited for it. */
export function slowest(episodes) {
  const found = new Map();
  for (const each of episodes) {
    each.last = Math.max(each.start, ...each.calls.map(([begin, length]) => begin + length));
    const key = `${each.run} ${each.group}`;
    if (!found.has(key) || found.get(key).last < each.last) found.set(key, each);
  }
  return found;
}

/** Return the calls of each server with the slot that each took there; nothing if the dump names no servers. */
export function servers(episodes) {
  const found = new Map();
  episodes.forEach((each, place) => each.calls.forEach(([start, length, server]) => {
    if (!server) return;
    if (!found.has(server)) found.set(server, []);
    found.get(server).push({ start, end: start + length, place });
  }));
  return [...found].sort(([a], [b]) => (a < b ? -1 : 1)).map(([server, calls]) => {
    calls.sort((a, b) => a.start - b.start);
    const slots = lanes(calls);
    return { server, calls, slots, count: Math.max(...slots) + 1 };
  });
}

export async function timelineView(node, state, change) {
  const { episodes, steps, more } = await ask("timeline", { filter: state.filter });
  if (!episodes.length) {
    fill(node, el("div", { class: "page" }, el("h2", {}, "Timeline"), el("p", { class: "quiet" }, "No matching episode has times.")));
    return;
  }
  episodes.sort((a, b) => a.start - b.start || (a.group < b.group ? -1 : a.group > b.group ? 1 : a.member - b.member));
  const lane = lanes(episodes);
  const last = slowest(episodes);
  const whole = [Math.min(...episodes.map((each) => each.start)), Math.max(...episodes.map((each) => each.end))];
  let [from, to] = whole;
  const busy = servers(episodes);
  const below = busy.reduce((top, each) => top + LABEL + each.count * SLOT, HEAD);
  const height = below + (busy.length ? LABEL : 0) + (Math.max(...lane) + 1) * LANE + 8;
  const info = el("div", { class: "strip", role: "status" });
  const drawing = svg("svg", { class: "timeline", height, role: "img", "aria-label": "Episodes by time" });
  const box = el("div", { class: "timeline-box" }, drawing);
  const hint = () => fill(info, el("span", { class: "quiet" }, "Point at an episode. Drag to zoom, double-click to see all."));
  const statuses = [...new Set(episodes.map((each) => each.status ?? "–"))];
  const waiting = episodes.reduce((sum, each) => sum + Math.max(0, each.end - each.last), 0);
  const total = episodes.reduce((sum, each) => sum + each.end - each.start, 0);

  function draw() {
    const width = Math.max(400, box.clientWidth - 2);
    const x = (time) => LEFT + ((time - from) / (to - from || 1)) * (width - LEFT - 12);
    const rect = (name, begin, end, top, tall) => {
      const [left, right] = [Math.max(LEFT, x(begin)), Math.min(width - 12, x(end))];
      return right < LEFT || left > width - 12 || right < left ? null
        : svg("rect", { class: name, x: left.toFixed(1), y: top, width: Math.max(0.8, right - left).toFixed(1), height: tall });
    };
    drawing.setAttribute("width", width);
    fill(drawing,
      ticks(0, to - from, 8).map((time) => [
        svg("line", { class: "grid", x1: x(from + time), x2: x(from + time), y1: 14, y2: height }),
        svg("text", { x: x(from + time), y: 10, "text-anchor": "middle" }, `${number(time, 2)} s`)]),
      svg("text", { x: 4, y: 29 }, "Trainer"),
      steps.map((each) => {
        const begin = each.time - each.step_s;
        const wait = begin + (each.rollout_wait_s ?? 0);
        const load = each.time - (each.weight_update_s ?? 0);
        return [
          rect("t-wait", begin, wait, 20, 12), rect("t-train", wait, load, 20, 12), rect("t-load", load, each.time, 20, 12),
          each.time < from || each.time > to ? null : [
            svg("line", { class: "step", x1: x(each.time), x2: x(each.time), y1: 18, y2: height }),
            svg("text", { class: "step", x: x(each.time) + 3, y: 42 }, `v${each.step}`)],
        ];
      }),
      busy.map(({ server, calls, slots }, place) => {
        const top = busy.slice(0, place).reduce((sum, each) => sum + LABEL + each.count * SLOT, HEAD) + LABEL;
        return svg("g", { class: "server" },
          svg("text", { x: 4, y: top - 3 }, visible(server)),
          calls.map((call, nth) => svg("g", { class: "ep", "data-n": call.place, "data-status": episodes[call.place].status },
            rect("e-call", call.start, call.end, top + slots[nth] * SLOT, SLOT - 1))));
      }),
      svg("text", { x: 4, y: below + 9 }, "Episodes"),
      episodes.map((each, place) => {
        const top = below + (busy.length ? LABEL : 0) + lane[place] * LANE;
        const slow = last.get(`${each.run} ${each.group}`) === each && each.calls.length;
        return svg("g", { class: `ep${slow ? " slow" : ""}`, "data-n": place, "data-status": each.status },
          rect("e-life", each.start, each.end, top, LANE - 2),
          rect("e-tail", each.last, each.end, top, LANE - 2),
          each.calls.map(([begin, length]) => rect("e-call", begin, begin + length, top, LANE - 2)),
          each.calls.map(([begin, , , seen], call) => {
            const [before, took] = each.calls[call - 1] ?? [each.start, 0];
            const gap = seen ? rect("e-seen", before + took, begin, top, LANE - 2) : null;
            gap?.setAttribute("data-call", call);
            return gap;
          }));
      }),
      svg("rect", { class: "select", x: -9, y: 14, width: 0, height: height - 14 }));
  }

  const find = (event) => episodes[Number(event.target.closest?.("g[data-n]")?.dataset.n ?? -1)];
  drawing.addEventListener("mouseover", (event) => {
    const each = find(event);
    if (!each) return;
    const slow = last.get(`${each.run} ${each.group}`);
    const seen = each.calls[event.target.dataset.call]?.[3];
    const [what, text] = seen ? gist({ role: "environment", text: seen }) : [];
    const called = each.calls.reduce((sum, [, length]) => sum + length, 0);
    fill(info, el("b", {}, `Task ${visible(each.task)} #${number(each.member)}`),
      el("span", { class: "badge", "data-status": each.status }, each.status ?? "–"), el("span", {}, `reward ${reward(each.reward)}`),
      seen ? [el("b", {}, visible(what || "environment")), el("code", { class: "seen" }, visible(text))] : null,
      el("span", {}, `from ${clock(each.start)}`), el("span", {}, `queued ${seconds(each.start - each.queued)}`),
      el("span", {}, `${count(each.calls.length, "call")}, ${seconds(called)}`),
      each === slow ? el("span", {}, "the slowest of its group")
        : each.end - each.last > 0.005 ? el("span", {}, `then ${seconds(each.end - each.last)} until the group ended (slowest: #${number(slow.member)})`) : null);
  });
  let drag = null;
  const timeAt = (event) => from + ((event.clientX - drawing.getBoundingClientRect().left - LEFT) / (drawing.clientWidth - LEFT - 12)) * (to - from);
  drawing.addEventListener("mousedown", (event) => { drag = { x: event.clientX, time: timeAt(event) }; });
  drawing.addEventListener("mousemove", (event) => {
    if (!drag) return;
    const left = drawing.getBoundingClientRect().left;
    const select = drawing.querySelector(".select");
    select.setAttribute("x", Math.min(event.clientX, drag.x) - left);
    select.setAttribute("width", Math.abs(event.clientX - drag.x));
  });
  drawing.addEventListener("mouseup", (event) => {
    const begun = drag;
    drag = null;
    if (!begun) return;
    if (Math.abs(event.clientX - begun.x) > 4) {
      [from, to] = [begun.time, timeAt(event)].sort((a, b) => a - b);
      draw();
    } else {
      const each = find(event);
      if (each) location.hash = linkTo({ run: each.run, id: each.id });
    }
  });
  drawing.addEventListener("dblclick", () => { [from, to] = whole; draw(); });
  fill(node, el("div", { class: "page wide" },
    el("div", { class: "page-head" }, el("h2", {}, "Timeline"), info),
    el("p", { class: "quiet" },
      `${count(episodes.length, "episode")}${more ? " (the first that match; a filter such as version=4 shows others)" : ""} in ${count(Math.max(...lane) + 1, "slot")}, ${seconds(whole[1] - whole[0])}. ` +
      `${number((100 * waiting) / (total || 1), 1)} % of their time is after the last call: rewards, and waiting for the rest of the group.${busy.length ? "" : " The dump names no servers."}`),
    el("div", { class: "legend" },
      [...statuses.map((status) => ["e-call", `call, ${status}`, status]), ["e-call e-slowest", "of the slowest of a group"], ["e-seen", "tools, environment"], ["e-life", "agent"], ["e-tail", "after the last call"], ["t-wait", "trainer waits"], ["t-train", "trainer works"], ["t-load", "new weights"]].map(([name, label, status]) =>
        [svg("svg", { width: 18, height: 10, "data-status": status }, svg("rect", { class: name, width: 18, height: 10 })), el("span", {}, label)])),
    box));
  hint();
  draw();
  let width = box.clientWidth;
  new ResizeObserver(() => { if (box.isConnected && box.clientWidth !== width) { width = box.clientWidth; draw(); } }).observe(box);
}

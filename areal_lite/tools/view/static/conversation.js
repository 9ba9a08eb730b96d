// An episode as a conversation: its turns, tool calls, failure and programs.

import { el } from "./dom.js";
import { count, number, reward, seconds, visible } from "./format.js";

const LONG = 12_000;
const CHATML = /<\|im_start\|>([\w-]+)[ \t]*\n?([\s\S]*?)(?:<\|im_end\|>\n?|$)/g;
const TOOL_ONLY = /^\s*(<tool_response>[\s\S]*<\/tool_response>\s*)+$/;
const LLAMA = /<\|start_header_id\|>([\w-]+)<\|end_header_id\|>\n*([\s\S]*?)(?:<\|eot_id\|>|$)/g;
const PARTS = /<(tool_call|tool_response|think|tools)>([\s\S]*?)<\/\1>/g;
const TOOLS = /<(tools)>([\s\S]*?)<\/\1>/g; // all that a system prompt has: its calls are instructions
const ONLY_SPECIAL = /^\s*(<\|[^|<>\n]{1,48}\|>\s*)*$/;
const REPEATED = /(<[|\w-]{1,48}>)\1{3,}/g; // the placeholders of an image
const SPECIAL = /(<\|[^|<>\n]{1,48}\|>|<\/?s>)/;

/** Return the messages in a text that a chat template rendered; null if it has another form. */
export function messages(text) {
  for (const form of [CHATML, LLAMA]) {
    const found = [];
    let end = 0;
    for (const match of text.matchAll(form)) {
      const between = text.slice(end, match.index);
      if (between.trim()) found.push({ role: null, text: between });
      found.push({ role: match[1], text: match[2] });
      end = match.index + match[0].length;
    }
    if (end) {
      if (text.slice(end).trim()) found.push({ role: null, text: text.slice(end) });
      return found;
    }
  }
  return null;
}

function plain(text) {
  const shown = visible(text.length > LONG ? text.slice(0, LONG) : text);
  const node = el("pre", { class: "text" }, special(shown));
  if (text.length <= LONG) return node;
  const more = el("button", { class: "more", click: () => node.replaceChildren(...special(visible(text))) || more.remove() },
    `Show ${number(text.length - LONG)} more characters`);
  return el("div", {}, node, more);
}

/** Return the picture of an image among a turn's tokens. */
export function picture(image) {
  const name = `image ${image.sha256.slice(0, 12)}, ${count(image.length, "token")}`;
  if (!image.picture) return el("span", { class: "picture quiet" }, `${name}: its file is missing`);
  return el("img", { class: "picture", src: image.picture, alt: name, title: name });
}

function special(text) {
  return text.replace(REPEATED, (all, one) => `${one}×${number(all.length / one.length)} `).split(SPECIAL).filter(Boolean).map((part) =>
    SPECIAL.test(part) ? el("span", { class: "special" }, part) : document.createTextNode(part),
  );
}

/** Return the nodes of a message; tool calls, tool results and thoughts get a frame each. */
export function rich(text, role) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(role === "system" || role === "prompt" ? TOOLS : PARTS)) {
    const before = text.slice(end, match.index);
    if (before.trim()) nodes.push(plain(before.replace(/^\n+|\n+$/g, "")));
    nodes.push(framed(match[1], match[2].trim()));
    end = match.index + match[0].length;
  }
  const rest = text.slice(end);
  if (nodes.length) return ONLY_SPECIAL.test(rest) ? nodes : [...nodes, plain(rest.replace(/^\n+|\n+$/g, ""))];
  return [plain(role === "tool" || role === "environment" ? indented(text) : rest)];
}

function framed(kind, text) {
  if (kind === "think" || kind === "tools") {
    return el("details", { class: "frame" }, el("summary", {}, kind === "think" ? "Thinking" : "Tools", ` · ${count(text.length, "character")}`), plain(text));
  }
  let title = kind === "tool_call" ? "Tool call" : "Tool result";
  let body = indented(text);
  try {
    const call = JSON.parse(text);
    if (kind === "tool_call" && call.name) {
      title = `Tool call · ${visible(call.name)}`;
      body = JSON.stringify(call.arguments ?? call.parameters ?? {}, null, 1);
    }
  } catch {
    if (kind === "tool_call") title += " · not JSON";
  }
  return el("div", { class: `frame ${kind}` }, el("div", { class: "frame-title" }, title), plain(body));
}

/** Return JSON with an indent, and any other text as it is. */
function indented(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && value ? JSON.stringify(value, null, 1) : text;
  } catch {
    return text;
  }
}

/** Return a text as one line without special tokens and thoughts. */
export function spoken(text) {
  return (text ?? "").split("</think>").at(-1).split(SPECIAL).filter((part) => !SPECIAL.test(part)).join(" ").replace(/\s+/g, " ").trim();
}

/** Return what the last message of a prompt asks, as one line. */
export function question(prompt) {
  const asked = (messages(prompt ?? "") ?? []).filter((each) => each.role !== "assistant" && each.text.trim());
  return spoken(asked.at(-1)?.text ?? prompt);
}

/** Return the name of who wrote a turn: an agent, or the roles of its messages. */
export function speaker(turn) {
  if (turn.role === "assistant") return turn.agent && turn.agent !== "main" ? turn.agent : "assistant";
  return typeof turn.text === "string" ? [...new Set(turnMessages(turn).map((each) => each.role))].join(", ") : turn.role;
}

/** Return what a turn is, and its text as one line: a call, a tool's result, JSON, or what was said. */
export function gist(turn) {
  const text = typeof turn.text === "string" ? turnMessages(turn).map((each) => each.text.trim()).filter(Boolean).at(-1) ?? "" : "";
  const [, kind, inner] = [...text.matchAll(PARTS)].filter((each) => turn.role !== "prompt" && each[1].startsWith("tool_")).at(-1) ?? [];
  const body = (inner ?? text).trim();
  let value = null;
  try { value = JSON.parse(body); } catch { /* no JSON */ }
  if (kind === "tool_call") return [`calls ${value?.name ?? "a tool"}`, JSON.stringify(value?.arguments ?? value?.parameters ?? body)];
  const what = typeof value === "object" && value ? (Array.isArray(value) ? count(value.length, "entry", "entries") : `JSON of ${Object.keys(value).join(", ")}`) : "";
  return [[kind ? "tool result" : "", what].filter(Boolean).join(", "), spoken(body)];
}

function turnHead(turn, columns) {
  const trained = columns.mask?.reduce((sum, each) => sum + each, 0) ?? 0;
  const sampled = columns.logprob;
  const mean = sampled?.length ? sampled.reduce((sum, each) => sum + (each ?? 0), 0) / sampled.length : null;
  const versions = [...new Set(columns.version ?? [])].filter((each) => each !== null);
  const facts = [
    count(turn.ids?.length ?? 0, "token"),
    trained ? `${number(trained)} trained` : null,
    turn.stop_reason ? `stop: ${visible(turn.stop_reason)}` : null,
    turn.latency_s === null ? null : seconds(turn.latency_s),
    mean === null ? null : `mean log-prob ${number(mean, 2)}`,
    versions.length ? `version ${versions.join(", ")}` : null,
  ];
  return el("div", { class: "turn-facts" }, facts.filter(Boolean).map((fact) => el("span", {}, fact)));
}

function bubble(role, name, children) {
  return el("section", { class: "turn", "data-role": role, "aria-label": `${name ?? role}` },
    el("div", { class: "turn-role" }, visible(name ?? role)), el("div", { class: "turn-body" }, children));
}

/** Return the messages of a turn: what an answer is, or what a chat template rendered around it. */
export function turnMessages(turn) {
  const parts = turn.role === "assistant" ? null : messages(turn.text);
  if (!parts) return [{ role: turn.role, text: turn.text }];
  // The template ends with the beginning of the answer.
  const last = parts.at(-1);
  if (parts.length > 1 && last.role === "assistant" && !last.text.trim()) parts.pop();
  return parts.map(({ role, text }) => ({ role: TOOL_ONLY.test(text) ? "tool" : role ?? turn.role, text }));
}

export function conversation(episode, sequence) {
  const nodes = [failure(episode.facts)];
  for (const each of sequence.path) {
    const turn = episode.turns[each.turn];
    const columns = { ...turn.columns, ...each.columns };
    const head = turnHead(turn, columns);
    if (turn.text === null || turn.text === undefined) {
      nodes.push(bubble(turn.role, speaker(turn), [head, el("p", { class: "quiet" }, "No text: the run had no tokenizer. The token view has the ids.")]));
      continue;
    }
    turnMessages(turn).forEach((part, place) => {
      const name = turn.role === "assistant" ? speaker(turn) : part.role;
      nodes.push(bubble(turn.role, name, [place ? null : head, rich(part.text, part.role)]));
    });
    if (turn.images?.length) nodes.push(el("div", { class: "pictures" }, turn.images.map(picture)));
  }
  if (!sequence.path.length) nodes.push(el("p", { class: "quiet" }, "The episode ended before its first turn."));
  nodes.push(programs(episode.facts.processes));
  return el("div", { class: "conversation" }, nodes);
}

export function failure(facts) {
  if (!facts.error && !facts.error_kind) return null;
  const title = [facts.error_kind, facts.error_type].filter(Boolean).join(": ") || facts.status;
  return el("section", { class: "failure", "data-status": facts.status, "aria-label": "Why it was not accepted" },
    el("h3", {}, visible(title)), facts.error ? el("pre", { class: "text" }, visible(facts.error)) : null);
}

function programs(processes) {
  if (!processes?.length) return null;
  return el("section", { class: "programs", "aria-label": "Programs" },
    el("h3", {}, count(processes.length, "program")),
    processes.map((each) => {
      const failed = Boolean(each.timed_out || each.returncode);
      const how = each.timed_out ? "killed" : `exit status ${each.returncode}`;
      return el("details", { class: "frame", open: failed },
        el("summary", {}, el("code", {}, visible((each.command ?? []).join(" "))),
          el("span", { class: failed ? "bad" : "quiet" }, ` ${how} · ${seconds(each.seconds)}`)),
        ["stdout", "stderr"].filter((name) => each[name]).map((name) => [el("div", { class: "frame-title" }, name), plain(each[name])]));
    }));
}

export function rewardParts(facts) {
  const parts = [...Object.entries(facts.counts ?? {}), ...Object.entries(facts.reward_extra ?? {})];
  if (!parts.length) return null;
  const shown = (name, value) => typeof value !== "number" ? visible(String(value)) : name.startsWith("reward/") ? reward(value) : number(value);
  return el("span", { class: "parts" }, parts.map(([name, value]) =>
    el("span", {}, `${visible(name.replace(/^reward\//, ""))} `, el("b", {}, shown(name, value)))));
}

// Where the page's data comes from: the server, or the file itself if it was exported.

import { offlineTest, valueOf } from "./filter.js";

let inlined = null;

export class AskError extends Error {
  constructor(message, hint) {
    super(message);
    this.hint = hint;
  }
}

export function isExported() {
  return inlined !== null;
}

export function start() {
  const script = document.getElementById("data");
  inlined = script ? JSON.parse(script.textContent) : null;
}

let asked = 0;
let slow = 0;

/** Show the loading sign while an answer takes long. */
function waiting(change) {
  asked += change;
  clearTimeout(slow);
  if (asked) slow = setTimeout(() => { document.body.dataset.loading = ""; }, 200);
  else delete document.body.dataset.loading;
}

/** Return the answer to /api/NAME. */
export async function ask(name, parameters, signal) {
  waiting(1);
  try {
    return await answerTo(name, parameters, signal);
  } finally {
    waiting(-1);
  }
}

async function answerTo(name, parameters = {}, signal = undefined) {
  if (inlined) return offline[name] ? offline[name](parameters) : inlined[name];
  const query = new URLSearchParams(
    Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined),
  );
  let response;
  try {
    response = await fetch(`api/${name}?${query}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new AskError("The server does not answer.", "Start it again: areal-lite view RUN");
  }
  const answer = await response.json();
  if (!response.ok) throw new AskError(answer.error, answer.hint);
  return answer;
}

/** Call `changed` when the run has written something, and `connected` with whether the server is there. */
export function follow(changed, connected) {
  if (inlined) return;
  const source = new EventSource("api/changes");
  let seen = null;
  source.addEventListener("open", () => connected(true));
  source.addEventListener("error", () => connected(false));
  source.addEventListener("message", (event) => {
    if (seen !== null && event.data !== seen) changed();
    seen = event.data;
  });
}

function place(run, id) {
  const found = inlined.places[`${run} ${id}`];
  if (found === undefined) throw new AskError(`${id} of ${run} is not in this file.`, "Export it with another --filter.");
  return inlined.episodes[found];
}

function allText(row) {
  return Object.values(place(row.run, row.id).turns).map((turn) => turn.text ?? "").join("\n");
}

function select(filter) {
  try {
    return inlined.rows.filter(offlineTest(filter ?? "", inlined.state.keys, allText));
  } catch (error) {
    throw new AskError(error.message, "");
  }
}

/** Answers that depend on what is asked for. */
const offline = {
  episodes({ filter, sort, offset, limit }) {
    const rows = select(filter);
    const key = (sort || "").replace(/^-/, "");
    if (key) {
      const way = sort.startsWith("-") ? -1 : 1;
      const name = inlined.state.keys.find((each) => each.name === key || each.alias === key)?.name ?? key;
      rows.sort((a, b) => {
        const [one, two] = [valueOf(a, name), valueOf(b, name)];
        if (one === null || two === null) return (one === null) - (two === null);
        return one < two ? -way : one > two ? way : 0;
      });
    }
    return { rows: rows.slice(offset, offset + limit), total: rows.length };
  },
  episode: ({ run, id }) => place(run, id),
  texts: ({ run }) => inlined.texts[run],
  group: ({ run, group }) => inlined.groups[`${run} ${group}`] ?? { run, group, members: [] },
  timeline({ filter }) {
    const chosen = new Set(select(filter).map((row) => `${row.run} ${row.id}`));
    const episodes = inlined.timeline.episodes.filter((each) => chosen.has(`${each.run} ${each.id}`));
    return { ...inlined.timeline, episodes };
  },
  compare({ first, second }) {
    const found = inlined.compare[`${first} ${second}`];
    if (!found) throw new AskError("This file has no comparison of these runs.", "");
    return found;
  },
};

// What the page shows, as its address: #view?key=value. Values that are the default are left out.

export const DEFAULTS = {
  view: "episodes", filter: "", sort: "", run: "", id: "", tab: "conversation", color: "logprob", extra: "",
  first: "", second: "",
};

export function readState(hash) {
  const [view, query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const state = { ...DEFAULTS, view: view || DEFAULTS.view };
  for (const [name, value] of new URLSearchParams(query)) {
    if (name in DEFAULTS && name !== "view") state[name] = value;
  }
  return state;
}

export function writeState(state) {
  const query = new URLSearchParams();
  for (const name of Object.keys(DEFAULTS)) {
    if (name !== "view" && state[name] && state[name] !== DEFAULTS[name]) query.set(name, state[name]);
  }
  const text = query.toString();
  return `#${state.view}${text ? `?${text}` : ""}`;
}

/** Return a link to another state; what an episode or a view has for itself is not taken along. */
export function linkTo(change) {
  return writeState({ ...DEFAULTS, ...change });
}

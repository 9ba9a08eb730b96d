// Terms of filters, and the filters of an exported page, which has no server to ask.

export function quoted(value) {
  const text = String(value);
  return /^[\w.,:/+-]+$/.test(text) && !/^(none|null)$/.test(text)
    ? text
    : `"${text.replaceAll("\\", "\\\\").replaceAll('"', '\\"')}"`;
}

/** Return the value of the term KEY=VALUE in a filter, or null. */
export function termValue(filter, key) {
  const match = filter.match(new RegExp(`(?:^|\\s)${key}=([\\w-]+)(?=\\s|$)`));
  return match ? match[1] : null;
}

/** Return the filter with the term KEY=VALUE, and no other term of this form; null takes it away. */
export function withTerm(filter, key, value) {
  const rest = filter.replace(new RegExp(`(^|\\s)${key}=[\\w-]+(?=\\s|$)`, "g"), "$1").replace(/\s+/g, " ").trim();
  if (value === null) return rest;
  const whole = /(^|\s)or\s/.test(rest) ? `(${rest})` : rest;
  return `${whole} ${key}=${quoted(value)}`.trim();
}

/** Return a filter for what was typed: words without any operator search the texts. */
export function asFilter(typed) {
  const words = typed.trim();
  if (!words || /[=<>~()"]/.test(words)) return words;
  return `text~"(?i)${words.replace(/[.*+?^${}|[\]\\]/g, "\\$&").replace(/\s+/g, "\\s+")}"`;
}

/** Return what a row has for a key of filters and of the order. */
export function valueOf(row, name) {
  return row[name] ?? row.numbers?.[name] ?? null;
}

const TERM = /\s*([A-Za-z_][\w./-]*)\s*(<=|>=|!=|!~|==|=|<|>|~)\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|((?:\([^\s()]*\)|[^\s()"'])+))/gy;
const NUMERIC = {
  "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b, "=": (a, b) => a === b,
};

/** Return a test of rows for terms that are joined by spaces. */
export function offlineTest(filter, keys, textOf) {
  const tests = [];
  TERM.lastIndex = 0;
  while (filter.slice(TERM.lastIndex).trim()) {
    const begin = TERM.lastIndex;
    const match = TERM.exec(filter);
    const known = match && keys.find((each) => each.name === match[1] || each.alias === match[1]);
    const key = known ?? (match && /^(reward|counts)\//.test(match[1]) ? { name: match[1], kind: "number" } : null);
    if (!key) {
      throw new Error(
        `filter, at '${filter.slice(begin).trim().slice(0, 80)}': an exported page takes terms joined by spaces, ` +
        "such as status=failed reward<0.5",
      );
    }
    const escape = match[2].includes("~") ? /\\(["'])/g : /\\(["'\\])/g; // a regular expression keeps its backslashes
    const value = (match[3] ?? match[4])?.replace(escape, "$1") ?? match[5];
    tests.push(offlineTerm(key, match[2].replace("==", "="), value, textOf));
  }
  return (row) => tests.every((test) => test(row));
}

function offlineTerm(key, op, value, textOf) {
  if (op[0] === "!") {
    const test = offlineTerm(key, op.slice(1), value, textOf);
    return (row) => !test(row);
  }
  const found = key.name === "text" ? textOf : (row) => valueOf(row, key.name === "error" ? "cause" : key.name);
  if (value === "none" && op === "=") return (row) => found(row) === null || found(row)?.length === 0;
  if (op === "~") {
    const insensitive = value.startsWith("(?i)");
    const pattern = new RegExp(insensitive ? value.slice(4) : value, insensitive ? "i" : "");
    return (row) => [found(row)].flat().some((each) => each !== null && pattern.test(String(each)));
  }
  if (key.kind === "number") {
    const bound = Number(value);
    return (row) => found(row) !== null && NUMERIC[op](found(row), bound);
  }
  return (row) => [found(row)].flat().some((each) => each !== null && String(each) === value);
}

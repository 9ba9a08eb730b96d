// Values as text.

// Control characters except newline and tab, and marks that change the reading direction or cannot be seen.
const UNSAFE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** Return text with characters that cannot be seen written out, as in \u202e. */
export function visible(text) {
  return String(text).replace(UNSAFE, (each) => "\\u" + each.charCodeAt(0).toString(16).padStart(4, "0"));
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size !== 0 && (size < 10 ** -digits || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en-US", { maximumFractionDigits: size >= 100 ? 1 : digits });
}

export function reward(value) {
  return value === null || value === undefined ? "–" : Number.isInteger(value) ? value.toFixed(1) : number(value);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.9995) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 120) return `${minutes} min ${Math.round(value % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function clock(epoch) {
  if (epoch === null || epoch === undefined) return "–";
  const date = new Date(epoch * 1000);
  const two = (part) => String(part).padStart(2, "0");
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function count(value, one, many = `${one}s`) {
  return `${number(value)} ${value === 1 ? one : many}`;
}

// Numbers and times for people.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(count) {
  let number = Number(count), unit = 0;
  while (Math.abs(number) >= 1024 && unit < UNITS.length - 1) { number /= 1024; unit += 1; }
  return `${number >= 100 || unit === 0 || Number.isInteger(number) ? Math.round(number) : number.toFixed(1)} ${UNITS[unit]}`;
}

export const perSecond = (number) => `${bytes(number)}/s`;
// Steps of an axis are of this unit's kind.
bytes.base = perSecond.base = 1024;

export function count(number) {
  if (number >= 1e6) return `${(number / 1e6).toFixed(1)} M`;
  if (number >= 1e4) return `${(number / 1e3).toFixed(1)} k`;
  return number >= 100 || Number.isInteger(number) ? String(Math.round(number)) : number.toFixed(1);
}

export function seconds(time) {
  if (time >= 1) return `${time.toFixed(1)} s`;
  if (time >= 1e-3) return `${(time * 1e3).toFixed(time >= 0.1 ? 0 : 1)} ms`;
  return `${Math.round(time * 1e6)} µs`;
}

/** Milliseconds of a date of the API, as 20260102T03:04:05Z. */
export const dateOf = (text) => Date.parse(String(text).replace(/^(\d{4})(\d\d)(\d\d)T/, "$1-$2-$3T"));

export function when(text) {
  const at = dateOf(text);
  return at > 0 ? new Date(at).toLocaleString() : "–";
}

export const byName = (a, b) => (a.name_label || a.uuid).localeCompare(b.name_label || b.uuid, undefined, { numeric: true });
export const pluralOf = (number, one, many = `${one}s`) => `${number} ${number === 1 ? one : many}`;

// Numbers as people read them.
const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const showCount = (value) => Math.round(value).toLocaleString("en");

export const showNumber = (value) => (Math.abs(value) >= 1000 ? showCount(value) : plain.format(value));

export const showShare = (value) => `${plain.format(100 * value)} %`;

export function showSeconds(value) {
  if (value >= 3600) return `${plain.format(value / 3600)} h`;
  if (value >= 120) return `${plain.format(value / 60)} min`;
  if (value >= 1) return `${plain.format(value)} s`;
  if (value >= 1e-3) return `${plain.format(value * 1e3)} ms`;
  return value > 0 ? `${plain.format(value * 1e6)} µs` : "0 s";
}

export function showBytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) {
    value /= 1024;
    place += 1;
  }
  return `${plain.format(value)} ${units[place]}`;
}

const two = (value) => String(value).padStart(2, "0");

/** A moment: the time of day, or in a recording the time since its beginning. */
export function showMoment(at, virtual) {
  if (virtual) {
    const whole = Math.floor(at);
    const hours = whole >= 3600 ? `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}` : Math.floor(whole / 60);
    return `${hours}:${two(whole % 60)}`;
  }
  const date = new Date(1000 * at);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export const byName = new Intl.Collator("en", { numeric: true }).compare;

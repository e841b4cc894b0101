// Formats numbers for people. An unknown value is a dash.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });

const known = (format) => (n) => (n === null || n === undefined ? "–" : format(n));

export const count = known((n) => (n < 10000 ? whole.format(n) : short.format(n)));
export const rate = known((n) => (n < 9.95 && n !== 0 ? n.toFixed(1) : count(n)));
export const percent = known((n) => {
  const digits = n > 0.9995 || n < 0.0005 || n >= 0.1 ? 0 : 1;
  return `${(100 * n).toFixed(digits)}%`;
});

export const duration = known((seconds) => {
  if (seconds < 0.00995) return `${(1000 * seconds).toFixed(1)} ms`;
  return seconds < 0.995 ? `${(1000 * seconds).toFixed(0)} ms` : `${seconds.toFixed(1)} s`;
});

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; n >= 1024 && unit < units.length - 1; unit++) n /= 1024;
  return `${n < 10 && unit > 0 ? n.toFixed(1) : whole.format(n)} ${units[unit]}`;
}

export function age(seconds) {
  const [d, h, m] = [seconds / 86400, (seconds / 3600) % 24, (seconds / 60) % 60].map(Math.floor);
  return d ? `${d} d ${h} h` : h ? `${h} h ${m} min` : m ? `${m} min` : `${Math.floor(seconds)} s`;
}

/** Returns the time of day `secondsAgo` seconds ago. */
export const timeOfDay = (secondsAgo) => clock.format(Date.now() - 1000 * secondsAgo);

// A line chart over time without axes. The latest value is at the right edge, the highest value at the top.

import { svg } from "./dom.js";

export class Chart {
  /** A chart with this number of lines. The first line has an area below it. */
  constructor(lines) {
    this.node = svg("svg", { class: "chart", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.area = svg("path", { class: "area" });
    this.lines = Array.from({ length: lines }, (_, i) => svg("path", { class: `line line-${i}` }));
    this.cursor = svg("path", { class: "cursor" });
    this.node.append(this.area, ...this.lines.toReversed(), this.cursor);
  }

  /**
   * Draws `series`, each of at most `length` values, and a mark at the value with index `at`. Returns the highest
   * value of the first series.
   */
  draw(series, length, { top = null, at = null } = {}) {
    const known = series[0].filter((value) => value !== null);
    const highest = top ?? Math.max(...series.flat(), 1e-9);
    this.node.setAttribute("viewBox", `0 0 ${length - 1} 1`);
    series.forEach((values, i) => {
      const runs = points(values, length, highest);
      // A second line that is zero throughout would look like an axis.
      if (i > 0 && !values.some((value) => value > 0)) runs.length = 0;
      this.lines[i].setAttribute("d", runs.map((run) => `M${run.join("L")}`).join(""));
      if (i === 0) this.area.setAttribute("d", runs.map(below).join(""));
    });
    this.cursor.setAttribute("d", at === null ? "" : `M${at} 0V1`);
    return known.length ? Math.max(...known) : null;
  }
}

/** Returns the points of each run of known values. */
function points(values, length, highest) {
  const runs = [];
  let run = null;
  values.forEach((value, i) => {
    if (value === null) {
      run = null;
      return;
    }
    if (!run) runs.push((run = []));
    const y = 1 - 0.96 * Math.min(1, value / highest);
    run.push(`${length - values.length + i} ${y.toFixed(4)}`);
  });
  // A single point draws no line.
  for (const alone of runs) if (alone.length === 1) alone.push(alone[0].replace(/^\d+/, (x) => +x + 0.5));
  return runs;
}

function below(run) {
  const [first, last] = [run[0], run.at(-1)].map((point) => point.split(" ")[0]);
  return `M${first} 1L${run.join("L")}L${last} 1Z`;
}

// The totals over all workers, each with a chart of the last five minutes or the last hour.

import { Chart } from "./chart.js";
import { $, element, say } from "./dom.js";
import { RANGES } from "./history.js";
import { count, duration, percent, rate, timeOfDay } from "./numbers.js";

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

/** `lasts`: without new requests the last known value is shown, not a dash. */
const TILES = [
  {
    title: "Requests/s",
    figures: ["requests", "errors"],
    format: rate,
    detail: ({ requests: { answered } }) => {
      const all = `${count(sum(Object.values(answered)))} since the start`;
      return answered["4xx"] ? `${all}, ${count(answered["4xx"])} refused` : all;
    },
    alarm: (history) => {
      const errors = history.now("errors");
      return errors > 0 ? `${rate(errors)} errors/s` : null;
    },
  },
  {
    title: "Requests in flight",
    figures: ["running", "waiting"],
    format: count,
    detail: (_, history) => `${count(history.now("waiting"))} waiting`,
  },
  {
    title: "Output tokens/s",
    figures: ["output_tokens"],
    format: rate,
    detail: ({ workers }) => {
      const serving = workers.filter((worker) => worker.healthy).length;
      return `by ${count(serving)} ${serving === 1 ? "worker" : "workers"}`;
    },
  },
  {
    title: "Prompt tokens/s",
    figures: ["prompt_tokens"],
    format: rate,
    detail: ({ workers }) => `${count(sum(workers.map((w) => w.pending_tokens)))} to prefill`,
  },
  {
    title: "Time to first token",
    figures: ["first_token", "first_token_p99"],
    format: duration,
    lasts: true,
    detail: (_, history) => `99%: ${duration(history.lately("first_token_p99"))}`,
  },
  {
    title: "Time per output token",
    figures: ["pause"],
    format: duration,
    lasts: true,
    detail: (_, history) => {
      const pause = history.lately("pause");
      return pause ? `${rate(1 / pause)} tokens/s an answer` : "mean of all answers";
    },
  },
  {
    title: "KV cache in use",
    figures: ["kv_usage"],
    format: percent,
    top: 1,
    detail: ({ workers }) => {
      const highest = Math.max(...workers.map(({ engine }) => engine.kv_usage ?? -1));
      return highest < 0 ? "not told by the workers" : `fullest worker: ${percent(highest)}`;
    },
  },
  {
    title: "Prompt cache hits",
    figures: ["cached", "predicted"],
    format: percent,
    lasts: true,
    top: 1,
    detail: (_, history) => `${percent(history.lately("predicted"))} predicted`,
  },
];

export class Tiles {
  #at = null; // index of the value under the pointer, from the left edge

  constructor(draw) {
    for (const tile of TILES) {
      tile.chart = new Chart(tile.figures.length);
      tile.value = element("p", { className: "value" });
      tile.line = element("p", { className: "detail" });
      tile.highest = element("p", { className: "highest" });
      tile.node = element("article", { className: "tile" },
        element("h3", { text: tile.title }), tile.value, tile.line, tile.highest, tile.chart.node);
      tile.chart.node.addEventListener("pointermove", (event) => {
        const box = tile.chart.node.getBoundingClientRect();
        this.#at = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
        draw();
      });
      tile.chart.node.addEventListener("pointerleave", () => {
        this.#at = null;
        draw();
      });
      $("tiles").append(tile.node);
    }
  }

  show(stats, history, range) {
    const { period, length } = RANGES[range];
    const at = this.#at === null ? null : Math.round(this.#at * (length - 1));
    for (const tile of TILES) {
      const series = tile.figures.map((figure) => history.series(range, figure));
      const highest = tile.chart.draw(series, length, { top: tile.top, at });
      say(tile.highest, highest === null ? "" : `highest ${tile.format(highest)}`);
      const alarm = tile.alarm?.(history) ?? null;
      tile.node.classList.toggle("alarm", alarm !== null);
      if (at === null) {
        const read = tile.lasts ? "lately" : "now";
        value(tile, tile.format(history[read](tile.figures[0])));
        say(tile.line, alarm ?? tile.detail(stats, history));
      } else {
        const back = length - 1 - at;
        value(tile, tile.format(series[0].at(-1 - back) ?? null));
        say(tile.line, `at ${timeOfDay(back * period)}`);
      }
    }
  }
}

/** Returns the number in large type and its unit in small type. */
function value({ value }, text) {
  if (value.textContent === text) return;
  const [number, unit = ""] = text.split(" ");
  value.replaceChildren(number, element("span", { className: "unit", text: unit && ` ${unit}` }));
}

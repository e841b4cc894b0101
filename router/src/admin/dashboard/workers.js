// The table of workers, unhealthy workers first. On a narrow screen each row is a card.

import { Chart } from "./chart.js";
import { $, element, say } from "./dom.js";
import { RANGES } from "./history.js";
import { age, count, duration, percent, rate, timeOfDay } from "./numbers.js";

/** Seconds after which a worker that is still starting is shown as an error. */
const STARTS_WITHIN_S = 600;

/** Returns the state of a worker in words, and its severity. */
export function condition({ phase, healthy, breaker, trouble }) {
  if (phase === "down") return ["down", "bad"];
  if (phase === "suspect") return ["out of rotation", "warn"];
  if (phase === "starting") {
    return trouble?.for_s > STARTS_WITHIN_S ? ["not up yet", "bad"] : ["starting", "warn"];
  }
  if (!healthy) return ["not ready", "warn"];
  if (breaker === "open") return ["circuit breaker open", "bad"];
  if (breaker === "half_open") return ["circuit breaker half-open: one request on trial", "warn"];
  return ["serving", "good"];
}

function why({ trouble, requests }) {
  const reason = trouble.reason.replace(/ \(os error \d+\)/, "");
  const since = `since ${timeOfDay(trouble.for_s)} (${age(trouble.for_s)})`;
  const plural = requests === 1 ? "request" : "requests";
  const left = requests ? `, with ${count(requests)} ${plural} still on it` : "";
  return `${reason}, ${since}${left}`;
}

class Row {
  constructor(worker) {
    const replica = worker.dp_rank === null ? worker.url : `${worker.url}@${worker.dp_rank}`;
    this.name = element("strong", { text: replica.replace(/^http:\/\//, ""), title: replica });
    this.state = element("span", { className: "dot" });
    this.reason = cell("Reason", "reason");
    this.output = element("span");
    this.chart = new Chart(1);
    this.meter = element("meter", { min: 0, max: 1, high: 0.9, optimum: 0.5, "aria-label": "KV cache in use" });
    this.usage = element("span");
    this.numbers = {};
    const number = (key, label) => (this.numbers[key] = cell(label, "number"));
    this.figures = [
      number("running", "Running"),
      number("waiting", "Waiting"),
      cell("Output tokens/s", "number spark", this.chart.node, this.output),
      number("prompt", "Prompt tokens/s"),
      number("first", "TTFT"),
      number("pause", "TPOT"),
      number("hits", "Cache hits"),
      cell("KV cache", "usage", this.meter, this.usage),
    ];
    this.reason.colSpan = this.figures.length;
    const name = cell("Worker", "name", this.name, this.state);
    this.node = element("tr", { role: "row" }, name, ...this.figures, this.reason);
  }

  show(worker, models, history, range) {
    const { id, engine } = worker;
    const [words, tone] = condition(worker);
    this.node.className = tone;
    this.state.className = `dot ${tone}`;
    say(this.state, models ? `${words} · ${models}` : words);
    // A worker without requests shows the reason in place of its figures.
    this.reason.hidden = !worker.trouble;
    for (const cell of this.figures) cell.hidden = !this.reason.hidden;
    say(this.reason, worker.trouble ? why(worker) : "");
    // For an engine that does not report its queue, all requests of the router count as running.
    say(this.numbers.running, count(engine.running ?? worker.requests));
    say(this.numbers.waiting, count(engine.waiting));
    say(this.output, rate(history.now("output_tokens", id)));
    say(this.numbers.prompt, rate(history.now("prompt_tokens", id)));
    say(this.numbers.first, duration(history.lately("first_token", id)));
    say(this.numbers.pause, duration(history.lately("pause", id)));
    say(this.numbers.hits, percent(history.lately("cached", id)));
    this.chart.draw([history.series(range, "output_tokens", id)], RANGES[range].length);
    this.meter.hidden = engine.kv_usage === null;
    this.meter.value = engine.kv_usage ?? 0;
    say(this.usage, usage(worker));
  }
}

function usage({ engine, max_total_num_tokens: capacity }) {
  if (engine.kv_usage === null) return "–";
  return percent(engine.kv_usage) + (capacity ? ` of ${count(capacity)}` : "");
}

/** The label is shown on cards, which have no column headings. */
function cell(label, className, ...children) {
  return element("td", { role: "cell", className, "data-label": label }, ...children);
}

export class Workers {
  #rows = new Map();

  show(registered, history, range) {
    const isBad = (worker) => (condition(worker)[1] === "bad" ? 1 : 0);
    const workers = registered.toSorted((one, other) => isBad(other) - isBad(one));
    const before = this.#rows;
    this.#rows = new Map(workers.map((worker) => [worker.id, before.get(worker.id) ?? new Row(worker)]));
    const nodes = [...this.#rows.values()].map((row) => row.node);
    if (nodes.some((node, i) => $("workers").children[i] !== node) || before.size !== nodes.length) {
      $("workers").replaceChildren(...nodes);
    }
    // Model names without their organization.
    const short = (name) => name.split("/").at(-1);
    const models = workers.map((worker) => worker.models.map(short).join(", "));
    const isMixed = new Set(models.filter(Boolean)).size > 1;
    workers.forEach((worker, i) => {
      this.#rows.get(worker.id).show(worker, isMixed ? models[i] : "", history, range);
    });
    $("nobody").hidden = workers.length > 0;
  }
}

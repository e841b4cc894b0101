// Draws what `/dashboard/events` says, once a second. Whatever comes from outside (addresses, names of
// models, answers) becomes text and never markup.

const HISTORY = 120;      // seconds that a sparkline shows
const RATE_WINDOW = 10;   // seconds over which a rate is taken
const SHARE_WINDOW = 60;  // and hit rates and percentiles, which need more to be steady
const STEPS = [1, 1.5, 2, 3, 5, 7, 10];  // bounds of the histograms in each decade

const $ = (id) => document.getElementById(id);
const history = [];

function element(name, { className = "", text = "" } = {}, ...children) {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  made.append(...children);
  return made;
}

// ---- numbers ------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

const count = (n) => (n < 10000 ? whole.format(n) : short.format(n));
const rate = (n) => (n === null ? "–" : n < 10 ? n.toFixed(1) : count(n));
const percent = (n) => (n === null ? "–" : `${(100 * n).toFixed(n > 0.995 || n === 0 ? 0 : 1)}%`);

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; n >= 1024 && unit < units.length - 1; unit++) n /= 1024;
  return `${n < 10 && unit > 0 ? n.toFixed(1) : whole.format(n)} ${units[unit]}`;
}

/** A number and its unit. */
function duration(seconds) {
  if (seconds === null) return ["–", ""];
  if (seconds < 0.0995) return [(1000 * seconds).toFixed(seconds < 0.00995 ? 1 : 0), "ms"];
  return seconds < 0.995 ? [(1000 * seconds).toFixed(0), "ms"] : [seconds.toFixed(1), "s"];
}

function age(seconds) {
  const [d, h, m] = [seconds / 86400, (seconds / 3600) % 24, (seconds / 60) % 60].map(Math.floor);
  return d ? `${d} d ${h} h` : h ? `${h} h ${m} min` : m ? `${m} min` : `${Math.floor(seconds)} s`;
}

/** The statistics `seconds` before those at `index`, or the oldest there are. */
const before = (index, seconds) => history[Math.max(0, index - seconds)];

function perSecond(index, read) {
  const [now, then] = [history[index], before(index, RATE_WINDOW)];
  const time = now.uptime_s - then.uptime_s;
  return time > 0 ? Math.max(0, read(now) - read(then)) / time : null;
}

function share(index, part, of) {
  const [now, then] = [history[index], before(index, SHARE_WINDOW)];
  const all = of(now) - of(then);
  return all > 0 ? Math.max(0, part(now) - part(then)) / all : null;
}

/** Below what `q` of the first bytes of the last minute came, in seconds. */
function percentile(index, q) {
  const [now, then] = [history[index].first_byte, before(index, SHARE_WINDOW).first_byte];
  const old = (bound) => then.buckets.findLast(([b]) => b <= bound)?.[1] ?? 0;
  const rank = q * (now.count - then.count);
  if (rank <= 0) return null;
  let lower = 0;
  for (const [bound, upTo] of now.buckets) {
    const inside = upTo - old(bound);
    if (inside >= rank) {
      const floor = lowerBound(bound);
      return floor + (bound - floor) * Math.min(1, (rank - lower) / (inside - lower));
    }
    lower = inside;
  }
  return now.buckets.at(-1)[0];
}

function lowerBound(bound) {
  const decade = 10 ** Math.floor(Math.log10(bound * 1.0001));
  const step = bound / decade;
  return decade * (STEPS.findLast((s) => s < step * 0.999) ?? 0.7);
}

// ---- tiles --------------------------------------------------------------------------------------

const served = (s) => Object.values(s.requests.answered).reduce((a, b) => a + b, 0);
const failed = (s) => s.requests.answered["5xx"] + s.requests.upstream_errors;

const TILES = [
  {
    title: "Requests per second",
    line: (i) => perSecond(i, served),
    show: (now, i) => [rate(perSecond(i, served)), "", `${count(served(now))} since the start`],
  },
  {
    title: "In flight",
    line: (i) => history[i].requests.in_flight,
    show: ({ requests, workers }) => {
      const pending = workers.reduce((sum, worker) => sum + worker.pending_tokens, 0);
      const waiting = requests.waiting ? `${count(requests.waiting)} waiting, ` : "";
      return [count(requests.in_flight), "", `${waiting}${count(pending)} tokens to prefill`];
    },
  },
  {
    title: "Time to first byte",
    line: (i) => percentile(i, 0.5),
    second: (i) => percentile(i, 0.99),
    show: (_, i) => [...duration(percentile(i, 0.5)), `99%: ${duration(percentile(i, 0.99)).join(" ")}`],
  },
  {
    title: "Prompt cache hits",
    line: (i) => share(i, (s) => s.tokens.cached, (s) => s.tokens.prompt),
    second: (i) => share(i, (s) => s.tokens.predicted, (s) => s.tokens.prompt),
    top: 1,
    show: (_, i) => {
      const of = (part) => percent(share(i, part, (s) => s.tokens.prompt));
      return [of((s) => s.tokens.cached), "", `${of((s) => s.tokens.predicted)} predicted`];
    },
  },
  {
    title: "Errors per second",
    line: (i) => perSecond(i, failed),
    show: ({ requests }, i) => [
      rate(perSecond(i, failed)),
      "",
      `${count(requests.answered["5xx"])} sent, ${count(requests.retries)} retried`,
    ],
  },
  {
    title: "Prefix tree",
    line: (i) => history[i].tree.blocks,
    show: ({ tree, process }) => [
      count(tree.blocks),
      "blocks",
      `${bytes(tree.bytes)} of ${bytes(process.resident_bytes)}`,
    ],
  },
];

for (const tile of TILES) {
  tile.value = element("span");
  tile.unit = element("span", { className: "unit" });
  tile.detail = element("div", { className: "detail" });
  tile.chart = svg("svg", { class: "spark", viewBox: `0 0 ${HISTORY - 1} 1`, preserveAspectRatio: "none" });
  tile.lines = [tile.second && "second", "first"].filter(Boolean).map((name) => svg("polyline", { class: name }));
  tile.chart.append(...tile.lines);
  const value = element("div", { className: "value" }, tile.value, tile.unit);
  $("tiles").append(
    element("div", { className: "tile" }, element("h3", { text: tile.title }), value, tile.detail, tile.chart),
  );
}

function svg(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** New points, oldest first; the latest is at the right edge. */
function draw(tile) {
  const indexes = history.map((_, i) => i).slice(-HISTORY);
  const series = [tile.second, tile.line].filter(Boolean).map((read) => indexes.map(read));
  const top = tile.top ?? Math.max(...series.flat().map((value) => value ?? 0), 1e-9);
  series.forEach((values, i) => {
    const from = HISTORY - values.length;
    const points = values.map((value, x) => `${from + x},${1 - (value ?? 0) / top}`);
    tile.lines[i].setAttribute("points", points.join(" "));
  });
}

// ---- workers ------------------------------------------------------------------------------------

const TONES = { healthy: "good", starting: "", suspect: "warn", down: "bad" };

function row(worker, index) {
  const mine = (stats) => stats.workers.find((other) => other.id === worker.id);
  const sent = (stats) => Object.values(mine(stats)?.selections ?? {}).reduce((a, b) => a + b, 0);
  const hits = (name) =>
    share(index, (s) => mine(s)?.tokens[name] ?? 0, (s) => mine(s)?.tokens.prompt ?? 0);
  const open = worker.breaker !== "closed";
  const state = worker.phase === "healthy" ? (open ? `breaker ${worker.breaker.replace("_", " ")}` : "") : worker.phase;
  const name = element("td", { className: `dot ${open ? "warn" : TONES[worker.phase]}` },
    element("span", { text: worker.url }), element("small", { text: state }));
  name.title = worker.models.join(", ");
  const number = (text) => element("td", { className: "number", text });
  const all = history[index].tree.held;
  const meter = element("meter");
  meter.value = all ? worker.tree_blocks / all : 0;
  return element("tr", {}, name,
    number(count(worker.requests)),
    number(rate(perSecond(index, sent))),
    number(count(worker.pending_tokens)),
    number(percent(hits("cached"))),
    number(percent(hits("predicted"))),
    element("td", {}, meter, `${count(worker.tree_blocks)} blocks`));
}

// ---- the page -----------------------------------------------------------------------------------

function show(stats) {
  if (history.length && stats.uptime_s < history.at(-1).uptime_s) history.length = 0; // restarted
  history.push(stats);
  if (history.length > HISTORY + SHARE_WINDOW) history.shift();
  const index = history.length - 1;
  for (const tile of TILES) {
    [tile.value.textContent, tile.unit.textContent, tile.detail.textContent] = tile.show(stats, index);
    draw(tile);
  }
  $("workers").replaceChildren(...stats.workers.map((worker) => row(worker, index)));
  $("nobody").hidden = stats.workers.length > 0;
  $("about").textContent = `${stats.version} · ${stats.policy} · up ${age(stats.uptime_s)}`;
  const healthy = stats.workers.filter((worker) => worker.healthy).length;
  if (stats.draining) state("draining", "warn");
  else if (!healthy) state("no healthy worker", "bad");
  else if (healthy < stats.workers.length) state(`${healthy} of ${stats.workers.length} workers`, "warn");
  else state("serving", "good");
  offer([...new Set(stats.workers.flatMap((worker) => worker.models))].sort());
}

function state(text, tone) {
  $("state").textContent = text;
  $("state").className = `pill ${tone}`;
}

function bearer(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** The data of the events of a response, as they come. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});  // fails if the stream has failed before
  }
}

async function watch() {
  for (;;) {
    try {
      const key = sessionStorage.getItem("admin-key");
      const response = await fetch("/dashboard/events", { headers: bearer(key) });
      const locked = response.status === 401 || response.status === 403;
      $("unlock").hidden = !locked;
      document.querySelector("main").hidden = locked;
      if (locked) {
        $("refused").hidden = key === null;
        return state("locked", "warn");
      }
      if (!response.ok) throw new Error(response.statusText);
      for await (const data of events(response)) show(JSON.parse(data));
    } catch (error) {
      console.warn(error);
    }
    state("no connection", "bad");
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("admin-key", $("admin-key").value);
  watch();
});

// ---- the chat box -------------------------------------------------------------------------------

const talk = [];
let answering = null;

function offer(models) {
  const select = $("model");
  if (models.join() === [...select.options].map((option) => option.value).join()) return;
  const chosen = select.value;
  select.replaceChildren(...models.map((model) => new Option(model, model)));
  if (models.includes(chosen)) select.value = chosen;
  select.hidden = models.length < 2;
}

function say(role, text) {
  const paragraph = element("p", { text });
  const footer = element("footer");
  $("talk").append(element("article", { className: role }, paragraph, footer));
  scroll();
  return { paragraph, footer };
}

function scroll() {
  $("talk").scrollTop = $("talk").scrollHeight;
}

async function answer(paragraph, footer, signal) {
  const sent = performance.now();
  const request = { messages: talk, stream: true, stream_options: { include_usage: true } };
  request.max_tokens = $("limit").valueAsNumber || 512;
  if ($("model").value) request.model = $("model").value;
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "content-type": "application/json", ...bearer(sessionStorage.getItem("client-key")) },
    body: JSON.stringify(request),
  });
  if (response.status === 401) $("client-key-row").hidden = false;
  if (!response.ok) {
    const said = await response.json().catch(() => null);
    throw new Error(said?.error?.message ?? `status ${response.status}`);
  }
  let first = null;
  let usage = null;
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage ?? usage;
    const text = chunk.choices?.[0]?.delta?.content;
    if (!text) continue;
    first ??= performance.now();
    paragraph.textContent += text;
    scroll();
  }
  footer.textContent = summary(sent, first, usage);
}

function summary(sent, first, usage) {
  const parts = [];
  if (first !== null) parts.push(`first token after ${duration((first - sent) / 1000).join(" ")}`);
  if (usage) {
    const time = (performance.now() - first) / 1000;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${usage.completion_tokens} tokens`);
    if (usage.completion_tokens > 1 && time > 0) {
      parts.push(`${rate((usage.completion_tokens - 1) / time)} per second`);
    }
    parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  }
  return parts.join(" · ");
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (answering) return answering.abort();
  if ($("client-key").value) sessionStorage.setItem("client-key", $("client-key").value);
  const text = $("message").value;
  say("user", text);
  talk.push({ role: "user", content: text });
  const { paragraph, footer } = say("assistant", "");
  answering = new AbortController();
  $("send").textContent = "Stop";
  $("message").required = false;
  $("message").value = "";
  try {
    await answer(paragraph, footer, answering.signal);
  } catch (error) {
    const stopped = error.name === "AbortError";
    footer.textContent = stopped ? "stopped" : error.message;
    footer.className = stopped ? "" : "bad";
  }
  // What was not answered is not part of the conversation: it can be asked again.
  if (paragraph.textContent) talk.push({ role: "assistant", content: paragraph.textContent });
  else talk.pop();
  answering = null;
  $("send").textContent = "Send";
  $("message").required = true;
  $("message").focus();
  scroll();
});

$("clear").addEventListener("click", () => {
  answering?.abort();
  talk.length = 0;
  $("talk").replaceChildren();
});

watch();

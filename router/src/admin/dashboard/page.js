// Draws the events of `/dashboard/events`, one a second.

import { offerModels } from "./chat.js";
import { $, say } from "./dom.js";
import { History } from "./history.js";
import { age, bytes, count } from "./numbers.js";
import { adminKey, events, figures, keepAdminKey } from "./server.js";
import { Tiles } from "./tiles.js";
import { condition, Workers } from "./workers.js";

const history = new History();
const tiles = new Tiles(() => latest && draw(latest));
const workers = new Workers();
let latest = null; // statistics

function draw(stats) {
  const range = document.querySelector("#range input:checked").value;
  tiles.show(stats, history, range);
  workers.show(stats.workers, history, range);
  const models = [...new Set(stats.workers.flatMap((worker) => worker.models))].sort();
  const about = [models.join(", "), `${stats.policy} policy`, `up ${age(stats.uptime_s)}`];
  say($("about"), about.filter(Boolean).join(" · "));
  say($("router"), [
    `mla-router ${stats.version}`,
    `prefix tree: ${count(stats.tree.blocks)} blocks, ${bytes(stats.tree.bytes)}`,
    `memory: ${bytes(stats.process.resident_bytes)}`,
  ].join(" · "));
  summarize(stats);
  offerModels(models);
}

function summarize({ draining, workers: all }) {
  const bad = all.filter((worker) => condition(worker)[1] === "bad").length;
  const serving = all.filter((worker) => condition(worker)[0] === "serving").length;
  const workers = all.length === 1 ? "worker" : "workers";
  if (draining) state("draining", "warn");
  else if (!all.length) state("no workers", "bad");
  else if (bad) state(`${bad} of ${all.length} ${workers} not serving`, "bad");
  else if (serving < all.length) state(`${serving} of ${all.length} ${workers} serving`, "warn");
  else state("serving", "good");
}

function state(text, tone) {
  say($("state"), text);
  $("state").className = `pill ${tone}`;
  document.title = tone === "good" || tone === "" ? "mla-router" : `${text} · mla-router`;
}

async function watch() {
  for (;;) {
    try {
      const key = adminKey();
      const response = await figures();
      const locked = response.status === 401 || response.status === 403;
      $("unlock").hidden = !locked;
      for (const node of document.querySelectorAll("main, #range, #jump, #wall")) node.hidden = locked;
      if (locked) {
        $("refused").hidden = key === null;
        $("admin-key").focus();
        return state("locked", "");
      }
      if (!response.ok) throw new Error(response.statusText);
      let isFirst = true;
      for await (const data of events(response)) {
        const event = JSON.parse(data);
        history.take(event.history, isFirst);
        isFirst = false;
        latest = event.stats;
        draw(latest);
      }
    } catch (error) {
      console.warn(error);
    }
    state("no connection to the router", "bad");
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

/** Wall mode hides the chat, for a screen without a keyboard: `/dashboard#wall`. */
function fitWall() {
  const isWall = location.hash === "#wall";
  document.body.classList.toggle("wall", isWall);
  say($("wall"), isWall ? "Show chat" : "Hide chat");
}

$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  keepAdminKey($("admin-key").value);
  watch();
});
$("range").addEventListener("change", () => latest && draw(latest));
$("wall").addEventListener("click", () => {
  location.hash = location.hash === "#wall" ? "" : "wall";
});
addEventListener("hashchange", fitWall);

fitWall();
watch();

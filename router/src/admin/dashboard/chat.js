// The chat: a conversation with the model through the router, as for any client. It is kept in the session storage of
// the tab and survives a reload.

import { $, element, say } from "./dom.js";
import { render } from "./markdown.js";
import { duration, rate } from "./numbers.js";
import { offerPictures, picture, setPictures, takePictures } from "./pictures.js";
import { complete, events, keepClientKey } from "./server.js";

/** Time between two redraws of an answer that is streaming. */
const DRAW_EVERY_MS = 60;

/** On touch screens, which have no Shift key, Enter starts a new line. */
const isTouch = matchMedia("(pointer: coarse)").matches;

const stored = () => JSON.parse(sessionStorage.getItem("talk") ?? "[]");
const talk = stored(); // role, content, and for an answer its note
let answering = null;

export function offerModels(models) {
  const select = $("model");
  if (models.join() === [...select.options].map((option) => option.value).join()) return;
  offerPictures(models);
  const chosen = select.value;
  select.replaceChildren(...models.map((model) => new Option(model, model)));
  if (models.includes(chosen)) select.value = chosen;
  select.hidden = models.length < 2;
}

/** A message in the conversation. */
class Bubble {
  #timer = null;

  constructor(role) {
    this.body = element("div", { className: "body" });
    this.note = element("footer");
    const who = element("h3", { className: "unseen", text: role === "user" ? "You" : "Model" });
    this.node = element("article", { className: role }, who, this.body, this.note);
    this.text = "";
    $("talk").append(this.node);
    stick(true);
  }

  think(text) {
    if (!this.thought) {
      this.thought = element("p");
      const title = element("summary", { text: "Thinking" });
      this.body.before(element("details", { className: "thinking" }, title, this.thought));
    }
    this.thought.append(text);
    stick();
  }

  write(text) {
    this.text += text;
    this.#timer ??= setTimeout(() => this.draw(), DRAW_EVERY_MS);
  }

  draw() {
    clearTimeout(this.#timer);
    this.#timer = null;
    const follows = isAtEnd();
    this.body.replaceChildren(...render(this.text));
    stick(follows);
  }

  close(note, isError = false) {
    this.draw();
    say(this.note, note);
    this.note.className = isError ? "bad" : "";
    stick();
  }
}

const isAtEnd = () => $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 80;

/** Scrolls to the end, unless the user has scrolled up. */
function stick(follows = isAtEnd()) {
  if (follows) $("talk").scrollTop = $("talk").scrollHeight;
}

function keep() {
  try {
    sessionStorage.setItem("talk", JSON.stringify(talk));
  } catch {
    sessionStorage.removeItem("talk"); // larger than the session storage
  }
}

function show({ role, content, note = "" }) {
  const bubble = new Bubble(role);
  if (role === "user") {
    const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
    bubble.body.replaceChildren(
      ...parts.map(({ text, image_url: image }) => image ? picture(image.url, "Picture") : text),
    );
  } else {
    bubble.text = content;
    bubble.close(note);
  }
  return bubble;
}

/** Streams the answer to the conversation. Returns its note: latency, tokens, rate. */
async function answer(bubble, signal) {
  const sent = performance.now();
  const messages = talk.map(({ role, content }) => ({ role, content }));
  const request = { messages, stream: true, stream_options: { include_usage: true } };
  request.max_tokens = $("limit").valueAsNumber || 512;
  if ($("model").value) request.model = $("model").value;
  const response = await complete(request, signal);
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
    const { content, reasoning_content: thought } = chunk.choices?.[0]?.delta ?? {};
    if (content || thought) first ??= performance.now();
    if (thought) bubble.think(thought);
    if (content) bubble.write(content);
  }
  return summary(sent, first, usage);
}

function summary(sent, first, usage) {
  const parts = [];
  if (first !== null) parts.push(`first token after ${duration((first - sent) / 1000)}`);
  if (usage) {
    const time = (performance.now() - first) / 1000;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const tokens = usage.completion_tokens;
    parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
    if (first !== null && tokens > 1 && time > 0) parts.push(`${rate((tokens - 1) / time)} per second`);
    parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  }
  return parts.join(" · ");
}

/** The content of a message; pictures come first, as the models' chat templates have them. */
function contentOf(text, pictures) {
  if (!pictures.length) return text;
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

async function ask(text, pictures) {
  talk.push({ role: "user", content: contentOf(text, pictures) });
  const question = show(talk.at(-1));
  const bubble = new Bubble("assistant");
  bubble.node.setAttribute("aria-busy", "true");
  answering = new AbortController();
  say($("send"), "Stop");
  let note;
  try {
    note = await answer(bubble, answering.signal);
    bubble.close(note);
  } catch (error) {
    note = error.name === "AbortError" ? "stopped" : error.message;
    bubble.close(note, error.name !== "AbortError");
  }
  bubble.node.removeAttribute("aria-busy");
  answering = null;
  say($("send"), "Send");
  // The conversation has been cleared in the meantime.
  if (!question.node.isConnected) return;
  if (bubble.text) {
    talk.push({ role: "assistant", content: bubble.text, note });
  } else {
    // An unanswered message is not part of the conversation. It returns to the input.
    talk.pop();
    if (!$("message").value) $("message").value = text;
    if (pictures.length) setPictures(pictures);
    fit();
  }
  keep();
}

/** Fits the height of the input to its text, up to the maximum of the style sheet. */
function fit() {
  const input = $("message");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (answering) return answering.abort();
  if ($("client-key").value) keepClientKey($("client-key").value);
  const text = $("message").value.trim();
  const pictures = takePictures();
  if (!text && !pictures.length) return;
  $("message").value = "";
  fit();
  ask(text, pictures);
});

$("message").addEventListener("input", fit);
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouch) return;
  event.preventDefault();
  if (!answering) $("ask").requestSubmit();
});

$("clear").addEventListener("click", () => {
  answering?.abort();
  talk.length = 0;
  keep();
  $("talk").replaceChildren();
  $("message").focus();
});

if (!isTouch) $("message").placeholder = "Ask something. Shift+Enter starts a new line.";
talk.forEach(show);

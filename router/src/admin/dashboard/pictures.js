// Pictures of the next message: chosen, pasted or dropped, shown small, and sent as data: URLs.

import { $, element, say } from "./dom.js";
import { modelInfo } from "./server.js";

/** As the workers decode them. */
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
/** The workers' limit of one picture. */
const MAX_BYTES = 20 * 1024 * 1024;

let waiting = []; // data: URLs
let isOffered = false;

/** Shows the button unless the model says that it takes no pictures. Workers of several models may differ, and each request
    is then answered by its own. */
export async function offerPictures(models) {
  const info = models.length === 1 ? await modelInfo().catch(() => null) : null;
  isOffered = models.length > 0 && info?.has_image_understanding !== false;
  $("add-picture").hidden = !isOffered;
  if (!isOffered) setPictures([]);
}

/** Returns the pictures of the next message, which has none from now on. */
export function takePictures() {
  const taken = waiting;
  setPictures([]);
  return taken;
}

export function setPictures(urls) {
  waiting = urls;
  const all = urls.map((url, at) => {
    const remove = element("button", {
      type: "button",
      text: "×",
      "aria-label": `Remove picture ${at + 1}`,
    });
    remove.addEventListener("click", () => {
      setPictures(waiting.filter((_, other) => other !== at));
      $("message").focus();
    });
    return element("li", {}, picture(url, `Picture ${at + 1}`), remove);
  });
  $("pictures").replaceChildren(...all);
  $("pictures").hidden = !urls.length;
  refuse("");
}

export const picture = (url, alt) => element("img", { src: url, alt });

function refuse(text) {
  say($("picture-refused"), text);
  $("picture-refused").hidden = !text;
}

async function add(files) {
  const good = files.filter(({ type, size }) => TYPES.includes(type) && size <= MAX_BYTES);
  const read = await Promise.all(good.map(dataUrl));
  setPictures([...waiting, ...read]);
  const bad = files.find((file) => !good.includes(file));
  if (bad && TYPES.includes(bad.type)) refuse(`${bad.name} has more than 20 MiB.`);
  else if (bad) refuse(`${bad.name} is not a PNG, JPEG, WebP, GIF or BMP picture.`);
}

const dataUrl = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });

$("add-picture").addEventListener("click", () => $("picture-files").click());
$("picture-files").addEventListener("change", ({ target }) => {
  add([...target.files]);
  target.value = ""; // the same file may be chosen again
});
$("message").addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (!isOffered || !files.length) return;
  event.preventDefault();
  add(files);
});
for (const name of ["dragover", "drop"]) {
  $("chat").addEventListener(name, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault(); // or the browser opens the file
    event.dataTransfer.dropEffect = isOffered ? "copy" : "none";
    if (name === "drop" && isOffered) add([...event.dataTransfer.files]);
  });
}

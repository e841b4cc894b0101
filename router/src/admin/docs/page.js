"use strict";

const state = document.getElementById("state");
const form = document.getElementById("key");
const list = document.getElementById("paths");

/** An element with text and children. */
function element(name, text, ...children) {
  const made = document.createElement(name);
  made.textContent = text;
  made.append(...children);
  return made;
}

function operation(path, method, what, schemas) {
  const title = element("summary", "", element("code", method.toUpperCase()), element("code", path));
  title.firstChild.className = "method";
  title.append(` ${what.summary ?? ""}`);
  const details = element("details", "", title);
  const body = what.requestBody?.content?.["application/json"]?.schema;
  const name = body?.$ref?.split("/").pop();
  const schema = name ? schemas[name] : body;
  details.append(element("pre", schema ? JSON.stringify(schema, null, 2) : "No body."));
  return details;
}

async function load(key) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch("/openapi.json", { headers });
  form.hidden = answer.status !== 401;
  if (!answer.ok) {
    state.textContent = answer.status === 401 ? "This server needs an API key." : `Status ${answer.status}`;
    return;
  }
  const document = await answer.json();
  const schemas = document.components?.schemas ?? {};
  state.textContent = `${document.info.title} ${document.info.version}`;
  list.replaceChildren();
  for (const [path, methods] of Object.entries(document.paths)) {
    for (const [method, what] of Object.entries(methods)) {
      list.append(operation(path, method, what, schemas));
    }
  }
}

function failed(error) {
  state.textContent = `The server cannot be reached: ${error.message}`;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  load(form.querySelector("input").value).catch(failed);
});
load("").catch(failed);

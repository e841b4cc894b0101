// The router's answers: with the keys that the tab has been told, and as events.

/** Of the two keys, the one that the router asks for before it shows its figures. */
export const adminKey = () => sessionStorage.getItem("admin-key");

/** The key of requests to the model. The router's own opens them, too. */
const clientKey = () => sessionStorage.getItem("client-key") ?? adminKey();

export const keepAdminKey = (key) => sessionStorage.setItem("admin-key", key);
export const keepClientKey = (key) => sessionStorage.setItem("client-key", key);

const bearer = (key) => (key ? { authorization: `Bearer ${key}` } : {});

export const figures = () => fetch("/dashboard/events", { headers: bearer(adminKey()) });

export const complete = (request, signal) =>
  fetch("/v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "content-type": "application/json", ...bearer(clientKey()) },
    body: JSON.stringify(request),
  });

/** The data of the events of a response, as they come. */
export async function* events(response) {
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
    reader.cancel().catch(() => {}); // fails if the stream has failed before
  }
}

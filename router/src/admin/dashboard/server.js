// Requests to the router with the keys of this tab, and its event streams.

/** The key that the router requires for its statistics. */
export const adminKey = () => sessionStorage.getItem("admin-key");

/** The key for requests to the model. The admin key is accepted, too. */
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

/** What a worker says about its model. */
export async function modelInfo() {
  const response = await fetch("/get_model_info", { headers: bearer(clientKey()) });
  return response.ok ? response.json() : null;
}

/** Yields the data of each event of a response. */
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
    reader.cancel().catch(() => {}); // fails if the stream has failed
  }
}

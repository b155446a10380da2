// Requests to the server, and its events.

let key = sessionStorage.getItem("coattn.key") || "";

export function setKey(given) {
  key = given.trim();
  sessionStorage.setItem("coattn.key", key);
}

export function hasKey() {
  return key !== "";
}

async function open(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  let said = `The server answered ${answer.status}.`;
  try {
    said = (await answer.json()).error.message;
  } catch {
    // no JSON: the status has to do
  }
  throw new Error(said);
}

export async function get(path) {
  return (await open(path)).json();
}

// Yields the JSON object of each event; ends with the stream, or throws what the signal says.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (left + value).split("\n");
      left = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export async function* chat(body, signal) {
  const answer = await open("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  for await (const chunk of events(answer)) {
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
}

export async function* live(rate, signal) {
  yield* events(await open(`/v1/coattn/live?rate=${rate}`, { signal }));
}

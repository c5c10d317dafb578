// Asks the server this page came from, and no other. The key is sent in a header, and kept for this tab alone.
const KEY = "kvloom-key";
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 8000;

export const keyOf = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** An answer that is no success, in the server's own words. */
export class Refusal extends Error {
  constructor(status, words) {
    super(words);
    this.status = status;
  }
}

export async function ask(path, { body, signal, headers = {} } = {}) {
  const sent = { ...headers };
  if (keyOf()) sent.authorization = `Bearer ${keyOf()}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers: sent,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "omit",
    referrerPolicy: "no-referrer",
  });
  if (answer.ok) return answer;
  const text = await answer.text();
  let words = text.slice(0, 500);
  try {
    const told = JSON.parse(text).error;
    words = told?.message ?? String(told ?? words);
  } catch {
    // not JSON: the text says it
  }
  throw new Refusal(answer.status, words || `status ${answer.status}`);
}

export const askJson = async (path, given) => (await ask(path, given)).json();

/** Yields the events of a stream: {event, data, id}. */
export async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const event = { event: "message", data: "", id: "" };
      for (const line of block.split("\n")) {
        const colon = line.indexOf(":");
        if (colon < 1) continue;
        const value = line.slice(colon + 1).replace(/^ /, "");
        const field = line.slice(0, colon);
        if (field === "data") event.data += event.data ? `\n${value}` : value;
        else if (field in event) event[field] = value;
      }
      if (event.data) yield event;
    }
  }
}

const pause = (milliseconds, signal) =>
  new Promise((done) => {
    const timer = setTimeout(done, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
  });

/** Follows a stream until `signal`, and asks again if it breaks. `tell` gets "open", or the error. */
export async function follow(path, signal, take, tell) {
  let last = "";
  let wait = FIRST_PAUSE;
  while (!signal.aborted) {
    try {
      const headers = last ? { "last-event-id": last } : {};
      const answer = await ask(path, { signal, headers });
      tell("open");
      for await (const event of eventsOf(answer)) {
        if (event.id) last = event.id;
        wait = FIRST_PAUSE;
        take(event);
      }
      tell(new Error("the stream ended"));
    } catch (error) {
      if (signal.aborted) return;
      tell(error);
    }
    await pause(wait, signal);
    wait = Math.min(2 * wait, LONGEST_PAUSE);
  }
}

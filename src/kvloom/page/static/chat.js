// A chat box for each model: the answer as it is made, and under it what the pool makes of the request.
import { ask, eventsOf, keyOf, Refusal } from "./source.js";
import { askLife, LifeView } from "./life.js";
import { byId, element, keyed, setText } from "./dom.js";

const LOOK_EACH = 400; // milliseconds
const EXAMPLES = {
  sums: ["What is 17 + 25?"],
  stories: ["Tell me a story about a dragon."],
  guide: ["What does kvloom do?"],
};
const TIMES = 8;
const EVERYBODY = "Tell me about yourself, at length.";

const makeId = () => `page-${Array.from(crypto.getRandomValues(new Uint8Array(8)), (one) => one.toString(16).padStart(2, "0")).join("")}`;

/** What the parameters' fields ask for. An empty one asks for nothing. */
function parametersOf(form) {
  const found = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const { value } = form.elements[name];
    if (value !== "") found[name] = Number(value);
  }
  return found;
}

export class Chat {
  constructor(form, store) {
    this.form = form;
    this.store = store;
    this.model = "";
    this.talks = new Map();
    this.plain = new Set(); // models without a template
    this.running = null;
    this.life = new LifeView(byId("chat-life"));
    this.life.say("Ask, and the request's own life is drawn here while it answers.");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.say(form.elements.prompt.value);
    });
    form.elements.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) form.requestSubmit();
    });
    byId("chat-anew").addEventListener("click", () => {
      this.running?.abort();
      this.talks.delete(this.model);
      this.drawTalk();
    });
  }

  /** Takes the names of the models that there are. */
  offer(names) {
    if (names.join("\n") === this.offered) return;
    this.offered = names.join("\n");
    if (!names.includes(this.model)) this.model = names[0] ?? "";
    keyed(byId("chat-models"), names, (name) => {
      const radio = element("input", { type: "radio", name: "model", value: name, onchange: () => this.choose(name) });
      return element("label", { class: "choice" }, radio, element("i", { class: `swatch c${this.store.colour(name)}`, "aria-hidden": "true" }), element("span", {}, name));
    }, (label, name) => {
      label.firstChild.checked = name === this.model;
    });
    const known = names.filter((name) => name in EXAMPLES).map((name) => [name, EXAMPLES[name][0]]);
    const shown = known.length ? known : names.slice(0, 2).map((name) => [name, "Once upon a time"]);
    byId("chat-examples").replaceChildren(...shown.map(([name, prompt]) =>
      element("button", { type: "button", class: "example", onclick: () => (this.choose(name), this.say(prompt)) }, prompt)),
    element("button", { type: "button", class: "example", onclick: () => this.fill(names) }, `Ask every model ${TIMES} times at once`));
    this.drawTalk();
  }

  choose(name) {
    this.model = name;
    for (const radio of byId("chat-models").querySelectorAll("input")) radio.checked = radio.value === name;
    this.drawTalk();
  }

  drawTalk() {
    const talk = this.talks.get(this.model) ?? [];
    byId("chat-talk").replaceChildren(...(talk.length ? talk.map((one) => one.node) : [element("p", { class: "soft" },
      this.model ? `Ask ${this.model} something, or try an example. Watch its colour grow in the pool.` : "The models are listed here once one is served.")]));
  }

  /** Asks the model that is chosen. */
  async say(prompt) {
    if (!this.model || !prompt.trim() || this.running) return;
    const { model } = this;
    const talk = this.talks.get(model) ?? [];
    this.talks.set(model, talk);
    const asked = { role: "user", content: prompt, node: element("p", { class: "asked" }, prompt) };
    const answer = { role: "assistant", content: "", node: element("p", { class: "answer", data: { model } }) };
    talk.push(asked, answer);
    this.form.elements.prompt.value = "";
    this.drawTalk();
    const stop = new AbortController();
    this.running = stop;
    setText(byId("chat-send"), "Stop");
    byId("chat-talk").setAttribute("aria-busy", "true");
    const id = makeId();
    const over = this.watch(id, model);
    try {
      for await (const text of this.stream(model, talk, id, stop.signal)) {
        answer.content += text;
        answer.node.append(text);
        byId("chat-talk").scrollTop = byId("chat-talk").scrollHeight;
      }
      if (!answer.content) answer.node.append(element("em", { class: "soft" }, "(nothing)"));
    } catch (error) {
      const words = stop.signal.aborted ? "stopped" : error.message;
      answer.node.append(element("em", { class: "problem" }, `${answer.content ? " – " : ""}${words}`));
      if (!answer.content) talk.splice(talk.indexOf(asked), 2, { node: asked.node }, { node: answer.node });
    } finally {
      this.running = null;
      setText(byId("chat-send"), "Ask");
      byId("chat-talk").removeAttribute("aria-busy");
      over();
    }
  }

  async *stream(model, talk, id, signal) {
    const given = { model, stream: true, ...parametersOf(this.form) };
    const system = this.form.elements.system.value;
    const messages = talk.filter((one) => one.role && (one.role === "user" || one.content)).map(({ role, content }) => ({ role, content }));
    const headers = { "x-request-id": id };
    let answer;
    if (!this.plain.has(model)) {
      try {
        const asked = system ? [{ role: "system", content: system }, ...messages] : messages;
        answer = await ask("/v1/chat/completions", { body: { ...given, messages: asked }, signal, headers });
      } catch (error) {
        if (!(error instanceof Refusal && error.status === 400 && error.message.includes("no chat template"))) throw error;
        this.plain.add(model);
      }
    }
    if (!answer) {
      const prompt = (system ? `${system}\n` : "") + messages.at(-1).content;
      answer = await ask("/v1/completions", { body: { ...given, prompt }, signal, headers });
    }
    for await (const { data } of eventsOf(answer)) {
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.error) throw new Error(told.error.message);
      const choice = told.choices[0];
      const text = choice?.delta ? choice.delta.content : choice?.text;
      if (text) yield text;
    }
  }

  /** Draws the request's life until what it returns is called, and once more then. */
  watch(id, model) {
    const began = Date.now() / 1000;
    const own = { id, api_id: "", model, state: "queued", began, prompt_tokens: 0, output_tokens: 0, cached_tokens: 0, steps: [{ at: began, what: "came", unit: "", reason: "" }] };
    this.life.draw(own, began);
    this.watched = id;
    const look = async () => {
      if (this.watched !== id) return;
      try {
        this.life.draw(await askLife(id), Date.now() / 1000);
      } catch (error) {
        const key = keyOf() ? "this key does not open it" : "it takes an admin's key";
        this.life.say([401, 403].includes(error.status) ? `The life of the request is not shown: ${key}.` : error.message);
        clearInterval(timer);
      }
    };
    const timer = setInterval(look, LOOK_EACH);
    return () => {
      clearInterval(timer);
      look();
    };
  }

  /** Asks each model several times at once, so that there is something to see. One request each has them all,
   * because a browser opens few connections to a server. */
  async fill(names) {
    const asked = names.map(async (model) => {
      try {
        const answer = await ask("/v1/completions", { body: { model, prompt: EVERYBODY, n: TIMES, max_tokens: 160, ignore_eos: true, temperature: 1, stream: true } });
        for await (const { data } of eventsOf(answer)) if (data.startsWith('{"error"')) return JSON.parse(data).error.message;
        return "";
      } catch (error) {
        return error.message;
      }
    });
    this.life.say(`${names.length} requests with ${TIMES} answers each are on their way: see the pool fill.`);
    const problems = (await Promise.all(asked)).filter(Boolean);
    this.life.say(problems[0] ?? `All ${TIMES * names.length} answers are there. What they leave in the pool is cached: the pale part.`);
  }
}

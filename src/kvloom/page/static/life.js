// One request's life: where its time went.
import { askJson } from "./source.js";
import { element, setText } from "./dom.js";
import { showMoment, showSeconds } from "./format.js";

const PHASE_AFTER = { admitted: "prefill", first_token: "decode", resumed: "queued", preempted: "queued" };
const OVER = ["ended", "failed", "cancelled"];
const PHASES = ["queued", "prefill", "decode"];

/** The stretches of a life: {phase, begin, end}. */
export function stretchesOf(life, now) {
  const found = [];
  let phase = "queued";
  for (const [i, step] of life.steps.entries()) {
    if (OVER.includes(step.what)) break;
    // one that has begun is not told to be computed again: its tokens go on soon
    if (phase !== "decode") phase = PHASE_AFTER[step.what] ?? phase;
    const end = life.steps[i + 1]?.at ?? Math.max(step.at, now);
    const last = found.at(-1);
    if (last?.phase === phase) last.end = end;
    else found.push({ phase, begin: step.at, end });
  }
  return found;
}

export class LifeView {
  constructor(host) {
    this.bar = element("div", { class: "life-bar", "aria-hidden": "true" });
    this.said = element("p", { class: "life-said" });
    this.steps = element("ol", { class: "life-steps" });
    host.replaceChildren(this.said, this.bar, this.steps);
    this.host = host;
  }

  draw(life, now) {
    const stretches = stretchesOf(life, now);
    const begin = life.steps[0]?.at ?? life.began;
    const end = Math.max(life.steps.at(-1)?.at ?? begin, stretches.at(-1)?.end ?? begin, begin + 1e-6);
    const part = (at) => (100 * (at - begin)) / (end - begin);
    this.host.dataset.state = life.state;
    this.host.dataset.request = life.id;
    this.bar.replaceChildren(...stretches.map((one) => {
      const drawn = element("div", { class: `phase ${one.phase}`, data: { phase: one.phase, seconds: one.end - one.begin } });
      drawn.style.left = `${part(one.begin)}%`;
      drawn.style.width = `${part(one.end) - part(one.begin)}%`;
      return drawn;
    }), ...life.steps.filter((step) => ["moved", "preempted"].includes(step.what)).map((step) => {
      const tick = element("div", { class: "tick" });
      tick.style.left = `${part(step.at)}%`;
      return tick;
    }));
    const sums = PHASES.map((phase) => [phase, stretches.filter((one) => one.phase === phase).reduce((sum, one) => sum + one.end - one.begin, 0)]);
    const cached = life.cached_tokens ? `, ${life.cached_tokens} of them cached` : "";
    setText(this.said, `${life.model}: ${sums.filter(([, seconds]) => seconds).map(([phase, seconds]) => `${phase} ${showSeconds(seconds)}`).join(", ") || life.state}. `
      + `${life.prompt_tokens} tokens in${cached}, ${life.output_tokens} out; ${life.state}.`);
    const steps = life.steps.map((step) => `${showMoment(step.at, false)}  +${showSeconds(step.at - begin)}  ${step.what.replace("_", " ")}`
      + `${step.unit ? ` at ${step.unit}` : ""}${step.reason ? `: ${step.reason}` : ""}`);
    if (steps.join("\n") !== this.told) {
      this.told = steps.join("\n");
      this.steps.replaceChildren(...steps.map((step) => element("li", {}, step)));
    }
  }

  say(words) {
    this.told = "";
    this.bar.replaceChildren();
    this.steps.replaceChildren();
    setText(this.said, words);
  }
}

export const askLife = (id) => askJson(`/admin/requests/${encodeURIComponent(id)}`);

/** The form that asks for a request by its id, and lists the last ones. */
export class LifeForm {
  constructor(form, known, host) {
    this.view = new LifeView(host);
    this.known = known;
    this.field = form.elements.id;
    this.view.say("Give an id, or choose one of the last requests: its bar shows where its time went.");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.show(this.field.value.trim());
    });
    this.field.addEventListener("focus", () => this.list());
  }

  async show(id) {
    if (!id) return;
    try {
      this.view.draw(await askLife(id), Date.now() / 1000);
    } catch (error) {
      this.view.say(error.message);
    }
  }

  async list() {
    try {
      const lives = await askJson("/admin/requests");
      this.known.replaceChildren(...lives.map((life) => element("option", { value: life.id }, `${life.model}, ${life.state}`)));
    } catch {
      // the field takes an id all the same, and tells why it finds none
    }
  }
}

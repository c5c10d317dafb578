// Lanes of units and whatever else a fleet has: their states, and on them what has happened, with the reasons.
import { element, keyed, setText, tipped } from "./dom.js";
import { showMoment, showSeconds } from "./format.js";

const TONES = {
  bad: ["died", "killed", "quarantined", "lost", "fault"],
  warn: ["preempted", "draining", "stayed", "ended", "removed"],
  good: ["ready", "admitted", "awake"],
};
const BUCKETS = 60; // marks that a lane has room for, at most
const MOST_LOGGED = 60;
const MOST_LINES = 6;

const toneOf = (type) => Object.keys(TONES).find((tone) => TONES[tone].includes(type)) ?? "plain";

/** An event in words. */
export function wordsOf({ event }) {
  const words = [event.type.replace("_", " ")];
  if (event.kind) words.push(event.kind);
  if (event.model) words.push(event.model);
  if (event.base) words.push(`of ${event.base}`);
  if (event.name) words.push(event.name);
  if (event.state) words.push(event.state);
  if (event.source) words.push(`from ${event.source} to ${event.destination}`);
  if (event.blocks) words.push(`${event.blocks} blocks`);
  if (event.count) words.push(`${event.count} events`);
  if (event.models?.length) words.push(`(${event.models.join(", ")})`);
  if (event.node) words.push(`on ${event.node}`);
  if (typeof event.seconds === "number") words.push(`${event.kind ? "for" : "after"} ${showSeconds(event.seconds)}`);
  let said = words.join(" ");
  if (event.reason) said += `: ${event.reason}`;
  if (typeof event.again === "number") said += `; it is started again in ${showSeconds(event.again)}`;
  if (event.request) said += ` [${event.request}]`;
  return said;
}

export class Lanes {
  constructor(host, log, store) {
    this.host = host;
    this.log = log;
    this.store = store;
    this.tracks = new Map();
    this.place = -1;
  }

  update(view) {
    const [from, to] = view.span;
    const left = (at) => Math.min(100, Math.max(0, (100 * (at - from)) / (to - from)));
    const states = new Map(view.sample.units.map((unit) => [unit.unit, unit]));
    keyed(this.host, this.store.components(view.sample), (name) => this.make(name), (row, name) => {
      const unit = states.get(name);
      setText(row.laneState, unit ? unit.state + (unit.node ? ` · ${unit.node}` : "") : (this.store.lanes.get(name).at(-1)?.state ?? ""));
      row.dataset.state = unit?.state ?? "";
    });
    if (this.drawn === view.drawn) return this.logged(view);
    this.drawn = view.drawn;
    const width = 2 ** Math.ceil(Math.log2((to - from) / BUCKETS)); // the same while the span grows, so that marks stay, and the focus on them
    const marks = new Map();
    for (const record of this.store.records) {
      if (record.at < from || record.at > to + 1) continue;
      const bucket = Math.floor(record.at / width);
      for (const lane of this.lanesOf(record)) {
        if (!marks.has(lane)) marks.set(lane, new Map());
        const of = marks.get(lane);
        if (!of.has(bucket)) of.set(bucket, []);
        of.get(bucket).push(record);
      }
    }
    for (const [name, track] of this.tracks) {
      if (!this.store.lanes.has(name)) continue;
      this.spans(track, this.store.lanes.get(name), from, to, left);
      this.marks(track, name, marks.get(name) ?? new Map(), left);
    }
    return this.logged(view);
  }

  lanesOf({ component, event }) {
    const named = [event.source, event.destination].filter((name) => this.store.lanes.has(name));
    return named.length ? named : [component];
  }

  make(name) {
    const track = element("div", { class: "track", role: "group", "aria-label": `Events of ${name}; arrow keys go from one to the next` });
    track.spans = element("div", { class: "spans" });
    track.marks = element("div", { class: "marks" });
    track.append(track.spans, track.marks);
    track.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      const all = [...track.marks.children];
      const next = all[all.indexOf(document.activeElement) + step];
      if (!next) return;
      event.preventDefault();
      for (const mark of all) mark.tabIndex = mark === next ? 0 : -1;
      next.focus();
    });
    this.tracks.set(name, track);
    const state = element("span", { class: "soft" });
    const row = element("div", { class: "lane", data: { component: name } }, element("div", { class: "lane-name" }, element("strong", {}, name), " ", state), track);
    row.laneState = state;
    return row;
  }

  spans(track, states, from, to, left) {
    const shown = states.map((one, i) => ({ ...one, end: states[i + 1]?.at ?? to })).filter((one) => one.end > from && one.at < to);
    keyed(track.spans, shown.map((_, i) => i), () => element("div"), (span, i) => {
      span.className = `span ${shown[i].state}`;
      span.dataset.state = shown[i].state;
      span.style.left = `${left(shown[i].at)}%`;
      span.style.width = `${left(shown[i].end) - left(shown[i].at)}%`;
    });
  }

  marks(track, name, buckets, left) {
    keyed(track.marks, buckets.keys(), () => {
      const mark = element("button", { type: "button", tabindex: -1 });
      tipped(mark, () => mark.lines);
      return mark;
    }, (mark, bucket) => {
      const records = buckets.get(bucket);
      const worst = Object.keys(TONES).find((tone) => records.some((record) => toneOf(record.event.type) === tone)) ?? "plain";
      const types = [...new Set(records.map((record) => record.event.type))];
      mark.className = `mark ${worst}`;
      mark.dataset.types = types.join(" ");
      mark.style.left = `${left(records.at(-1).at)}%`;
      mark.lines = this.linesOf(records);
      mark.setAttribute("aria-label", mark.lines.join("\n"));
    });
    const all = [...track.marks.children];
    if (all.length && !all.some((mark) => mark.tabIndex === 0)) all.at(-1).tabIndex = 0;
  }

  /** What is said of events: of many that differ in numbers alone, the last one and how many there are. */
  linesOf(records) {
    const alike = new Map();
    for (const record of records) {
      const { type, model, state, reason = "" } = record.event;
      const key = [record.component, type, model, state, reason.replace(/\d+/g, "0")].join("\n");
      const count = 1 + (alike.get(key)?.count ?? 0);
      alike.delete(key);
      alike.set(key, { record, count });
    }
    const all = [...alike.values()];
    const lines = all.slice(-MOST_LINES).map(({ record, count }) =>
      `${showMoment(record.at, this.store.virtual)}  ${wordsOf(record)}${count > 1 ? ` (the last of ${count})` : ""}`);
    if (all.length > MOST_LINES) lines.unshift(`${all.length - MOST_LINES} others before`);
    return lines;
  }

  /** The last events up to now, as text. */
  logged(view) {
    const { records } = this.store;
    let end = records.length;
    if (this.store.virtual) while (end && records[end - 1].at > view.now) end -= 1;
    const last = records[end - 1]?.id ?? "";
    if (last === this.last) return;
    this.last = last;
    const shown = records.slice(Math.max(0, end - MOST_LOGGED), end).reverse();
    keyed(this.log, shown.map((record) => record.id), (id) => {
      const record = shown.find((one) => one.id === id);
      return element("li", { data: { type: record.event.type, component: record.component, record: id, at: record.at } },
        element("time", {}, showMoment(record.at, this.store.virtual)), element("i", { class: `mark ${toneOf(record.event.type)}`, "aria-hidden": "true" }),
        element("strong", {}, record.component), element("span", {}, wordsOf(record)));
    });
  }
}

// The pool of each unit, by model, over time; and a table of the same numbers now.
import { Chart } from "./charts.js";
import { element, keyed, setText, setValue } from "./dom.js";
import { showBytes, showCount, showMoment, showSeconds } from "./format.js";

// From the bottom up, of each model; the strength is the fill's opacity.
const PARTS = [
  ["weights", "ff", (model) => model.weights],
  ["pinned", "d9", (model) => model.pinned],
  ["used", "a6", (model) => model.used - model.pinned],
  ["cached", "47", (model) => model.cached],
];
const POWERS = Array.from({ length: 40 }, (_, power) => 2 ** power);
const ROOM = 2.5; // as often as its peak a pool must be to be drawn in part
const ROOM_OVER_QUOTAS = 8; // the same where the line of a quota is not seen then
const COLUMNS = [
  ["used", "kvloom_kv_blocks_used"],
  ["cached", "kvloom_kv_blocks_cached"],
  ["pinned", "kvloom_pinned_blocks"],
  ["weights", "kvloom_weights_blocks"],
  ["quota", "kvloom_kv_blocks_quota"],
];

export class Memory {
  constructor(host, store) {
    this.host = host;
    this.store = store;
    this.cards = new Map();
  }

  update(view) {
    const units = view.sample.units;
    keyed(this.host, units.map((unit) => unit.unit), (name) => this.make(name));
    for (const unit of units) this.cards.get(unit.unit).update(view, unit);
    for (const name of [...this.cards.keys()]) {
      if (!units.some((unit) => unit.unit === name)) this.cards.delete(name);
    }
  }

  make(name) {
    const card = new PoolCard(name, this.store);
    this.cards.set(name, card);
    return card.figure;
  }
}

class PoolCard {
  constructor(name, store) {
    this.name = name;
    this.store = store;
    this.title = element("figcaption", {}, element("strong", {}, name));
    this.said = element("span", { class: "soft" });
    this.title.append(" ", this.said);
    this.figure = element("figure", { class: "card pool", data: { unit: name } }, this.title);
    this.total = 1; // blocks
    this.most = 1; // blocks that are drawn
    this.blockBytes = 1;
    this.chart = new Chart(this.figure, {
      show: (blocks) => showBytes(blocks * this.blockBytes),
      virtual: store.virtual,
      steps: POWERS,
      nothing: "The pool is empty. Ask a model, and its part grows here.",
      most: () => this.most,
      read: (place) => this.read(place),
    });
    this.chart.host.setAttribute("role", "img");
    this.chart.host.setAttribute("aria-label", `Memory of ${name} by model over time; the table below has the numbers of now`);
    this.rows = element("tbody");
    const heads = ["model", ...COLUMNS.map(([head]) => head)];
    this.figure.append(element("div", { class: "wide" }, element("table", { class: "numbers" },
      element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))), this.rows)));
    this.drawn = null;
  }

  update(view, unit) {
    this.total = unit.blocks || this.total;
    this.blockBytes = unit.block_bytes || this.blockBytes;
    if (view.drawn !== this.drawn) {
      this.drawn = view.drawn;
      this.draw(view);
    }
    this.now(unit);
  }

  draw(view) {
    const { samples } = this.store;
    const begin = this.store.virtual ? 0 : this.store.placeOf(view.span[0]);
    this.shown = samples.slice(begin);
    this.units = this.shown.map((sample) => sample.units.find((unit) => unit.unit === this.name && unit.blocks));
    const names = this.store.models.filter((name) => this.units.some((unit) => unit?.models.some((one) => one.model === name)));
    const layers = [];
    const lines = [];
    const sums = new Array(this.units.length).fill(0);
    for (const name of names) {
      const colour = `c${this.store.colour(name)}`;
      const own = this.units.map((unit) => unit?.models.find((one) => one.model === name));
      const base = sums.slice();
      for (const [part, strength, value] of PARTS) {
        const values = own.map((model) => (model ? value(model) : 0));
        values.forEach((amount, i) => (sums[i] += amount));
        layers.push({ name: `${name} ${part}`, colour, strength, values, stacked: true });
      }
      lines.push({ name: `${name} quota`, colour, dash: [5, 4], width: 1.25, values: own.map((model, i) => (model ? base[i] + model.quota : null)) });
    }
    layers.push({ name: "lent", colour: "soft", strength: "59", values: this.units.map((unit) => unit?.lent ?? 0), stacked: true });
    // a pool that is nearly empty is drawn in part, so that there is something to see
    const peak = Math.max(1, ...sums, ...this.units.map((unit) => (unit ? unit.blocks - unit.free : 0)));
    this.most = this.total;
    const reach = lines.flatMap((line) => line.values.slice(-1)).filter((value) => value !== null && value <= this.total);
    const hides = (most) => reach.some((value) => most / 2 < value && value <= most);
    while (this.most >= (hides(this.most) ? ROOM_OVER_QUOTAS : ROOM) * peak) this.most /= 2;
    this.above = reach.length > 0 && reach.every((value) => value > this.most);
    this.chart.draw(this.shown.map((sample) => sample.at), [...layers, ...lines], view.span);
  }

  now(unit) {
    const size = (blocks) => showBytes(blocks * unit.block_bytes);
    const waits = (unit.waves ?? []).map((wave) => `, ${wave.peer || "a peer"} waits ${showSeconds(wave.wait_seconds)} for it`);
    const lent = unit.lent ? `, ${size(unit.lent)} lent` : "";
    const home = unit.node ? ` on ${unit.node}` : "";
    setText(this.said, unit.blocks ? `${size(unit.free)} of ${size(unit.blocks)} free${lent}${waits.join("")}${home}${this.most < this.total ? `; drawn up to ${size(this.most)}${this.above ? ", below all quotas" : ""}` : ""}` : `${unit.state}${home}`);
    Object.assign(this.figure.dataset, { blocks: unit.blocks, free: unit.free, lent: unit.lent, blockBytes: unit.block_bytes, state: unit.state });
    keyed(this.rows, unit.models.map((model) => model.model), (name) =>
      element("tr", {}, nameCell(this.store, name), ...COLUMNS.map(([, metric]) => element("td", { data: { metric, unit: unit.unit, model: name } }))),
    (row, name) => {
      const model = unit.models.find((one) => one.model === name);
      COLUMNS.forEach(([key], i) => {
        const cell = row.children[i + 1];
        setValue(cell, key === "weights" && !model.awake ? "asleep" : model[key] ? size(model[key]) : "0", model[key]);
      });
    });
  }

  read(place) {
    const unit = this.units[place];
    const at = showMoment(this.shown[place].at, this.store.virtual);
    if (!unit) return `${at} · no answer`;
    const parts = unit.models.map((model) => `${model.model} ${showBytes(model.used * unit.block_bytes)} + ${showBytes(model.cached * unit.block_bytes)} cached`);
    return [at, ...parts, `${showCount(unit.free)} of ${showCount(unit.blocks)} blocks free`].join(" · ");
  }
}

/** A row's head: a model's colour and its name. */
export function nameCell(store, name) {
  return element("th", { scope: "row" }, swatch(store, name), element("span", {}, name));
}

export const swatch = (store, name) => element("i", { class: `swatch c${store.colour(name)}`, "aria-hidden": "true" });

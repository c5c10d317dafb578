// What is known of the fleet: samples of its numbers, records of its journal, and what follows from them.
import { byName } from "./format.js";

const KEPT_SECONDS = 3600;
const FINE_SECONDS = 660; // for which each sample is kept; of what is older, one in ten seconds
const COARSE = 9;
const MOST_RECORDS = 10000;
const COLOURS = 24; // that page.css has
const FLOW_SECONDS = 5; // over which a rate is taken
const MEAN_SECONDS = 60; // over which a time is a mean

const STATE_AFTER = {
  starting: "starting", ready: "up", admitted: "up", draining: "draining",
  died: "down", killed: "down", ended: "away",
};

const grown = (before, after) => (after >= before ? after - before : after);

export class Store {
  constructor(virtual) {
    this.virtual = virtual;
    this.samples = [];
    this.records = [];
    this.version = 0;
    this.seen = new Set();
    this.models = [];
    this.lanes = new Map();
  }

  /** Takes samples, oldest first. */
  take(samples) {
    for (const sample of samples) {
      const last = this.samples.at(-1);
      if (last && sample.at <= last.at) continue;
      for (const unit of sample.units) {
        for (const model of unit.models) this.know(model.model);
        this.note(unit.unit, sample.at, unit.state);
      }
      this.samples.push(sample);
      sample.flow = this.flow(this.samples.length - 1, FLOW_SECONDS);
    }
    if (!this.virtual) this.forget();
    this.version += 1;
  }

  record(records) {
    for (const record of records) {
      const id = `${record.journal}-${record.number}`;
      if (this.seen.has(id)) continue;
      this.seen.add(id);
      record.id = id;
      this.records.push(record);
      const state = STATE_AFTER[record.event.type];
      if (state) this.note(record.component, record.at, state);
      else if (!this.lanes.has(record.component)) this.lanes.set(record.component, []);
    }
    this.records.sort((one, other) => one.at - other.at || one.number - other.number);
    if (!this.virtual && this.records.length > MOST_RECORDS) {
      for (const old of this.records.splice(0, this.records.length - MOST_RECORDS)) this.seen.delete(old.id);
    }
    this.version += 1;
  }

  know(model) {
    if (this.models.includes(model)) return;
    this.models.push(model);
    this.version += 1;
  }

  /** The number of a model's colour. */
  colour(model) {
    return this.models.indexOf(model) % COLOURS;
  }

  note(component, at, state) {
    if (!this.lanes.has(component)) this.lanes.set(component, []);
    const states = this.lanes.get(component);
    let place = states.length;
    while (place && states[place - 1].at > at) place -= 1;
    if (states[place - 1]?.state !== state) states.splice(place, 0, { at, state });
  }

  forget() {
    const now = this.samples.at(-1)?.at ?? 0;
    let last = -Infinity;
    this.samples = this.samples.filter((sample) => {
      if (sample.at < now - KEPT_SECONDS) return false;
      const kept = sample.at >= now - FINE_SECONDS || sample.at - last >= COARSE;
      if (kept) last = sample.at;
      return kept;
    });
    for (const states of this.lanes.values()) {
      while (states.length > 1 && states[1].at < now - KEPT_SECONDS) states.shift();
    }
  }

  /** The place of the last sample up to a time. */
  placeOf(at) {
    let low = 0;
    let high = this.samples.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.samples[middle].at <= at) low = middle + 1;
      else high = middle;
    }
    return Math.max(0, low - 1);
  }

  /** What each model has done in the seconds before a sample, and what it does then. */
  flow(place, seconds) {
    const now = this.samples[place];
    let before = place;
    while (before && now.at - this.samples[before].at < seconds) before -= 1;
    const then = this.samples[before];
    const span = now.at - then.at;
    const found = new Map();
    const of = (model) => {
      if (!found.has(model)) {
        found.set(model, { running: 0, waiting: 0, oldest: 0, made: 0, computed: 0, cached: 0, preemptions: 0,
          away: 0, rate: 0, requests: 0, ttft: null, tpot: null, hits: null });
      }
      return found.get(model);
    };
    for (const unit of now.units) {
      const old = this.firstOf(unit.unit, before, place);
      for (const model of unit.models) {
        const sum = of(model.model);
        sum.running += model.running;
        sum.waiting += model.waiting;
        sum.oldest = Math.max(sum.oldest, model.oldest);
        sum.preemptions += model.preemptions;
        sum.away += model.away;
        const was = old?.models.find((one) => one.model === model.model);
        if (!was) continue;
        sum.made += grown(was.output_tokens, model.output_tokens);
        sum.computed += grown(was.prompt_tokens, model.prompt_tokens);
        sum.cached += grown(was.cached_tokens, model.cached_tokens);
      }
    }
    for (const model of now.models) {
      const sum = of(model.model);
      const was = then.models.find((one) => one.model === model.model)
        ?? { ttft_sum: 0, ttft_count: 0, tpot_sum: 0, tpot_count: 0 };
      sum.requests = model.requests;
      const first = grown(was.ttft_count, model.ttft_count);
      const later = grown(was.tpot_count, model.tpot_count);
      if (first && place !== before) sum.ttft = grown(was.ttft_sum, model.ttft_sum) / first;
      if (later && place !== before) sum.tpot = grown(was.tpot_sum, model.tpot_sum) / later;
    }
    for (const sum of found.values()) {
      if (span > 0) sum.rate = sum.made / span;
      if (sum.computed + sum.cached) sum.hits = sum.cached / (sum.computed + sum.cached);
    }
    return found;
  }

  /** A unit as it was first, from one sample to another, with an answer. */
  firstOf(name, begin, end) {
    for (let place = begin; place < end; place += 1) {
      const found = this.samples[place].units.find((unit) => unit.unit === name);
      if (found?.models.length) return found;
    }
    return null;
  }

  /** The same with times that are means of the last minute. */
  means(place) {
    return this.samples.length ? this.flow(place, MEAN_SECONDS) : new Map();
  }

  /** All components that have a lane: units first. */
  components(sample) {
    const units = new Set(sample ? sample.units.map((unit) => unit.unit) : []);
    const rank = (name) => (units.has(name) || /^unit-\d/.test(name) ? 0 : 1);
    return [...this.lanes.keys()].sort((one, other) => rank(one) - rank(other) || byName(one, other));
  }
}

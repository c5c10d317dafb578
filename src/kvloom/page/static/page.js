// Puts the page together: of a fleet that serves, or of a run that was recorded.
import { Chat } from "./chat.js";
import { FleetTables } from "./fleet.js";
import { Lanes } from "./lanes.js";
import { LifeForm } from "./life.js";
import { Memory } from "./memory.js";
import { Store } from "./store.js";
import { Traffic } from "./traffic.js";
import { askJson, follow, keyOf, setKey } from "./source.js";
import { byId, element, keyed, setText, setValue } from "./dom.js";
import { showBytes, showCount, showMoment, showNumber, showSeconds, showShare } from "./format.js";

const SPEEDS = [1, 2, 5, 10, 30, 60, 300];
const LONGEST_WAIT = 1000; // milliseconds until the page is shown with what has come up to then
const LEAST_SECONDS = 60; // that are drawn
const SHOWN_SECONDS = 30; // that a recording takes to play, about

const recorded = byId("recording");
const run = recorded ? JSON.parse(recorded.textContent) : null;
const store = new Store(run !== null);
const panels = [
  new Memory(byId("pools"), store),
  new Lanes(byId("lanes"), byId("log"), store),
  new Traffic(byId("flows"), byId("flow-table"), store),
];
let span = 300;
let asked = false; // whether a frame is on its way

function tiles(view) {
  const flows = [...view.sample.flow.values()];
  const sum = (value) => flows.reduce((total, flow) => total + value(flow), 0);
  const units = view.sample.units;
  const bytes = (value) => units.reduce((total, unit) => total + value(unit) * unit.block_bytes, 0);
  const blocks = bytes((unit) => unit.blocks);
  const held = bytes((unit) => unit.models.reduce((total, model) => total + model.used + model.weights, 0) + unit.lent);
  const pale = bytes((unit) => unit.models.reduce((total, model) => total + model.cached, 0));
  const kept = blocks && pale ? `, ${showShare(pale / blocks)} cached` : "";
  const computed = sum((flow) => flow.computed);
  const cached = sum((flow) => flow.cached);
  const oldest = Math.max(0, ...flows.map((flow) => flow.oldest));
  const up = units.filter((unit) => unit.state === "up").length;
  const said = [
    ["rate", "tokens a second", showNumber(sum((flow) => flow.rate)), sum((flow) => flow.rate)],
    ["running", "requests running", showCount(sum((flow) => flow.running)), sum((flow) => flow.running)],
    ["waiting", oldest ? `waiting, the oldest for ${showSeconds(oldest)}` : "waiting", showCount(sum((flow) => flow.waiting)), sum((flow) => flow.waiting)],
    ["held", `of ${showBytes(blocks)} of memory in use${kept}`, blocks ? showShare(held / blocks) : "–", held],
    ["hits", "of prompts found cached", computed + cached ? showShare(cached / (computed + cached)) : "–", cached],
    ["up", units.length === 1 ? "unit up" : "units up", `${up} of ${units.length}`, up],
  ];
  keyed(byId("tiles"), said.map(([key]) => key), (key) => element("div", { data: { tile: key } }, element("dd"), element("dt")), (tile, key) => {
    const [, name, text, value] = said.find((one) => one[0] === key);
    setText(tile.children[1], name);
    setValue(tile.children[0], text, value);
  });
}

function legend() {
  keyed(byId("legend"), store.models, (name) => element("li", {}, element("i", { class: `swatch c${store.colour(name)}`, "aria-hidden": "true" }), element("span", {}, name)));
}

/** Draws what is known, once for all that has come since the last frame. */
function draw(now) {
  if (!store.samples.length) return;
  const place = store.virtual ? store.placeOf(now) : store.samples.length - 1;
  const sample = store.samples[place];
  const ends = store.virtual ? [store.samples[0].at, store.samples.at(-1).at] : [Math.max(now - span, Math.min(store.samples[0].at, store.records[0]?.at ?? now, now - LEAST_SECONDS)), now];
  const view = { sample, place, now, span: ends, drawn: store.version };
  document.body.classList.remove("empty");
  document.body.dataset.at = sample.at;
  tiles(view);
  legend();
  for (const panel of panels) panel.update(view);
  return view;
}

function live() {
  const chat = new Chat(byId("chat"), store);
  const fleet = new FleetTables(store);
  new LifeForm(byId("life-form"), byId("life-known"), byId("life"));
  let following = null;
  const awaited = new Set(["numbers", "models", "events"]);
  const reveal = (what) => {
    awaited.delete(what);
    if (!awaited.size) document.body.classList.remove("waiting");
  };
  setTimeout(() => document.body.classList.remove("waiting"), LONGEST_WAIT);

  const frame = () => {
    asked = false;
    const last = store.samples.at(-1);
    const view = last && draw(last.at);
    if (!view) return;
    fleet.update(view);
    reveal("numbers");
    if (store.records.length) reveal("events");
  };
  const soon = () => {
    if (!asked) {
      asked = true;
      requestAnimationFrame(frame);
    }
  };
  const tell = (what) => {
    const open = what === "open";
    const locked = [401, 403].includes(what?.status);
    document.body.dataset.link = open ? "open" : locked ? "locked" : "broken";
    setText(byId("link"), open ? "live" : locked ? "an admin key shows the fleet" : "not connected; trying again");
    setText(byId("link-problem"), open ? "" : what.message);
  };
  const listModels = async () => {
    try {
      const { data } = await askJson("/v1/models");
      for (const model of data) store.know(model.id);
      chat.offer(data.filter((model) => model.task === "generate").map((model) => model.id));
    } catch (error) {
      setText(byId("link-problem"), error.message);
    }
    reveal("models");
  };
  const begin = () => {
    following?.abort();
    following = new AbortController();
    const { signal } = following;
    follow("/admin/live", signal, ({ event, data }) => {
      const told = JSON.parse(data);
      store.take(event === "history" ? told.samples : [told]);
      const served = [...new Set(store.samples.at(-1)?.units.flatMap((unit) => unit.models.map((model) => model.model)) ?? [])].join("\n");
      if (served !== begin.served) {
        begin.served = served;
        listModels();
      }
      soon();
    }, tell);
    const records = [];
    follow("/admin/events", signal, ({ data }) => {
      if (!records.length) queueMicrotask(() => {
        store.record(records.splice(0));
        fleet.refresh();
        soon();
      });
      records.push(JSON.parse(data));
    }, () => {});
    listModels();
  };

  const keys = byId("keys");
  byId("key-open").addEventListener("click", () => {
    keys.querySelector("input").value = keyOf();
    keys.showModal();
  });
  keys.addEventListener("close", () => {
    if (keys.returnValue === "use") setKey(keys.querySelector("input").value.trim());
    else if (keys.returnValue === "forget") setKey("");
    else return;
    begin();
  });
  byId("span").addEventListener("change", (event) => {
    span = Number(event.target.value);
    store.version += 1;
    soon();
  });
  begin();
}

function play() {
  document.body.classList.remove("waiting");
  store.take(run.samples);
  store.record(run.records);
  document.body.classList.add("recorded");
  setText(byId("title"), run.title);
  document.title = run.title;
  const [first, last] = [store.samples[0]?.at ?? 0, store.samples.at(-1)?.at ?? 0];
  const slider = byId("slider");
  const button = byId("play");
  const speed = byId("speed");
  const length = Math.max(last - first, 1e-3);
  slider.min = first;
  slider.max = last;
  slider.step = length / 2000;
  speed.replaceChildren(...SPEEDS.map((one) => element("option", { value: one }, `${one}×`)));
  speed.value = SPEEDS.findLast((one) => one * SHOWN_SECONDS <= length) ?? 1;
  let now = first;
  let playing = false;
  let before = 0;
  const show = () => {
    draw(now);
    slider.value = now;
    slider.setAttribute("aria-valuetext", showMoment(now - first, true));
    setText(byId("moment"), `${showMoment(now, true)} of ${showMoment(last, true)}`);
    document.documentElement.style.setProperty("--played", `${(now - first) / length}`);
  };
  const step = (at) => {
    if (!playing) return;
    now = Math.min(last, now + ((at - before) / 1000) * Number(speed.value));
    before = at;
    show();
    if (now >= last) set(false);
    else requestAnimationFrame(step);
  };
  const set = (on) => {
    playing = on;
    setText(button, on ? "Pause" : "Play");
    if (!on) return;
    if (now >= last) now = first;
    before = performance.now();
    requestAnimationFrame(step);
  };
  button.addEventListener("click", () => set(!playing));
  slider.addEventListener("input", () => {
    now = Number(slider.value);
    show();
  });
  show();
}

if (run) play();
else live();

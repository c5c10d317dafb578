// Who waits and how fast answers come: charts and a table by model.
import { Chart } from "./charts.js";
import { nameCell } from "./memory.js";
import { element, keyed, setValue } from "./dom.js";
import { showCount, showMoment, showNumber, showSeconds, showShare } from "./format.js";

const CHARTS = [
  ["Tokens a second", "What each model makes, one upon the other.", (flow) => flow.rate, showNumber, true, "Ask a model, and its tokens are drawn here."],
  ["In the queue", "Requests that have come and are not yet worked on.", (flow) => flow.waiting, showNumber, false, "Nobody has waited yet."],
  ["Time to first token", "How long a stream waits for its first word.", (flow) => flow.ttft, showSeconds, false, "Known once somebody has streamed an answer."],
  ["Time per token", "How long each further one takes.", (flow) => flow.tpot, showSeconds, false, "Known once somebody has streamed an answer."],
];

const none = "–";
const COLUMNS_OF_TRAFFIC = [
  ["running", (flow) => flow.running, showCount, "kvloom_requests_running"],
  ["waiting", (flow) => flow.waiting, showCount, "kvloom_requests_waiting"],
  ["oldest", (flow) => flow.oldest, showSeconds, "kvloom_requests_waiting_oldest_seconds"],
  ["answered", (flow) => flow.requests, showCount, "kvloom_requests_total"],
  ["tokens/s", (flow) => flow.rate, showNumber, ""],
  ["first token", (flow) => flow.ttft, showSeconds, ""],
  ["per token", (flow) => flow.tpot, showSeconds, ""],
  ["prefix hits", (flow) => flow.hits, showShare, ""],
  ["preempted", (flow) => flow.preemptions, showCount, "kvloom_preemptions_total"],
  ["woven", (flow) => flow.away, showCount, "kvloom_away_sequences"],
];

export class Traffic {
  constructor(charts, table, store) {
    this.store = store;
    this.charts = CHARTS.map(([title, says, value, show, stacked, nothing]) => {
      const figure = element("figure", { class: "card" }, element("figcaption", {}, element("strong", {}, title), " ", element("span", { class: "soft" }, says)));
      charts.append(figure);
      const chart = new Chart(figure, { show, height: 10, nothing, virtual: store.virtual, read: (place) => this.read(place, value, show) });
      chart.host.setAttribute("role", "img");
      chart.host.setAttribute("aria-label", `${title} by model over time; the table has the numbers of now`);
      return { chart, value, stacked };
    });
    this.rows = element("tbody");
    const heads = ["model", ...COLUMNS_OF_TRAFFIC.map(([head]) => head)];
    table.append(element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))), this.rows);
  }

  update(view) {
    const { store } = this;
    const flows = view.sample.flow;
    const means = store.means(view.place);
    const names = store.models.filter((name) => flows.has(name));
    keyed(this.rows, names, (name) => element("tr", {}, nameCell(store, name), ...COLUMNS_OF_TRAFFIC.map(([, , , metric]) =>
      element("td", { data: metric ? { metric, model: name } : {} }))), (row, name) => {
      const now = flows.get(name);
      const flow = { ...now, ttft: means.get(name).ttft, tpot: means.get(name).tpot, hits: means.get(name).hits };
      COLUMNS_OF_TRAFFIC.forEach(([, value, show], i) => {
        const found = value(flow);
        setValue(row.children[i + 1], found === null ? none : show(found), found ?? "");
      });
    });
    if (view.drawn === this.drawn) return;
    this.drawn = view.drawn;
    const begin = store.virtual ? 0 : store.placeOf(view.span[0]);
    this.shown = store.samples.slice(begin);
    const times = this.shown.map((sample) => sample.at);
    for (const { chart, value, stacked } of this.charts) {
      chart.draw(times, store.models.map((name) => ({
        name,
        colour: `c${store.colour(name)}`,
        strength: stacked ? "b3" : "ff",
        stacked,
        points: true,
        values: this.shown.map((sample) => {
          const flow = sample.flow.get(name);
          return flow ? value(flow) : null;
        }),
      })), view.span);
    }
  }

  read(place, value, show) {
    const { at, flow } = this.shown[place];
    const parts = this.store.models.filter((name) => flow.has(name)).map((name) => {
      const found = value(flow.get(name));
      return `${name} ${found === null ? none : show(found)}`;
    });
    return [showMoment(at, this.store.virtual), ...parts].join(" · ");
  }
}

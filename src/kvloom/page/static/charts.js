// Charts over time, drawn by uPlot. All of a page show the same span.
import { element, setText } from "./dom.js";
import { showMoment } from "./format.js";

const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
const SYNC = "kvloom";
// page.css has these, too, for where a recording has come to
const SIDE_LEFT = 3.9; // rem
const SIDE_BELOW = 1.75;
const SIDE_RIGHT = 1.75;

const colours = new Map();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => colours.clear());

function colourOf(name) {
  if (!colours.has(name)) {
    colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  }
  return colours.get(name);
}

/** A chart in a figure. Its layers: {name, colour, values, strength, dash, stacked, width}. */
export class Chart {
  constructor(figure, { show, height = 12, virtual, most, read, steps, nothing }) {
    this.host = element("div", { class: "plot" });
    this.host.style.height = `${height}rem`;
    this.readout = element("p", { class: "readout", "aria-hidden": "true" });
    figure.append(this.host, this.readout);
    this.show = show;
    this.rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
    this.height = Math.round(height * this.rem);
    this.steps = steps;
    this.nothing = nothing; // what is said while there is nothing to draw
    this.virtual = virtual;
    this.most = most;
    this.read = read;
    this.span = [0, 1];
    this.shape = "";
    this.visible = true;
    new ResizeObserver(() => this.fit()).observe(this.host);
    new IntersectionObserver((seen) => {
      this.visible = seen.at(-1).isIntersecting;
      if (this.visible && this.late) this.draw(...this.late);
    }).observe(this.host);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.plot?.redraw());
  }

  room() {
    return Math.max(120, this.host.clientWidth);
  }

  fit() {
    if (this.plot && this.plot.width !== this.room()) this.plot.setSize({ width: this.room(), height: this.height });
  }

  /** Draws layers over times. Those that are stacked stand upon each other in their order. */
  draw(times, layers, span) {
    if (!this.visible) {
      this.late = [times, layers, span];
      return;
    }
    this.late = null;
    this.span = span;
    const sums = new Float64Array(times.length);
    const data = [times];
    for (const layer of layers) {
      if (!layer.stacked) {
        data.push(layer.values);
        continue;
      }
      data.push(Array.from(layer.values, (value, i) => (sums[i] += value ?? 0)));
    }
    if (layers.some((layer) => layer.stacked !== undefined && layer.values.some(Boolean))) delete this.host.dataset.nothing;
    else this.host.dataset.nothing = this.nothing;
    const shape = layers.map((layer) => `${layer.name} ${layer.colour} ${layer.strength} ${layer.stacked}`).join("\n");
    if (this.plot && shape === this.shape) {
      this.plot.setData(data);
      return;
    }
    this.shape = shape;
    this.plot?.destroy();
    this.plot = new uPlot(this.options(layers), data, this.host);
  }

  options(layers) {
    const axis = {
      stroke: () => colourOf("soft"),
      grid: { stroke: () => colourOf("line"), width: 1 },
      ticks: { show: false },
      font: `${0.78 * this.rem}px system-ui, sans-serif`,
    };
    const paint = (layer) => () => colourOf(layer.colour) + (layer.strength ?? "ff");
    const bands = [];
    let below = null;
    layers.forEach((layer, i) => {
      if (!layer.stacked) return;
      if (below !== null) bands.push({ series: [i + 1, below], fill: paint(layer) });
      below = i + 1;
    });
    const first = layers.findIndex((layer) => layer.stacked);
    return {
      width: this.room(),
      height: this.height,
      padding: [8, SIDE_RIGHT * this.rem, 0, 0],
      legend: { show: false },
      cursor: { y: false, sync: { key: SYNC }, drag: { x: false, y: false }, points: { show: false } },
      scales: {
        x: { time: false, range: () => this.span },
        y: { range: (plot, low, high) => [0, this.most?.() || 1.08 * high || 1] },
      },
      axes: [
        { ...axis, size: SIDE_BELOW * this.rem, space: 5 * this.rem, incrs: STEPS, values: (plot, marks) => marks.map((mark) => showMoment(mark, this.virtual)) },
        { ...axis, size: SIDE_LEFT * this.rem, space: 2.4 * this.rem, ...(this.steps && { incrs: this.steps }), values: (plot, marks) => marks.map((mark) => this.show(mark)) },
      ],
      bands,
      series: [
        {},
        ...layers.map((layer, i) => ({
          label: layer.name,
          stroke: layer.stacked && !layer.edge ? undefined : paint(layer),
          fill: layer.stacked && i === first ? paint(layer) : undefined,
          width: layer.stacked && !layer.edge ? 0 : (layer.width ?? 1.75),
          dash: layer.dash,
          spanGaps: true,
          points: { show: !layer.stacked && layer.points === true, size: 4 },
        })),
      ],
      hooks: {
        setCursor: [(plot) => setText(this.readout, plot.cursor.idx === null || plot.cursor.idx === undefined ? "" : this.read(plot.cursor.idx))],
      },
    };
  }
}

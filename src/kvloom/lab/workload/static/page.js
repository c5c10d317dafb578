"use strict";
// Draws the charts that the page's JSON describes: see Chart in page.py.
const digits = (value) => Number(value.toPrecision(3)).toLocaleString("en");
const SHOWN = {
  number: digits,
  share: (value) => digits(100 * value) + "%",
  seconds: (value) =>
    value >= 1 ? digits(value) + " s"
    : value === 0 ? "0 s"
    : value >= 1e-4 ? digits(1e3 * value) + " ms"
    : digits(1e6 * value) + " µs",
};
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name);

function options(chart, width) {
  const axis = (side) => ({
    label: side.label,
    stroke: () => colour("soft"),
    grid: { stroke: () => colour("line"), width: 1 },
    ticks: { show: false },
    labelSize: 20,
    values: (u, marks) => marks.map((mark) => (mark === null ? null : SHOWN[side.unit](mark))),
  });
  return {
    width,
    height: 300,
    scales: {
      x: { time: false, distr: chart.x.log ? 3 : 1, range: chart.x.range },
      y: { range: chart.y.range },
    },
    axes: [{ ...axis(chart.x), size: 30 }, { ...axis(chart.y), size: 64 }],
    series: [
      { label: chart.x.name, value: (u, value) => (value === null ? "–" : SHOWN[chart.x.unit](value)) },
      ...chart.series.map((series) => ({
        label: series.name,
        stroke: () => colour("c" + series.colour),
        fill: chart.filled ? () => colour("c" + series.colour) : undefined,
        width: 2,
        dash: series.dash,
        spanGaps: true,
        points: { show: false },
        value: (u, value, i, at) => {
          const own = at === null ? null : series.own ? series.own[at] : value;
          return own === null || own === undefined ? "–" : SHOWN[chart.y.unit](own);
        },
      })),
    ],
  };
}

const figures = document.querySelectorAll("figure");
const plots = JSON.parse(document.getElementById("charts").textContent).map((chart, i) => {
  const room = () => Math.max(200, figures[i].clientWidth - 24);
  const data = [chart.places, ...chart.series.map((series) => series.values)];
  const plot = new uPlot(options(chart, room()), data, figures[i]);
  new ResizeObserver(() => {
    if (plot.width !== room()) plot.setSize({ width: room(), height: 300 });
  }).observe(figures[i]);
  return plot;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.redraw()));

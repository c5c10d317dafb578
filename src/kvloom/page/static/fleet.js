// Models, units and the program, with what an administrator can do. Each order shows the command that does the same.
import { askJson, keyOf } from "./source.js";
import { byId, element, keyed, setText } from "./dom.js";
import { nameCell } from "./memory.js";

const DEFAULT_ORIGIN = "http://127.0.0.1:8000";
const PROGRAMS = ["data_parallel", "least_loaded", "freest", "infaas", "disaggregate", "cache_aware_disaggregate", "balanced", "cache_aware", "migrate_context"];
const ORDERS = {
  drain: "gets no new request; what runs there ends or moves.",
  admit: "gets requests again.",
  restart: "is drained, gets a new process, and is admitted; no request is lost.",
};

/** A word as a shell takes it. */
export const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);

export function commandOf(...words) {
  const options = location.origin === DEFAULT_ORIGIN ? [] : ["--url", location.origin];
  if (keyOf()) options.push("--admin-key-file", "FILE");
  return ["kvloom", ...words, ...options].map(quoted).join(" ");
}

export class FleetTables {
  constructor(store) {
    this.store = store;
    this.states = new Map();
    this.dialog = byId("order");
    byId("order-no").addEventListener("click", () => this.dialog.close());
    byId("order-yes").addEventListener("click", () => this.carryOut());
    byId("add-model").addEventListener("submit", (event) => {
      event.preventDefault();
      const { name, path, unit } = event.target.elements;
      const words = ["model", "add", `${name.value}=${path.value}`, ...(unit.value ? ["--unit", unit.value] : [])];
      const model = { name: name.value, path: path.value };
      this.order(`${name.value} is served beside the others, once its unit has restarted with it.`, words, "/admin/models", unit.value ? { model, unit: unit.value } : { model });
    });
    byId("set-program").addEventListener("submit", (event) => {
      event.preventDefault();
      const { program, options } = event.target.elements;
      const given = {};
      for (const pair of options.value.split(/[\s,]+/).filter(Boolean)) {
        const at = pair.indexOf("=");
        const value = pair.slice(at + 1);
        given[pair.slice(0, at)] = value !== "" && !Number.isNaN(Number(value)) ? Number(value) : value;
      }
      const words = ["program", "set", program.value, ...Object.entries(given).flatMap(([key, value]) => ["--option", `${key}=${value}`])];
      this.order(`Requests from now on run ${program.value}; no engine starts again.`, words, "/admin/program", { name: program.value, options: given });
    });
    byId("programs").replaceChildren(...PROGRAMS.map((name) => element("option", { value: name })));
  }

  update(view) {
    const { units } = view.sample;
    keyed(byId("units"), units.map((unit) => unit.unit), (name) => this.unitRow(name), (row, name) => {
      const unit = units.find((one) => one.unit === name);
      const cells = row.children;
      setText(cells[1], unit.state);
      cells[1].dataset.state = unit.state;
      setText(cells[2], unit.models.map((model) => model.model).join(", ") || "–");
      const buttons = cells[3].querySelectorAll("button");
      const resting = ["draining", "drained"].includes(unit.state);
      buttons[0].disabled = unit.state !== "up";
      buttons[1].disabled = !resting;
      buttons[2].disabled = !["up", "draining", "drained"].includes(unit.state);
    });
    const names = units.map((unit) => unit.unit).join("\n");
    if (names !== this.names) {
      this.names = names;
      byId("unit-names").replaceChildren(...units.map((unit) => element("option", { value: unit.unit })));
      this.refresh();
    }
  }

  unitRow(name) {
    const buttons = Object.entries(ORDERS).map(([verb, does]) => element("button", { type: "button", "aria-label": `${verb} ${name}`,
      onclick: () => this.order(`${name} ${does}`, ["unit", verb, name], `/admin/units/${encodeURIComponent(name)}/${verb}`, {}) }, verb));
    return element("tr", { data: { unit: name } }, element("th", { scope: "row" }, name), element("td"), element("td"), element("td", { class: "orders" }, ...buttons));
  }

  async refresh() {
    try {
      const [models, program] = await Promise.all([askJson("/admin/models"), askJson("/admin/program")]);
      keyed(byId("models"), models.map((model) => model.name), (name) => element("tr", { data: { model: name } }, nameCell(this.store, name), element("td", { class: "path" }), element("td"),
        element("td", { class: "orders" }, element("button", { type: "button", "aria-label": `remove ${name}`,
          onclick: () => this.order(`${name} is served no more, once its requests have ended.`, ["model", "remove", name], `/admin/models/${name.split("/").map(encodeURIComponent).join("/")}/remove`, {}) }, "remove"))),
      (row, name) => {
        const model = models.find((one) => one.name === name);
        setText(row.children[1], model.path);
        setText(row.children[2], Object.entries(model.units).map(([unit, state]) => `${unit} ${state}`).join(", "));
      });
      const options = Object.entries(program.options).map(([key, value]) => ` ${key}=${value}`).join("");
      setText(byId("program-now"), program.name + options + (program.probation ? " (on probation for a minute)" : ""));
    } catch (error) {
      setText(byId("program-now"), error.message);
    }
  }

  order(says, words, path, body) {
    this.asked = { path, body };
    setText(byId("order-says"), says);
    setText(byId("order-command"), commandOf(...words));
    setText(byId("order-status"), "");
    byId("order-yes").disabled = false;
    this.dialog.showModal();
  }

  async carryOut() {
    const { asked } = this;
    byId("order-yes").disabled = true;
    setText(byId("order-status"), "It is being done …");
    try {
      await askJson(asked.path, { body: asked.body });
      if (asked === this.asked) setText(byId("order-status"), "Done.");
      if (asked === this.asked && this.dialog.open) this.dialog.close();
    } catch (error) {
      if (asked === this.asked) setText(byId("order-status"), error.message);
    }
    this.refresh();
  }
}

// Fills the page: tables, legend, controls. Texts reach the page as text nodes only.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const shown = data.groups.map(() => true);
  let styled = charts.styles(data.groups, data.by);

  function el(name, attributes = {}, ...children) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
    return element;
  }
  function svg(name, attributes = {}, ...children) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  const NOTHING = "–";
  const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(3);
  const real = (value) => (value === null || value === undefined ? NOTHING : value.toFixed(3).replace("-", "−"));
  const whole = (value) => (value === null || value === undefined ? NOTHING : Math.round(value).toLocaleString("en"));
  function quantity(value) {
    if (value === null || value === undefined) return NOTHING;
    for (const [unit, name] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (Math.abs(value) >= 0.9995 * unit) return `${Number((value / unit).toPrecision(3))}${name}`;
    return String(Number(value.toPrecision(3)));
  }
  const counts = (lost) => Object.entries(lost).map(([status, count]) => `${count} ${status}`).join(", ");
  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

  function table(id, caption, heads, rows) {
    const head = heads.map((text) => el("th", { scope: "col", ...(text.words ? { class: text.words } : {}) }, text.text ?? text));
    byId(id).replaceChildren(el("caption", {}, caption), el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
  }
  const cell = (text, ...more) => el("td", {}, text, ...more);
  const quiet = (text, name = "") => el("span", { class: `quiet ${name}` }, text);

  function swatch(i) {
    const { colour, dash } = styled[i];
    return svg("svg", { class: "swatch", viewBox: "0 0 26 10", "aria-hidden": "true" },
      svg("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: colour, "stroke-width": 2.5, "stroke-dasharray": charts.PATTERNS[dash] }));
  }
  const groupHead = (i) => el("th", { scope: "row" }, swatch(i), data.groups[i].label);

  const half = (middle, high) => (high === null ? [] : [quiet(` ±${(high - middle).toFixed(3)}`, "small")]);

  function results() {
    const heads = ["group", "finished", ...data.metrics.map((metric) => metric.title), "solved", "steps to solve"];
    const rows = data.groups.map((group, i) => {
      const lost = Object.entries(group.left_out).map(([status, count]) => quiet(`${count} ${status}`, "small block"));
      const finished = cell(`${group.finished}/${group.runs}`, ...lost);
      const cells = data.metrics.map((metric) => {
        const { mean, high, n, ceiling } = group.cells[metric.name];
        const parts = [el("span", { "data-group": i, "data-metric": metric.name }, real(mean))];
        parts.push(...half(mean, high));
        if (mean !== null && n !== group.finished) parts.push(quiet(` n=${n}`, "small"));
        if (ceiling !== null) parts.push(quiet(`≤ ${real(ceiling)}`, "small block"));
        return cell(...parts);
      });
      const { solved } = group;
      const rate = solved ? [`${solved.successes}/${solved.n}`, quiet(` ${solved.low.toFixed(2)} to ${solved.high.toFixed(2)}`, "small")] : [NOTHING];
      return el("tr", {}, groupHead(i), finished, ...cells, cell(...rate), cell(group.steps_to_solve === null ? (solved ? "never" : NOTHING) : whole(group.steps_to_solve)));
    });
    table("results-table", data.metrics.every((metric) => metric.measure === "accuracy") ? "Test accuracy" : "Final metrics", heads, rows);
  }

  function forest({ difference, difference_low: low, difference_high: high }, reach, colour) {
    const x = (value) => 85 + 82 * Math.max(-1, Math.min(1, value / reach));
    const drawing = svg("svg", { class: "forest", viewBox: "0 0 170 18", "aria-hidden": "true" });
    drawing.append(svg("line", { x1: 85, x2: 85, y1: -4, y2: 22, stroke: "var(--muted)", "stroke-width": 1, "stroke-dasharray": "2 2" }));
    if (low !== null) drawing.append(svg("line", { x1: x(low), x2: x(high), y1: 9, y2: 9, stroke: colour, "stroke-width": 1.5 }));
    drawing.append(svg("circle", { cx: x(difference), cy: 9, r: 3.5, fill: colour }));
    return drawing;
  }

  function differences() {
    const metric = byId("metric").value;
    const cells = data.groups.map((group) => group.cells[metric]);
    const ends = cells.flatMap((one) => (one.difference === null ? [] : [one.difference, one.difference_low ?? 0, one.difference_high ?? 0]));
    // An interval of two seeds can be many times as wide as any accuracy; the drawing is cut there, the numbers are not.
    const widest = Math.max(1e-9, Math.min(Math.max(...ends.map(Math.abs), 0), metric.endsWith("accuracy") ? 1 : Infinity));
    const step = 10 ** Math.floor(Math.log10(widest));
    const reach = Math.ceil(widest / step) * step;
    const heads = ["group", "n", "mean", "least to greatest", "pairs", "difference", `−${quantity(reach)} to +${quantity(reach)}`, "p", { text: "verdict", words: "words" }];
    const rows = data.groups.map((group, i) => {
      const one = cells[i];
      const compared = one.difference !== null;
      return el("tr", {}, groupHead(i), cell(one.n), cell(real(one.mean), ...half(one.mean, one.high)), cell(one.min === null ? NOTHING : `${real(one.min)} to ${real(one.max)}`),
        cell(compared ? one.pairs : NOTHING), cell(compared ? signed(one.difference) : NOTHING, ...half(one.difference, one.difference_high)),
        cell(compared ? forest(one, reach, styled[i].colour) : ""), cell(one.told ? `${Number(one.p.toPrecision(2))}${one.p < data.level ? "*" : ""}` : NOTHING), el("td", { class: "words quiet" }, one.verdict));
    });
    table("differences-table", `Compared with ${data.baseline}`, heads, rows);
  }

  function costs() {
    const columns = [["parameters", "parameters"], ["parameters_non_embedding", "without embedding"], ["train_flops", "training FLOPs"], ["tokens", "tokens trained on"],
      ["tokens_per_second", "tokens/s"], ["seconds", "seconds"], ["peak_bytes", "peak bytes"]];
    const lengths = [...new Set(data.groups.flatMap((group) => Object.keys(group.state_bytes)))].sort((a, b) => a - b);
    const keys = [...columns.filter(([key]) => data.groups.some((group) => key in group.costs)), ...lengths.map((length) => [`state_bytes.${length}`, `state bytes at ${length}`])];
    const rows = data.groups.map((group, i) => {
      const base = data.groups[group.compared_with]?.costs ?? {};
      return el("tr", {}, groupHead(i), ...keys.map(([key]) => {
        const value = group.costs[key];
        const ratio = value / base[key] - 1;
        const off = Number.isFinite(ratio) && Math.abs(ratio) > 0.02 ? [el("span", { class: "off" }, `${ratio < 0 ? "−" : "+"}${Math.round(100 * Math.abs(ratio))} %`)] : [];
        return cell(quantity(value), ...off);
      }));
    });
    table("costs-table", "What each group spends", ["group", ...keys.map(([, text]) => text)], rows);
  }

  function runs() {
    const marks = { finished: "●", running: "◐", planned: "○", failed: "✕", diverged: "↗", interrupted: "◌" };
    const heads = ["run", { text: "group", words: "words narrow" }, "seed", { text: "status", words: "words narrow" }, "steps", "seconds", { text: "stopped", words: "words narrow" }, { text: "settings that differ", words: "words" }, { text: "reason", words: "words" }];
    const rows = data.runs.map((run) =>
      el("tr", {}, el("th", { scope: "row" }, el("code", {}, run.run_id)),
        el("td", { class: "words narrow" }, run.group === null ? NOTHING : data.groups[run.group].label), cell(run.seed),
        el("td", { class: "words narrow" }, el("span", { "aria-hidden": "true" }, `${marks[run.status] ?? "?"} `), run.status),
        cell(whole(run.steps)), cell(run.seconds === null ? NOTHING : quantity(run.seconds)), el("td", { class: "words narrow" }, run.stopped ?? NOTHING),
        el("td", { class: "words quiet" }, run.differs), el("td", { class: "words quiet" }, run.reason)));
    table("runs-table", `${plural(data.runs.length, "run")}: ${[`${data.finished} finished`, counts(data.left_out)].filter(Boolean).join(", ")}`, heads, rows);
  }

  function notApplicable() {
    byId("not-applicable").hidden = !data.not_applicable.length;
    byId("not-applicable").querySelector("ul").replaceChildren(...data.not_applicable.map((one) => el("li", {}, el("code", {}, one.overrides), quiet(` ${one.reason}`))));
  }

  function legend() {
    const labels = data.groups.map((group, i) => {
      const box = el("input", { type: "checkbox" });
      box.checked = shown[i];
      box.addEventListener("change", () => { shown[i] = box.checked; drawCharts(); });
      return el("label", {}, box, swatch(i), group.label);
    });
    byId("legend").replaceChildren(el("legend", {}, "Groups drawn"), ...labels);
  }

  function options(id, values, chosen) {
    byId(id).replaceChildren(...values.map(([value, text]) => el("option", { value, ...(value === chosen ? { selected: "" } : {}) }, text)));
  }
  const distinct = (values) => [...new Set(values)];
  const onChange = (id, action) => byId(id).addEventListener("change", action);

  function sliceSets() {
    const name = byId("slice").value;
    options("slice-set", data.slices.filter((one) => one.name === name).map((one) => [`${one.axis} ${one.length}`, `${one.axis} ${one.length}`]), byId("slice-set").value);
  }

  const drawings = {
    "length-figure": () => charts.length(data, styled, shown, byId("axis").value),
    "curve-figure": () => charts.curve(data, styled, shown, byId("curve").value, byId("x").value),
    "slice-figure": () => charts.slice(data, styled, shown, byId("slice").value, byId("slice-set").value),
  };
  function drawCharts() {
    for (const [id, action] of Object.entries(drawings)) if (!byId(id).hidden) action();
  }
  function draw() {
    styled = charts.styles(data.groups, data.by);
    results(); costs(); runs(); notApplicable(); legend();
    if (data.metrics.length) differences();
    drawCharts();
  }

  byId("study").textContent = data.study;
  const lost = counts(data.left_out);
  byId("summary").textContent = `${plural(data.groups.length, "group")} by ${data.by.join(" and ")}; ${data.finished} of ${plural(data.runs.length, "run")} finished` +
    `${lost ? ` (left out: ${lost})` : ""}. Every number: ${data.averages_over}. Baseline: ${data.baseline}.`;
  byId("made").textContent = `Made by attnlab on ${data.made} from all ${plural(data.runs.length, "run")} of the study.`;
  byId("results-caption").textContent = data.captions.results;
  byId("differences-caption").textContent = data.captions.differences;
  byId("csv").textContent = data.csv;
  byId("latex").textContent = data.latex;

  const axes = distinct(data.metrics.filter((metric) => metric.measure === "accuracy").map((metric) => metric.axis));
  const names = distinct(data.curves.map((one) => one.name));
  options("metric", data.metrics.map((metric) => [metric.name, metric.title]), data.metrics[0]?.name);
  options("axis", axes.map((axis) => [axis, axis]));
  options("curve", names.map((name) => [name, name]), names.find((name) => name === "validation/accuracy"));
  options("slice", distinct(data.slices.map((one) => one.name)).map((name) => [name, name.replaceAll("_", " ")]));
  sliceSets();
  byId("differences").hidden = !data.metrics.length;
  byId("length-figure").hidden = !axes.length;
  byId("curve-figure").hidden = !names.length;
  byId("slice-figure").hidden = !data.slices.length;
  byId("charts").hidden = !axes.length && !names.length && !data.slices.length;

  onChange("metric", differences);
  onChange("axis", drawings["length-figure"]);
  onChange("curve", drawings["curve-figure"]);
  onChange("x", drawings["curve-figure"]);
  onChange("slice", () => { sliceSets(); drawings["slice-figure"](); });
  onChange("slice-set", drawings["slice-figure"]);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  draw();
  document.body.dataset.ready = "true";
})();

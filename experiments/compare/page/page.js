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
  // A perplexity or a ratio: three decimals, fewer of a large one, three digits of a small one.
  function factor(value) {
    if (value >= 9999.5) return value < 1e15 ? quantity(value) : value.toExponential(0);
    const [decimals] = [[3, 10], [2, 100], [1, 1000], [0, Infinity]].find(([digits, end]) => Number(value.toFixed(digits)) < end);
    return value >= 0.0995 || value === 0 ? value.toFixed(decimals) : String(Number(value.toPrecision(3)));
  }
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
    const { colour, dash, symbol } = styled[i];
    return svg("svg", { class: "swatch", viewBox: "0 0 26 10", "aria-hidden": "true" },
      svg("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: colour, "stroke-width": 2.5, "stroke-dasharray": charts.PATTERNS[dash] }),
      svg("path", { d: charts.MARKS[symbol], fill: colour, stroke: "var(--paper)", "stroke-width": 0.7 }));
  }
  const groupHead = (i) => el("th", { scope: "row" }, swatch(i), data.groups[i].label);

  // How a cell writes its numbers: those of what is compared by ratios are factors, and so is the half of an interval.
  function writing(cell) {
    const ratio = cell.compared_as === "ratio";
    const number = (value) => (value === null ? NOTHING : ratio ? factor(value) : real(value));
    return {
      number,
      difference: (value) => (ratio ? `×${factor(value)}` : signed(value)),
      half: (middle, high) => (high === null ? [] : [quiet(ratio ? ` ×÷${factor(high / middle)}` : ` ±${(high - middle).toFixed(3)}`, "small")]),
    };
  }

  function results() {
    const heads = ["group", "finished", ...data.metrics.map((metric) => metric.title), "solved", "steps to solve"];
    const rows = data.groups.map((group, i) => {
      const lost = Object.entries(group.left_out).map(([status, count]) => quiet(`${count} ${status}`, "small block"));
      const finished = cell(`${group.finished}/${group.runs}`, ...lost);
      const cells = data.metrics.map((metric) => {
        const { mean, high, n, ceiling } = group.cells[metric.name];
        const { number, half } = writing(group.cells[metric.name]);
        const parts = [el("span", { "data-group": i, "data-metric": metric.name }, number(mean))];
        parts.push(...half(mean, high));
        if (mean !== null && n !== group.finished) parts.push(quiet(` n=${n}`, "small"));
        if (ceiling !== null) parts.push(quiet(`≤ ${real(ceiling)}`, "small block"));
        return cell(...parts);
      });
      const { solved } = group;
      const rate = solved ? [`${solved.successes}/${solved.n}`, quiet(` ${solved.low.toFixed(2)} to ${solved.high.toFixed(2)}`, "small")] : [NOTHING];
      return el("tr", {}, groupHead(i), finished, ...cells, cell(...rate), cell(group.steps_to_solve === null ? (solved ? "never" : NOTHING) : whole(group.steps_to_solve)));
    });
    const [measure, ...others] = distinct(data.metrics.map((metric) => metric.measure));
    const caption = measure && !others.length ? `Test ${measure.replaceAll("_", " ")}` : "Final metrics";
    const lower = data.metrics.length && data.metrics.every((metric) => metric.better === "lower");
    table("results-table", `${caption}${lower ? "; lower is better" : ""}`, heads, rows);
  }

  // Ratios are drawn in logarithms, so that a half lies as far from the middle as a double.
  const place = (one, value) => (one.compared_as === "ratio" ? Math.log(value) : value);

  function forest(one, reach, colour) {
    const x = (value) => 85 + 82 * Math.max(-1, Math.min(1, place(one, value) / reach));
    const drawing = svg("svg", { class: "forest", viewBox: "0 0 170 18", "aria-hidden": "true" });
    drawing.append(svg("line", { x1: 85, x2: 85, y1: -4, y2: 22, stroke: "var(--muted)", "stroke-width": 1, "stroke-dasharray": "2 2" }));
    if (one.difference_low !== null)
      drawing.append(svg("line", { x1: x(one.difference_low), x2: x(one.difference_high), y1: 9, y2: 9, stroke: colour, "stroke-width": 1.5 }));
    drawing.append(svg("circle", { cx: x(one.difference), cy: 9, r: 3.5, fill: colour }));
    return drawing;
  }

  // How far the drawings reach to both sides, in `place`, and how their head says so.
  function reachOf(cells, metric) {
    const compared = cells.filter((one) => one.difference !== null);
    const ends = compared.flatMap((one) => [one.difference, one.difference_low, one.difference_high].filter((end) => end !== null).map((end) => Math.abs(place(one, end))));
    const middles = compared.map((one) => Math.abs(place(one, one.difference)));
    // An interval of two seeds can be many times as wide as any accuracy; the drawing is cut there, the numbers are not.
    const cut = metric.measure === "accuracy" ? 1 : metric.ratio ? Math.max(3 * Math.max(0, ...middles), Math.log(1.1)) : Infinity;
    const widest = Math.max(1e-9, Math.min(Math.max(0, ...ends), cut));
    const better = metric.better === "lower" ? ", left is better" : "";
    if (metric.ratio) {
      const most = [1.1, 1.2, 1.5, 2, 3, 5].find((end) => Math.log(end) >= widest) ?? Number(Math.exp(widest).toPrecision(1)) + 10 ** Math.floor(widest / Math.LN10);
      return [Math.log(most), `÷${quantity(most)} to ×${quantity(most)}${better}`];
    }
    const step = 10 ** Math.floor(Math.log10(widest));
    const reach = Math.ceil(widest / step) * step;
    return [reach, `−${quantity(reach)} to +${quantity(reach)}${better}`];
  }

  function differences() {
    const metric = data.metrics.find((one) => one.name === byId("metric").value);
    const cells = data.groups.map((group) => group.cells[metric.name]);
    const [reach, span] = reachOf(cells, metric);
    const heads = ["group", "n", "mean", "least to greatest", "pairs", metric.ratio ? "ratio" : "difference", span, "p", { text: "verdict", words: "words" }];
    const rows = data.groups.map((group, i) => {
      const one = cells[i];
      const { number, difference, half } = writing(one);
      const compared = one.difference !== null;
      return el("tr", {}, groupHead(i), cell(one.n), cell(number(one.mean), ...half(one.mean, one.high)), cell(one.min === null ? NOTHING : `${number(one.min)} to ${number(one.max)}`),
        cell(compared ? one.pairs : NOTHING), cell(compared ? difference(one.difference) : NOTHING, ...half(one.difference, one.difference_high)),
        cell(compared ? forest(one, reach, styled[i].colour) : ""), cell(one.told ? `${Number(one.p.toPrecision(2))}${one.p < data.level ? "*" : ""}` : NOTHING), el("td", { class: "words quiet" }, one.verdict));
    });
    table("differences-table", `Compared with ${data.baseline}${metric.better === "lower" ? "; lower is better" : ""}`, heads, rows);
  }

  // Keys and titles of what the groups spend.
  const spent = (() => {
    const columns = [["parameters", "parameters"], ["parameters_non_embedding", "without embedding"], ["train_flops", "training FLOPs"], ["tokens", "tokens trained on"],
      ["tokens_per_second", "tokens/s"], ["seconds", "seconds"], ["peak_bytes", "peak bytes"]];
    const known = [...new Set(data.groups.flatMap((group) => Object.keys(group.costs)))];
    const atLengths = (name, text) =>
      known.filter((key) => key.startsWith(`${name}.`)).map((key) => Number(key.slice(name.length + 1))).sort((a, b) => a - b).map((length) => [`${name}.${length}`, `${text} at ${length}`]);
    return [...columns.filter(([key]) => known.includes(key)), ...atLengths("state_bytes", "state bytes"), ...atLengths("read_bytes", "bytes read a token")];
  })();

  function costs() {
    const keys = spent;
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
    const marks = { finished: "●", running: "◐", planned: "○", failed: "✕", diverged: "↗", interrupted: "◌", "below the gate": "▽" };
    const heads = ["run", { text: "group", words: "words narrow" }, "seed", { text: "status", words: "words narrow" }, "steps", "seconds", { text: "stopped", words: "words narrow" }, { text: "settings that differ", words: "words" }, { text: "reason", words: "words" }];
    const rows = data.runs.map((run) =>
      el("tr", {}, el("th", { scope: "row" }, el("code", {}, run.run_id)),
        el("td", { class: "words narrow" }, run.group === null ? NOTHING : data.groups[run.group].label), cell(run.seed),
        el("td", { class: "words narrow" }, el("span", { "aria-hidden": "true" }, `${marks[run.status] ?? "?"} `), run.status),
        cell(whole(run.steps)), cell(run.seconds === null ? NOTHING : quantity(run.seconds)), el("td", { class: "words narrow" }, run.stopped ?? NOTHING),
        el("td", { class: "words quiet" }, run.differs), el("td", { class: "words quiet" }, run.reason)));
    table("runs-table", `${plural(data.runs.length, "run")}: ${[`${data.finished} finished`, counts(data.left_out)].filter(Boolean).join(", ")}`, heads, rows);
  }

  // Tables, not drawings: every number can be read, by eye or ear.
  function grid() {
    const hotFrom = matchMedia("(prefers-color-scheme: dark)").matches ? 0.52 : 0.65;
    const panels = data.grid.groups.flatMap((panel, i) => (shown[i] ? [[panel, i]] : [])).map(([{ trained, cells }, i]) => {
      // Behind this column sequences are longer than in training.
      const last = data.grid.lengths.findLastIndex((length) => length <= trained.at(-1));
      const mark = (j) => (j === last ? "last" : "");
      const heads = data.grid.lengths.map((length, j) => el("th", { scope: "col", class: mark(j), ...(j === last ? { title: "trained length" } : {}) }, length));
      const rows = cells.map((row, k) => el("tr", {}, el("th", { scope: "row" }, data.grid.bins[k]), ...row.map((one, j) => {
        const shade = one ? { style: `background: color-mix(in srgb, var(--heat) ${Math.round(100 * one.mean)}%, var(--paper))` } : {};
        return el("td", { class: `${mark(j)} ${one && one.mean > hotFrom ? "hot" : ""}`, ...shade }, one ? one.mean.toFixed(2) : NOTHING);
      })));
      return el("table", { "data-group": i }, el("caption", {}, swatch(i), data.groups[i].label), el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "depth"), ...heads)), el("tbody", {}, ...rows));
    });
    const column = Math.max(2, 0.5 * String(data.grid.lengths.at(-1)).length);
    byId("grid").style.setProperty("--panel", `${2.9 + column * data.grid.lengths.length}rem`);
    byId("grid").replaceChildren(...panels);
  }

  function factorTable() {
    const { lines } = data.spectra;
    const count = Math.max(0, ...lines.map((line) => line.factors.length));
    const unscaled = lines.some((line) => line.unscaled);
    const heads = ["scheme", "at length", "cos, sin ×", ...(unscaled ? ["unscaled tokens"] : []), ...Array.from({ length: count }, (_, i) => i)];
    const rows = lines.map((line) => el("tr", {}, el("th", { scope: "row" }, line.label), cell(whole(line.tested)), cell(real(line.temperature)), ...(unscaled ? [cell(line.unscaled)] : []),
      ...Array.from({ length: count }, (_, i) => cell(i in line.factors ? line.factors[i]?.toFixed(2) ?? "∞" : ""))));
    table("factors-table", "How many times slower than under rope each pair turns; ∞: not at all", heads, rows);
  }

  function selected() {
    const found = data.selections[byId("selection-run").value];
    byId("selection-panels").replaceChildren(...found.layers.map((layer, i) => el("figure", {}, el("figcaption", {}, el("h3", {}, selection.title(found, layer))), el("div", { id: `selection-${i}`, class: "chart", role: "img", "aria-label": selection.title(found, layer) }))));
    found.layers.forEach((layer, i) => selection.draw(`selection-${i}`, found, layer));
    byId("selection-caption").textContent = `Run ${found.run_id} (${data.groups[found.group].label}, seed ${found.seed}) over test sequence ${found.index}. ${selection.reading(found)}`;
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
    const choose = (text, on) => {
      const button = el("button", { type: "button" }, text);
      button.addEventListener("click", () => {
        shown.fill(on);
        for (const box of byId("legend").querySelectorAll("input")) box.checked = on;
        drawCharts();
      });
      return button;
    };
    byId("legend").replaceChildren(el("legend", {}, "Groups drawn: ", choose("all", true), choose("none", false)), ...labels);
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

  function axes() {
    const found = distinct(data.charted.filter((metric) => metric.measure === byId("measure").value).map((metric) => metric.axis));
    options("axis", found.map((axis) => [axis, axis]), byId("axis").value);
  }

  const drawings = {
    "length-figure": () => charts.length(data, styled, shown, byId("measure").value, byId("axis").value),
    "cost-figure": () => charts.cost(data, styled, shown, data.metrics.find((metric) => metric.name === byId("gain").value), spent.find(([key]) => key === byId("cost").value)),
    "grid-figure": grid,
    "wavelength-figure": () => charts.wavelengths(data, styled, shown),
    "factor-figure": () => charts.factors(data, styled, shown),
    "curve-figure": () => charts.curve(data, styled, shown, byId("curve").value, byId("x").value),
    "slice-figure": () => charts.slice(data, styled, shown, byId("slice").value, byId("slice-set").value),
  };
  function drawCharts() {
    for (const [id, action] of Object.entries(drawings)) if (!byId(id).hidden) action();
  }
  function draw() {
    styled = charts.styles(data.groups, data.by);
    results(); costs(); runs(); notApplicable(); legend();
    if (data.spectra) factorTable();
    if (data.metrics.length) differences();
    if (data.selections.length) selected();
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

  const measures = distinct(data.charted.map((metric) => metric.measure));
  const names = distinct(data.curves.map((one) => one.name));
  options("metric", data.metrics.map((metric) => [metric.name, metric.title]), data.metrics[0]?.name);
  options("measure", measures.map((measure) => [measure, measure]), data.metrics[0]?.measure);
  options("gain", data.metrics.map((metric) => [metric.name, metric.title]), data.metrics[0]?.name);
  // What decides at inference: the state, first at the length of training.
  options("cost", spent, (spent.find(([key]) => data.trained.some((length) => key === `state_bytes.${length}`)) ?? spent.at(-1))?.[0]);
  axes();
  options("curve", names.map((name) => [name, name]), names.find((name) => name === "validation/accuracy"));
  options("slice", distinct(data.slices.map((one) => one.name)).map((name) => [name, name.replaceAll("_", " ")]));
  sliceSets();
  options("selection-run", data.selections.map((one, i) => [i, `${data.groups[one.group].label}, seed ${one.seed}`]));
  byId("selection").hidden = document.querySelector("nav a[href='#selection']").hidden = !data.selections.length;
  byId("differences").hidden = !data.metrics.length;
  const pairs = data.spectra?.lines.length;
  const leftOut = data.spectra?.left_out ?? [];
  byId("length-figure").hidden = !measures.length;
  byId("cost-figure").hidden = !data.metrics.length || !spent.length;
  byId("grid-figure").hidden = !data.grid;
  byId("wavelength-figure").hidden = byId("factor-figure").hidden = !pairs;
  byId("factors").hidden = !data.spectra;
  byId("factors").querySelector("details").hidden = !pairs;
  byId("spectra-left-out").hidden = !leftOut.length;
  byId("spectra-left-out").textContent = leftOut.map((one) => `Frequencies of ${one.label} are not shown: ${one.reason}.`).join(" ");
  byId("curve-figure").hidden = !names.length;
  byId("slice-figure").hidden = !data.slices.length;
  byId("charts").hidden = !measures.length && !names.length && !data.slices.length && !data.spectra;

  onChange("metric", differences);
  onChange("measure", () => { axes(); drawings["length-figure"](); });
  onChange("axis", drawings["length-figure"]);
  onChange("gain", drawings["cost-figure"]);
  onChange("cost", drawings["cost-figure"]);
  onChange("curve", drawings["curve-figure"]);
  onChange("selection-run", selected);
  onChange("x", drawings["curve-figure"]);
  onChange("slice", () => { sliceSets(); drawings["slice-figure"](); });
  onChange("slice-set", drawings["slice-figure"]);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  draw();
  document.body.dataset.ready = "true";
})();

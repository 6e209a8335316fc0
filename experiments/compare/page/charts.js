// Draws the charts: what a group looks like, and one function a chart. Numbers come from the data as they are.
"use strict";

const charts = (() => {
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const PATTERNS = { solid: "", dash: "6 4", dot: "2 3", dashdot: "7 3 2 3", longdash: "10 4", longdashdot: "10 3 2 3" };
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon"];
  const COLOURS = 12;
  // The same markers for the legend, in a box of 26 by 10.
  const MARKS = {
    circle: "M9.8,5a3.2,3.2 0 1 0 6.4,0a3.2,3.2 0 1 0 -6.4,0Z", square: "M10,2h6v6h-6Z", diamond: "M13,1l4,4l-4,4l-4,-4Z", "triangle-up": "M13,1l4,7h-8Z",
    cross: "M11.8,1.4h2.4v2.4h2.4v2.4h-2.4v2.4h-2.4v-2.4h-2.4v-2.4h2.4Z", x: "M10,3.4l1.6,-1.6l1.4,1.6l1.4,-1.6l1.6,1.6l-1.6,1.6l1.6,1.6l-1.6,1.6l-1.4,-1.6l-1.4,1.6l-1.6,-1.6l1.6,-1.6Z",
    star: "M13,0.6l1.2,3l3.2,0.2l-2.5,2.1l0.8,3.1l-2.7,-1.7l-2.7,1.7l0.8,-3.1l-2.5,-2.1l3.2,-0.2Z", hexagon: "M9.6,3l3.4,-2l3.4,2v4l-3.4,2l-3.4,-2Z",
  };

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Plotly reads a little HTML in texts; a user's words are not markup.
  const inert = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const faint = (hex, alpha) => {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  };

  // A colour for each value of the first key, a dash for each of the second, a marker for the rest: variant, position, other settings.
  // Where there is no rest, markers tell the colours apart once more.
  function styles(groups, by) {
    const key = (names, otherwise) => by.find((name) => names.includes(name)) ?? otherwise;
    const first = key(["variant", "variant.name"], by[0]);
    const others = by.filter((name) => name !== first);
    const second = others.find((name) => ["position", "position.name"].includes(name)) ?? others[0];
    const rest = others.filter((name) => name !== second);
    const seen = [[], [], []];
    const place = (i, value) => {
      if (!seen[i].includes(value)) seen[i].push(value);
      return seen[i].indexOf(value);
    };
    return groups.map((group) => {
      const colour = place(0, group.by[first]);
      const symbol = rest.length ? place(2, JSON.stringify(rest.map((name) => group.by[name]))) + Math.floor(colour / COLOURS) : colour;
      return {
        colour: css(`--c${colour % COLOURS}`),
        dash: DASHES[second === undefined ? 0 : place(1, group.by[second]) % DASHES.length],
        symbol: SYMBOLS[symbol % SYMBOLS.length],
      };
    });
  }

  function layout(x, y, more = {}) {
    const axis = { gridcolor: css("--rule"), linecolor: css("--muted"), zerolinecolor: css("--rule"), automargin: true, ticks: "outside", tickcolor: css("--rule") };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
      font: { family: css("--text"), size: 12, color: css("--muted") },
      margin: { l: 48, r: 14, t: 14, b: 44 },
      hoverlabel: { bgcolor: css("--raised"), bordercolor: css("--rule"), font: { color: css("--ink"), family: css("--text"), size: 12 }, namelength: -1 },
      xaxis: { ...axis, showgrid: false, ...x }, yaxis: { ...axis, ...y }, ...more,
    };
  }

  const draw = (id, traces, shape) => Plotly.react(id, traces, shape, { displayModeBar: false, responsive: true, showTips: false });

  const accuracyAxis = (title) => ({ type: "linear", title: { text: title }, range: [-0.02, 1.03], tickformat: ".1f", dtick: 0.2 });

  // Perplexities start at 1, which is certainty.
  function perplexityAxis(title, most) {
    const top = Math.max(Math.log10(most), 0.05);
    const ticks = Array.from({ length: Math.ceil(top) + 1 }, (_, i) => (top > 3 ? [1] : [1, 2, 5]).map((digit) => digit * 10 ** i)).flat();
    const values = top < 0.3 ? [1, 1.1, 1.2, 1.3, 1.5, 1.7, 2] : ticks;
    return { type: "log", title: { text: title }, range: [-0.02 * top, 1.04 * top], tickmode: "array", tickvals: values, ticktext: values.map((value) => value.toLocaleString("en")) };
  }

  function length(data, styled, shown, measure, axis) {
    const sets = data.charted.filter((metric) => metric.axis === axis && metric.measure === measure);
    const lengths = sets.map((set) => set.length);
    const traces = [];
    const trivial = new Map();
    let most = 1;
    data.groups.forEach((group, i) => {
      const cells = sets.map((set) => group.cells[set.name]);
      for (const [j, cell] of cells.entries())
        for (const [name, value] of Object.entries(cell.trivial ?? {})) {
          if (!trivial.has(name)) trivial.set(name, lengths.map(() => null));
          trivial.get(name)[j] ??= value;
        }
      if (!shown[i]) return;
      const { colour, dash, symbol } = styled[i];
      most = Math.max(most, ...cells.map((cell) => cell.max ?? 1));
      if (cells.some((cell) => cell.ceiling !== null))
        traces.push({
          x: lengths, y: cells.map((cell) => cell.ceiling), mode: "markers", name: inert(`${group.label}: ceiling`), hovertemplate: "%{y:.3f}<extra>%{fullData.name}</extra>",
          marker: { symbol: "line-ew-open", size: 22, color: colour, line: { width: 1.5, color: colour } },
        });
      traces.push({
        x: lengths, y: cells.map((cell) => cell.mean), mode: "lines+markers", name: inert(group.label),
        line: { color: colour, dash, width: 2 }, marker: { symbol, size: 7, color: colour },
        error_y: {
          type: "data", symmetric: false, thickness: 1, width: 3, color: faint(colour, 0.65),
          array: cells.map((cell) => (cell.high === null ? 0 : cell.high - cell.mean)), arrayminus: cells.map((cell) => (cell.low === null ? 0 : cell.mean - cell.low)),
        },
        customdata: cells.map((cell) => cell.n), hovertemplate: "%{y:.3f}, n=%{customdata}<extra>%{fullData.name}</extra>",
      });
    });
    const annotations = [];
    const labels = [];
    for (const [name, values] of [...trivial].sort(([, a], [, b]) => a[0] - b[0])) {
      traces.unshift({ x: lengths, y: values, mode: "lines", name: inert(name), line: { color: css("--muted"), dash: "dot", width: 1 }, hovertemplate: "%{y:.3f}<extra>%{fullData.name}</extra>" });
      // Predictors this close would be written over one another.
      if (labels.length && values[0] - labels.at(-1).at < 0.06) labels.at(-1).names.push(name);
      else labels.push({ at: values[0], names: [name] });
    }
    for (const { at, names } of labels)
      annotations.push({ x: Math.log10(lengths[0]), y: at, xanchor: "left", xshift: 12, yanchor: "bottom", showarrow: false, text: inert(names.join(", ").replaceAll("_", " ")), font: { size: 11 } });
    const trained = data.trained.filter((at) => at <= lengths.at(-1));
    for (const at of trained)
      annotations.push({ x: Math.log10(at), y: 1, yref: "paper", xanchor: "left", yanchor: "bottom", showarrow: false, text: "trained here", font: { size: 11 } });
    const shapes = trained.map((at) => ({ type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper", line: { color: css("--muted"), width: 1, dash: "dash" } }));
    const ticks = { type: "log", tickvals: lengths, ticktext: lengths.map(String), title: { text: axis === "length" ? "length (tokens)" : `length (tokens), harder along “${inert(axis)}”` } };
    draw("length-chart", traces, layout(ticks, measure === "perplexity" ? perplexityAxis("test perplexity, lower is better", most) : accuracyAxis("test accuracy"), { annotations, shapes, margin: { l: 48, r: 14, t: 24, b: 44 } }));
  }

  // A point a group: what is gained, with its interval, against what it costs.
  function cost(data, styled, shown, metric, [key, title]) {
    const found = data.groups.map((group, i) => ({ group, i, cell: group.cells[metric.name], x: group.costs[key] })).filter(({ i, cell, x }) => shown[i] && x > 0 && cell.mean !== null);
    const traces = found.map(({ group, i, cell, x }) => {
      const { colour, symbol } = styled[i];
      return {
        x: [x], y: [cell.mean], mode: "markers", name: inert(group.label), marker: { symbol, size: 11, color: colour },
        error_y: {
          type: "data", symmetric: false, thickness: 1, width: 4, color: faint(colour, 0.65),
          array: [cell.high === null ? 0 : cell.high - cell.mean], arrayminus: [cell.low === null ? 0 : cell.mean - cell.low],
        },
        customdata: [cell.n], hovertemplate: "%{y:.3f}, n=%{customdata}<br>%{x:.4~s}<extra>%{fullData.name}</extra>",
      };
    });
    const y = metric.ratio ? perplexityAxis(inert(metric.title), Math.max(1, ...found.map(({ cell }) => cell.max))) : metric.name.endsWith("accuracy") ? accuracyAxis(inert(metric.title)) : { type: "linear", title: { text: inert(metric.title) } };
    draw("cost-chart", traces, layout({ type: "log", title: { text: inert(title) }, dtick: "D2", exponentformat: "SI" }, y));
  }

  function curve(data, styled, shown, name, x) {
    const singles = [], bands = [], means = [];
    for (const found of data.curves.filter((one) => one.name === name && shown[one.group])) {
      const group = data.groups[found.group];
      const { colour, dash } = styled[found.group];
      for (const run of found.runs)
        singles.push({ x: run[x], y: run.values, mode: "lines", name: inert(`${group.label}, ${run.name}`), line: { color: faint(colour, 0.3), dash, width: 1 }, hovertemplate: "%{y:.4g}<extra>%{fullData.name}</extra>" });
      const at = found.mean[x];
      const edge = { x: at, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
      if (found.n > 1) bands.push({ ...edge, y: found.mean.low }, { ...edge, y: found.mean.high, fill: "tonexty", fillcolor: faint(colour, 0.09) });
      means.push({ x: at, y: found.mean.values, mode: "lines", name: inert(`${group.label}, mean of ${found.n}`), line: { color: colour, dash, width: 2 }, hovertemplate: "%{y:.4g}<extra>%{fullData.name}</extra>" });
    }
    const y = name.endsWith("accuracy") ? accuracyAxis(inert(name)) : { type: name.endsWith("perplexity") ? "log" : "linear", title: { text: inert(name) }, rangemode: name.endsWith("perplexity") ? "normal" : "tozero" };
    draw("curve-chart", [...bands, ...singles, ...means], layout({ type: "linear", title: { text: x }, rangemode: "tozero" }, y));
  }

  function slice(data, styled, shown, name, set) {
    const found = data.slices.find((one) => one.name === name && `${one.axis} ${one.length}` === set);
    const traces = found.groups.map((bins, i) => {
      const { colour, dash, symbol } = styled[i];
      return {
        x: found.bins, y: bins.map((bin) => bin?.mean ?? null), visible: shown[i], mode: "lines+markers", name: inert(data.groups[i].label),
        line: { color: colour, dash, width: 2 }, marker: { symbol, size: 6, color: colour },
        error_y: {
          type: "data", symmetric: false, thickness: 1, width: 3, color: faint(colour, 0.65),
          array: bins.map((bin) => (bin ? bin.high - bin.mean : 0)), arrayminus: bins.map((bin) => (bin ? bin.mean - bin.low : 0)),
        },
        hovertemplate: "%{y:.3f}<extra>%{fullData.name}</extra>",
      };
    });
    // Plotly would read labels like "32" as numbers, and space them so.
    draw("slice-chart", traces, layout({ type: "category", categoryorder: "array", categoryarray: found.bins, title: { text: inert(name) } }, accuracyAxis("test accuracy")));
  }

  // What the two charts of the pairs share: the lines of the groups drawn, in the style of the first of them, and the critical pair.
  function pairs(found, styled, shown, values, unit) {
    return found.lines.filter((line) => line.groups.some((i) => shown[i])).map((line) => {
      const { colour, dash, symbol } = styled[line.groups.find((i) => shown[i])];
      return {
        y: line[values], mode: "lines+markers", name: inert(line.label), line: { color: colour, dash, width: 1.75 }, marker: { symbol, size: 5, color: colour },
        hovertemplate: `pair %{x}: %{y:.4~g}${unit}<extra>%{fullData.name}</extra>`,
      };
    });
  }
  const level = (at, text, label) => [
    { type: "line", x0: 0, x1: 1, xref: "paper", y0: at, y1: at, line: { color: css("--muted"), width: 1, dash: "dash" } },
    { xref: "paper", y: at, showarrow: false, text, font: { size: 11 }, ...label },
  ];
  const critical = (pair) => [
    { type: "line", x0: pair, x1: pair, y0: 0, y1: 1, yref: "paper", line: { color: css("--muted"), width: 1, dash: "dot" } },
    { x: pair, xanchor: "center", y: 1, yref: "paper", yanchor: "bottom", showarrow: false, text: `critical pair ${pair}`, font: { size: 11 } },
  ];
  const pairAxis = { type: "linear", title: { text: "pair (0 turns fastest)" }, zeroline: false, rangemode: "normal", tickformat: "d" };
  function marked(levels, ...more) {
    const marks = [...levels, ...more.map(critical)];
    return { shapes: marks.map(([line]) => line), annotations: marks.map(([, text]) => text), margin: { l: 48, r: 14, t: 24, b: 44 } };
  }

  function wavelengths(data, styled, shown) {
    const found = data.spectra;
    const plain = found.plain.map(({ base, wavelengths: y }) => ({
      y, mode: "lines", name: `rope, base ${base}`, line: { color: css("--muted"), width: 5 }, opacity: 0.3, hovertemplate: "pair %{x}: %{y:.4~g} tokens<extra>%{fullData.name}</extra>",
    }));
    // Labels stand where no line runs: the slow pairs, at the right, are far above them.
    const under = (at) => ({ x: 1, xanchor: "right", y: Math.log10(at), yanchor: "top" });
    const levels = [...found.trained.map((at) => level(at, `trained length ${at}`, under(at))), ...found.targets.map((at) => level(at, `target length ${at}`, under(at)))];
    const y = { type: "log", title: { text: "wavelength (tokens to a full turn)" }, dtick: 1, exponentformat: "power" };
    draw("wavelength-chart", [...plain, ...pairs(found, styled, shown, "wavelengths", " tokens")], layout(pairAxis, y, marked(levels, ...found.critical)));
  }

  function factors(data, styled, shown) {
    const found = data.spectra;
    const levels = [level(1, "1: as under rope", { x: 0, xanchor: "left", yanchor: "top" }), ...found.factors.map((factor) => level(factor, `target / trained: ${factor}`, { x: 0, xanchor: "left", yanchor: "bottom" }))];
    const y = { type: "linear", title: { text: "factor on the wavelength" }, rangemode: "tozero", zeroline: false };
    draw("factor-chart", pairs(found, styled, shown, "factors", ""), layout(pairAxis, y, marked(levels, ...found.critical)));
  }

  return { styles, length, cost, curve, slice, wavelengths, factors, css, draw, layout, PATTERNS, MARKS };
})();

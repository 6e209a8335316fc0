// Draws what a model chose: keys from left to right, queries from top to bottom, a cell is the darker the more heads chose it.
"use strict";

const selection = (() => {
  const tokens = (count) => `${count} token${count === 1 ? "" : "s"}`;

  function title(found, layer) {
    const several = found.layers.filter((other) => other.layer === layer.layer).length > 1;
    return `Layer ${layer.layer + 1}${several ? `, part ${layer.part + 1}` : ""}: ${layer.block === 1 ? "single tokens" : `blocks of ${layer.block} tokens`}`;
  }

  function reading(found) {
    const wide = found.queries > 1 || found.layers.some((layer) => layer.keys > layer.block);
    const rows = wide ? ` A row averages ${tokens(found.queries)}, a column ${[...new Set(found.layers.map((layer) => tokens(layer.keys)))].join(" or ")}.` : "";
    const rings = found.answers.some((place) => place !== null) ? ", and in its row a ring where its answer stands" : "";
    return `Shade: the share of heads, or of groups of heads that choose together, that chose the keys for the query.${rows} On the diagonal a cross marks each scored token${rings}.`;
  }

  function draw(id, found, layer) {
    const mark = (x, y, symbol, size, name) => ({
      x, y, mode: "markers", cliponaxis: false, name, marker: { symbol, size, color: charts.css("--c1"), line: { width: 2, color: charts.css("--c1") } }, hovertemplate: "%{x}<extra>%{fullData.name}</extra>",
    });
    const known = found.scored.map((at, i) => [found.answers[i], at]).filter(([answer]) => answer !== null);
    const traces = [
      {
        type: "heatmap", z: layer.percent, x0: layer.keys / 2, dx: layer.keys, y0: found.queries / 2, dy: found.queries, zmin: 0, zmax: 100,
        colorscale: [[0, charts.css("--paper")], [1, charts.css("--heat")]], colorbar: { title: { text: "% of heads", side: "right" }, thickness: 10, outlinewidth: 0, len: 0.7 },
        hovertemplate: "query %{y}, keys around %{x}: %{z} %<extra></extra>",
      },
      mark(found.scored, found.scored, "x-thin", 6, "scored token"),
      mark(known.map(([answer]) => answer), known.map(([, at]) => at), "circle-open", 9, "its answer"),
    ];
    const axis = { type: "linear", zeroline: false, showgrid: false, constrain: "domain" };
    const diagonal = { type: "line", x0: 0, y0: 0, x1: found.length, y1: found.length, line: { color: charts.css("--muted"), width: 1, dash: "dot" } };
    charts.draw(id, traces, charts.layout({ ...axis, title: { text: "key (token)" }, range: [0, found.length] }, { ...axis, title: { text: "query (token)" }, range: [found.length, 0] }, { shapes: [diagonal] }));
  }

  return { title, reading, draw };
})();

/* The text shaded by one token, its ins and outs, and where it looks in every layer. */

const MOST_READING = 400; // tokens of the text that are shown at once

/* The chosen token and its weights: where it looks (out), and who looks at it (in). */
function tokenFlows() {
  const map = currentMap();
  const maps = tiledMap(map);
  const from = sequence(map.queries);
  const to = sequence(map.keys);
  const flows = {};
  if (state.side === "query") flows.out = { weights: maps.row(state.head, state.token), sequence: to };
  if (state.side === "key" || map.queries === map.keys) {
    flows.in = { weights: maps.column(state.head, state.token), sequence: from };
  }
  return { flows, own: state.side === "query" ? from : to };
}

function drawTokenPicker() {
  const map = currentMap();
  byId("tokens-hint").textContent = map.role === "cross"
    ? "The alignment: lines go from what the model writes, on the left, to what it reads for that, on the right."
    : "Lines go from the token that looks, on the left, to the tokens it looks at, on the right.";
  const own = sequence(state.side === "query" ? map.queries : map.keys);
  const input = element("input", {
    type: "number", min: 0, max: own.count - 1, value: state.token, id: "token-number",
    onchange: (event) => choose({ token: Math.round(Number(event.target.value)) }),
  });
  const sides = map.queries === map.keys ? null
    : choice("Side", [["query", "looks"], ["key", "is looked at"]], state.side, (side) => choose({ side, token: 0 }));
  byId("token-picker").replaceChildren(
    element("label", { for: "token-number" }, "Token"), input,
    element("span", { class: "muted" }, `of ${thousands(own.count)}: `, element("bdi", { class: "token-name" }, tokenName(own, state.token))),
    ...(sides ? [sides] : []));
}

function drawReading() {
  const box = byId("reading");
  const map = currentMap();
  const own = sequence(state.side === "query" ? map.queries : map.keys);
  const text = sequence(map.queries).kind === "text" && sequence(map.queries).tokens.length > 0;
  box.hidden = !text || !tiledMap(map).available;
  if (box.hidden) return;
  const { flows } = tokenFlows();
  const shown = flows.out ?? flows.in;
  const sequences = map.queries === map.keys ? [own] : [own, shown.sequence];
  const largest = d3.max(shown.weights) || 1;
  const paragraphs = sequences.map((each) => {
    const count = Math.min(each.count, each.tokens.length);
    const start = each === own ? Math.max(0, Math.min(state.token - MOST_READING / 2, count - MOST_READING)) : 0;
    const shaded = each === shown.sequence;
    const words = d3.range(start, Math.min(count, start + MOST_READING)).map((i) => {
      const word = element("bdi", {
        class: "word", "data-token": i, title: `${quoted(each.tokens[i])}: ${shaded ? share(shown.weights[i]) : ""}`,
      }, label(each.tokens[i]));
      if (shaded) word.style.background = shade(shown.weights[i] / largest);
      if (each === own && i === state.token) word.classList.add("chosen");
      word.addEventListener("click", () => choose({ token: i, side: each === own ? state.side : state.side === "query" ? "key" : "query" }));
      return word;
    });
    const more = count < each.count || count > MOST_READING
      ? [element("span", { class: "muted" }, ` … ${plural(each.count, "token")} in all`)] : [];
    return element("p", {}, words, more);
  });
  box.replaceChildren(...paragraphs);
}

function drawInOut() {
  const container = byId("in-out");
  container.replaceChildren();
  if (!tiledMap(currentMap()).available) return;
  const { flows, own } = tokenFlows();
  const title = { out: "looks at", in: "is looked at by" };
  for (const [direction, { weights, sequence: other }] of Object.entries(flows)) {
    const best = d3.sort(d3.range(weights.length), (i) => -weights[i]).slice(0, 8).filter((i) => weights[i] > 0);
    const largest = weights[best[0]] || 1;
    container.append(
      element("h3", {}, element("bdi", { class: "token-name" }, tokenName(own, state.token)), ` ${title[direction]}`),
      best.length === 0 ? element("p", { class: "muted" }, "nothing") : element("ol", { class: "bars" }, best.map((i) =>
        barItem(tokenName(other, i), other.tokens[i] === undefined ? "" : `${i}`, share(weights[i]), weights[i] / largest,
          () => choose({ token: i, side: direction === "out" && currentMap().queries !== currentMap().keys ? "key" : "query" })))));
  }
}

/* A row of a bar chart: a name, a bar and a value. */
function barCells(name, note, value, fraction, negative = false) {
  const bar = element("span", { class: negative ? "bar negative" : "bar" });
  bar.style.setProperty("--share", `${(100 * Math.max(0, Math.min(1, fraction))).toFixed(1)}%`);
  return element("span", { class: "bar-row" },
    element("bdi", { class: "bar-name" }, name, note ? element("small", {}, ` ${note}`) : null), bar, element("span", { class: "bar-value" }, value));
}

function barItem(name, note, value, fraction, open, negative = false) {
  return element("li", {}, element("button", { type: "button", class: "bar-button", onclick: open }, barCells(name, note, value, fraction, negative)));
}

/* Attention by layer: where the chosen token looks in every layer, and the rollout. */
let layerMap = null;

function drawByLayer() {
  const map = currentMap();
  const own = sequence(map.queries);
  const container = byId("by-layer");
  layerMap?.remove();
  layerMap = null;
  container.replaceChildren();
  const layers = currentModel().maps.map((each, index) => ({ map: each, index }))
    .filter(({ map: each }) => each.role === map.role && each.queries === map.queries && each.keys === map.keys && each.tiles.length > 0);
  if (layers.length < 2) return;
  const query = state.side === "query";
  const other = sequence(query ? map.keys : map.queries);
  const chosen = query ? own : sequence(map.keys);
  // in maps of many tokens, cells of as many tokens as there is room for
  const cell = Math.max(1, Math.ceil(other.count / 512));
  const columns = Math.ceil(other.count / cell);
  const values = new Float32Array(layers.length * columns);
  layers.forEach(({ map: each }, row) => {
    const maps = tiledMap(each);
    const weights = query ? maps.row(ALL, state.token) : maps.column(ALL, state.token);
    weights.forEach((weight, i) => (values[row * columns + Math.floor(i / cell)] += weight / cell));
  });
  const title = element("h3", {}, "Where ", element("bdi", { class: "token-name" }, tokenName(chosen, state.token)),
    query ? " looks, layer by layer" : " is looked at from, layer by layer");
  const box = element("div", { class: "card" });
  container.replaceChildren(title, element("p", { class: "muted" }, "The mean of all heads. Choose a row to open the layer."), box);
  const tile = { q0: 0, q1: layers.length, k0: 0, k1: columns, rows: layers.length, columns, cellQ: 1, cellK: 1, values };
  const column = (k) => (cell === 1 ? tokenLabel(other, k) : `${k * cell}`);
  layerMap = new HeatMap(box, {
    queries: layers.length, keys: columns, rowHeight: Math.max(14, Math.min(26, 320 / layers.length)), zooms: false,
    title: `Attention by layer of token ${state.token}: ${layers.length} layers by ${columns} tokens. Arrow keys move from cell to cell.`,
    tiles: () => [tile],
    describe: (q, k) => `${mapName(layers[q].map)}: ${column(k)} ${share(values[q * columns + k])}`,
    rowLabel: (q) => mapName(layers[q].map), columnLabel: column,
    rowTitle: "layer", columnTitle: query ? "is looked at" : "looks",
    marked: () => layers.findIndex((each) => each.index === state.map),
    onSelect: (q) => choose({ map: layers[q].index }),
  });
}

let rolloutMap = null;

function drawRollout() {
  const { rollout } = currentModel();
  rolloutMap?.remove();
  rolloutMap = null;
  const container = byId("rollout");
  container.replaceChildren();
  if (!rollout) return;
  const own = view.sequences[0];
  const maps = new TiledMap([rollout], own.count, own.count, 1);
  const box = element("div", { class: "card square" });
  container.append(
    element("h3", {}, "Attention rollout"),
    element("p", { class: "muted" }, "All layers multiplied, half of each layer being the residual connection (Abnar & Zuidema, 2020): how much of each input token could reach each output."),
    box);
  rolloutMap = new HeatMap(box, {
    ...headOptions({ name: "rollout", heads: 1, kind: "implied", queries: own.id, keys: own.id, tiles: [rollout] }, 0),
    title: "Heat map of the attention rollout. Arrow keys move from cell to cell, plus and minus zoom, 0 shows all.",
    tiles: () => maps.tiles.map((tile) => ({ ...tile, values: plane(tile, 0) })),
    describe: (q, k) => describeCell(maps, 0, own, own, q, k, { kind: "implied" }),
    rowTitle: "output", columnTitle: "input",
    marked: () => (currentMap().queries === own.id && state.side === "query" ? state.token : null),
    onSelect: (q) => currentMap().queries === own.id && choose({ token: q, side: "query" }),
  });
}

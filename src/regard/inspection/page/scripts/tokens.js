/* Who looks at whom: lines between tokens, the text shaded by one token, its ins and outs. */

const MOST_LINES = 1200;
const MOST_SLOTS = 160; // tokens on each side of the lines
const GROUPS = 64; // groups of tokens, where there are more
const MOST_READING = 400; // tokens of the text that are shown at once

function slots(range, cell) {
  const [from, to] = range;
  const groups = to - from > MOST_SLOTS ? Math.ceil((to - from) / GROUPS) : 1;
  const size = Math.max(groups, Math.round(cell));
  const count = Math.ceil((to - from) / size);
  return d3.range(count).map((i) => ({ from: from + i * size, to: Math.min(to, from + (i + 1) * size) }));
}

function drawLinks() {
  const map = currentMap();
  const maps = tiledMap(map);
  const container = byId("links");
  if (!maps.available) {
    container.replaceChildren(element("p", { class: "muted" }, `No map: ${visible(map.reason)}`));
    return;
  }
  const seen = zoomWindow(map) ?? { q: [0, maps.queries], k: [0, maps.keys] };
  const tile = maps.covering(seen.q[0], seen.q[1], seen.k[0], seen.k[1]);
  const left = slots(seen.q, tile.cellQ);
  const right = slots(seen.k, tile.cellK);
  const single = left.every((slot) => slot.to - slot.from === 1) && right.every((slot) => slot.to - slot.from === 1);
  const name = (sequence, slot) =>
    slot.to - slot.from === 1 ? tokenLabel(sequence, slot.from) : `${slot.from}–${slot.to - 1}`;
  const heads = state.head === ALL ? d3.range(map.heads) : [state.head];
  const row = 20;
  const height = row * Math.max(left.length, right.length);

  // how much each group of queries looks at each group of keys: mean weight times the number of keys
  const lines = [];
  const totals = { out: new Float32Array(left.length * right.length), largest: 0 };
  for (const head of heads) {
    const ends = (list) => [list[0].from, list[0].from + list.length * (list[0].to - list[0].from)];
    const weights = maps.resample(head, ends(left), ends(right), left.length, right.length);
    left.forEach((_, i) => right.forEach((slot, j) => {
      const weight = weights[i * right.length + j] * (slot.to - slot.from);
      totals.out[i * right.length + j] += weight / heads.length;
      lines.push({ i, j, head, weight });
    }));
  }
  totals.largest = d3.max(totals.out);
  const largest = d3.max(lines, (line) => line.weight) || 1;
  const drawn = lines.filter((line) => line.weight > 0.02 * largest).sort((a, b) => b.weight - a.weight).slice(0, MOST_LINES).reverse();

  const canvas = element("canvas", { "aria-hidden": "true" });
  const side = (list, from, which) => {
    const column = element("div", { class: `side ${which}`, role: "listbox", "aria-label": which === "left" ? "Tokens that look" : "Tokens that are looked at" });
    list.forEach((slot, index) => {
      const button = element("div", {
        class: "slot", role: "option", tabindex: -1, "data-index": index, "data-side": which,
        title: slot.to - slot.from === 1 ? `${quoted(tokenText(from, slot.from))}, token ${slot.from}` : `tokens ${slot.from} to ${slot.to - 1}`,
      }, element("bdi", {}, name(from, slot)));
      column.append(button);
    });
    return column;
  };
  const columns = element("div", { class: "links" },
    side(left, sequence(map.queries), "left"), element("div", { class: "lines" }, canvas), side(right, sequence(map.keys), "right"));
  const caption = element("p", { class: "muted" },
    single ? "" : "The tokens are too many for a line each: these are groups. Zoom into the map above to see tokens.");
  const key = heads.length > 1 ? element("ul", { class: "legend" }, heads.map((head) => {
    const sample = element("span", { class: "sample" });
    sample.style.background = headColour(head, map.heads);
    return element("li", {}, element("button", { type: "button", class: "plain", onclick: () => choose({ head }) }, sample, `Head ${head}`));
  })) : "";
  container.replaceChildren(element("h3", {}, placeName(map, state.head)), key, element("div", { class: "scroll-y" }, columns), caption);

  let hovered = null;
  const isChosen = (slot) => slot.from <= state.token && state.token < slot.to;
  const chosen = () => {
    const list = state.side === "query" ? left : right;
    const index = list.findIndex(isChosen);
    return index < 0 ? null : { side: state.side === "query" ? "left" : "right", index };
  };
  const paintLinks = () => {
    const focus = hovered ?? chosen();
    const width = canvas.parentElement.clientWidth;
    const ratio = devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    for (const line of drawn) {
      const lit = !focus || (focus.side === "left" ? line.i : line.j) === focus.index;
      const y0 = (line.i + 0.5) * row;
      const y1 = (line.j + 0.5) * row;
      context.beginPath();
      context.moveTo(0, y0);
      context.bezierCurveTo(width * 0.45, y0, width * 0.55, y1, width, y1);
      context.strokeStyle = heads.length > 1 ? headColour(line.head, map.heads) : colours.accent;
      context.globalAlpha = Math.min(1, contrast(line.weight / largest)) * (lit ? 0.9 : 0.07);
      context.lineWidth = 0.75 + 3 * (line.weight / largest);
      context.stroke();
    }
    for (const button of columns.querySelectorAll(".slot")) {
      const { side: which, index } = button.dataset;
      const self = focus && focus.side === which && focus.index === Number(index);
      let weight = 0;
      if (focus && focus.side !== which) {
        weight = totals.out[focus.side === "left" ? focus.index * right.length + Number(index) : Number(index) * right.length + focus.index];
      }
      button.style.background = weight > 0 ? shade(weight / totals.largest) : "";
      button.classList.toggle("focus", Boolean(self));
      const pinned = chosen();
      button.setAttribute("aria-selected", String(pinned !== null && pinned.side === which && pinned.index === Number(index)));
    }
  };
  const slotOf = (event) => {
    const found = event.target.closest?.(".slot");
    return found ? { side: found.dataset.side, index: Number(found.dataset.index) } : null;
  };
  const select = (slot) => {
    const list = slot.side === "left" ? left : right;
    choose({ side: slot.side === "left" ? "query" : "key", token: list[slot.index].from });
  };
  const hover = (slot) => {
    hovered = slot;
    paintLinks();
  };
  columns.addEventListener("pointerover", (event) => hover(slotOf(event)));
  columns.addEventListener("pointerleave", () => hover(null));
  columns.addEventListener("click", (event) => slotOf(event) && select(slotOf(event)));
  columns.addEventListener("focusin", (event) => {
    const slot = slotOf(event);
    hover(slot);
    if (slot) announce(slotText(slot));
  });
  columns.addEventListener("focusout", () => hover(null));
  columns.addEventListener("keydown", (event) => {
    if (!["Enter", " "].includes(event.key) || !slotOf(event)) return;
    event.preventDefault();
    select(slotOf(event));
  });
  const slotText = ({ side: which, index }) => {
    const from = sequence(map.queries);
    const to = sequence(map.keys);
    const others = which === "left" ? right : left;
    const weights = others.map((_, i) => totals.out[which === "left" ? index * right.length + i : i * right.length + index]);
    const best = d3.sort(d3.range(others.length), (i) => -weights[i]).slice(0, 3);
    const list = best.map((i) => `${name(which === "left" ? to : from, others[i])} ${share(weights[i])}`).join(", ");
    return which === "left" ? `${name(from, left[index])} looks at ${list}` : `${name(to, right[index])} is looked at by ${list}`;
  };
  for (const list of columns.querySelectorAll(".side")) {
    rovingFocus(list, ".slot", (pressed) => ({ ArrowDown: 1, ArrowUp: -1 })[pressed]);
    (list.querySelector("[aria-selected=true]") ?? list.firstElementChild).tabIndex = 0;
  }
  paintLinks();
  columns.repaint = paintLinks;
  linkObserver.disconnect();
  linkObserver.observe(columns);
}

const linkObserver = new ResizeObserver(([entry]) => entry.target.repaint());

function repaintLinks() {
  byId("links").querySelector(".links")?.repaint();
}

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

/* The bar with model, layer and head; all heads as thumbnails; one head large. */

function drawBar() {
  const model = currentModel();
  const map = currentMap();
  const bar = byId("bar");
  bar.hidden = model.maps.length === 0;
  if (bar.hidden) return;
  const stepper = (name, value, options, set) => {
    const select = element("select", { "aria-label": name, onchange: (event) => set(Number(event.target.value)) },
      options.map(([at, text]) => element("option", { value: at, selected: at === value }, text)));
    const index = options.findIndex(([at]) => at === value);
    const step = (by, text, title) => element("button", {
      type: "button", "aria-label": title, disabled: !options[index + by], onclick: () => set(options[index + by][0]),
    }, text);
    return element("span", { class: "stepper" }, step(-1, "‹", `Previous ${name}`), select, step(1, "›", `Next ${name}`));
  };
  const focused = bar.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  const models = view.models.map((each, i) => [i, label(each.name, 28)]);
  const heads = d3.range(map.heads).map((h) => [h, `Head ${h}`]);
  if (map.heads > 1) heads.push([ALL, "All heads"]);
  bar.replaceChildren(
    ...(models.length > 1 ? [choice("Model", models, state.model, (at) => choose({ model: at }))] : []),
    stepper("layer", state.map, model.maps.map((each, i) => [i, mapName(each)]), (at) => choose({ map: at })),
    stepper("head", state.head, heads, (at) => choose({ head: at })),
    element("span", { class: `badge ${map.kind}`, title: kindText(map) }, KINDS[map.kind][0]),
    element("label", { class: "check" },
      element("input", {
        type: "checkbox", checked: state.contrast === "weak", "aria-label": "Show weak weights",
        onchange: (event) => choose({ contrast: event.target.checked ? "weak" : "even" }),
      }), "Show weak weights"));
  if (focused) bar.querySelector(`[aria-label=${JSON.stringify(focused)}]`)?.focus();
}

function drawOverview() {
  const { maps } = currentModel();
  const most = d3.max(maps, (map) => map.heads);
  const size = Math.max(14, Math.min(84, Math.floor(410 / most) - 3));
  const grid = element("div", { class: "thumbnails", role: "group", "aria-label": "All heads, by layer" });
  grid.style.setProperty("--size", `${size}px`);
  const roles = d3.group(maps.map((map, i) => ({ map, i })), ({ map }) => map.role);
  for (const [role, members] of roles) {
    if (roles.size > 1) grid.append(element("h3", {}, ROLES[role]));
    for (const { map, i } of members) grid.append(thumbnailRow(map, i));
  }
  rovingFocus(grid, "button", (key, items, at) => {
    if (key === "ArrowRight") return 1;
    if (key === "ArrowLeft") return -1;
    const rows = { ArrowDown: 1, ArrowUp: -1 }[key];
    if (!rows) return null;
    const row = items[at].parentElement.closest(".thumbnail-row");
    const all = [...grid.querySelectorAll(".thumbnail-row")];
    const column = [...row.querySelectorAll("button")].indexOf(items[at]);
    const others = all[all.indexOf(row) + rows]?.querySelectorAll("button");
    return others?.length ? items.indexOf(others[Math.min(column, others.length - 1)]) - at : null;
  });
  byId("overview").replaceChildren(grid);
  markThumbnail();
}

/* Thumbnails are drawn when they come into sight. */
const thumbnailObserver = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    thumbnailObserver.unobserve(target);
    target.paint();
  }
}, { rootMargin: "300px" });

function thumbnailRow(map, i) {
  const row = element("div", { class: "thumbnail-row", "data-map": i });
  row.append(element("span", { class: "thumbnail-name", title: `${visible(map.name)} · ${visible(map.mixer)}` }, mapName(map)));
  const cells = element("span", { class: "thumbnail-cells" });
  row.append(cells);
  if (map.tiles.length === 0) {
    cells.append(element("span", { class: "muted none" }, `No map: ${visible(map.reason)}`));
    return row;
  }
  for (const head of d3.range(map.heads)) {
    const name = placeName(map, head);
    const canvas = thumbnail(tiledMap(map), head);
    cells.append(element("button", {
      type: "button", tabindex: -1, "data-head": head, "aria-label": name, title: name,
      onclick: () => choose({ map: i, head }),
    }, canvas));
  }
  return row;
}

function thumbnail(maps, head, side = 112) {
  const canvas = element("canvas", { width: side, height: side, "aria-hidden": "true" });
  canvas.paint = () => {
    const tile = maps.tiles[0];
    const values = plane(tile, head);
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = tile.columns > side;
    context.drawImage(paint(values, tile.rows, tile.columns, d3.max(values)), 0, 0, side, side);
  };
  thumbnailObserver.observe(canvas);
  return canvas;
}

function markThumbnail() {
  const buttons = byId("overview").querySelectorAll("button");
  let stop = null;
  for (const button of buttons) {
    const row = Number(button.closest(".thumbnail-row").dataset.map);
    const chosen = row === state.map && (state.head === ALL || Number(button.dataset.head) === state.head);
    button.setAttribute("aria-pressed", String(chosen));
    button.tabIndex = -1;
    if (chosen) stop ??= button;
  }
  const first = stop ?? buttons[0];
  if (first) first.tabIndex = 0;
}

/* Options of a heat map of a head. */
function headOptions(map, head) {
  const maps = tiledMap(map);
  const from = sequence(map.queries);
  const to = sequence(map.keys);
  const planes = new Map();
  return {
    queries: maps.queries, keys: maps.keys,
    title: `Heat map of ${placeName(map, head)}: ${plural(maps.queries, "query")} by ${plural(maps.keys, "key")}. Arrow keys move from cell to cell, plus and minus zoom, 0 shows all, Enter chooses the token.`,
    tiles: () => maps.tiles.map((tile) => {
      if (!planes.has(tile)) planes.set(tile, { ...tile, values: plane(tile, head) });
      return planes.get(tile);
    }),
    describe: (q, k) => describeCell(maps, head, from, to, q, k, map),
    rowLabel: (q) => tokenLabel(from, q), columnLabel: (k) => tokenLabel(to, k),
    rowTitle: map.role === "cross" ? "target (query)" : "looks (query)",
    columnTitle: map.role === "cross" ? "source (key)" : "is looked at (key)",
  };
}

function describeCell(maps, head, from, to, q, k, map) {
  const { weight, tile, row, column } = maps.weight(head, q, k);
  const amount = map.kind === "influence" ? number(weight) : share(weight);
  if (tile.cellQ <= 1.001 && tile.cellK <= 1.001) {
    return `${tokenLabel(from, q, 40)} (${q}) → ${tokenLabel(to, k, 40)} (${k}): ${amount}`;
  }
  const range = (start, end, cells, at) =>
    `${start + cellStart(at, end - start, cells)}–${start + cellStart(at + 1, end - start, cells) - 1}`;
  return `tokens ${range(tile.q0, tile.q1, tile.rows, row)} → ${range(tile.k0, tile.k1, tile.columns, column)}: ${amount} on average`;
}

let headMap = null;

function drawHead() {
  const map = currentMap();
  byId("head-title").replaceChildren(placeName(map, state.head), " ", element("small", {}, `${label(map.mixer, 60)} · ${label(map.name, 120)}`));
  byId("head-kind").replaceChildren(element("span", { class: `badge ${map.kind}` }, KINDS[map.kind][0]), ` ${visible(kindText(map))}`);
  drawHeadMetrics(map);
  headMap?.remove();
  headMap = null;
  const container = byId("head-map");
  container.replaceChildren();
  if (!tiledMap(map).available) return;
  headMap = new HeatMap(container, {
    ...headOptions(map, state.head),
    sharpens: view.server,
    marked: () => (state.side === "query" ? state.token : null),
    onSelect: (q) => choose({ token: q, side: "query" }),
    onZoom: (seen) => {
      choose({ zoom: headMap.whole() ? "" : `${seen.q[0]}-${seen.q[1]},${seen.k[0]}-${seen.k[1]}` });
      sharpen(map, seen);
    },
  });
  const zoom = zoomWindow(map);
  if (zoom && headMap.width) {
    headMap.showWindow(zoom);
    sharpen(map, zoom);
  }
}

/* The rectangle of the address, if it is inside the map. */
function zoomWindow(map) {
  if (!state.zoom) return null;
  const [q, k] = state.zoom.split(",").map((range) => range.split("-").map(Number));
  const maps = tiledMap(map);
  const inside = q[0] < q[1] && q[1] <= maps.queries && k[0] < k[1] && k[1] <= maps.keys;
  return inside ? { q, k } : null;
}

function drawHeadMetrics(map) {
  const entries = Object.entries(map.metrics).map(([name, values]) => {
    const pick = (numbers) => {
      if (!numbers) return null;
      return state.head === ALL ? d3.mean(numbers) : numbers[state.head];
    };
    const chance = pick(map.chance[name]);
    return element("div", { title: METRICS[name] },
      element("dt", {}, metricName(name)),
      element("dd", {}, number(pick(values)), chance === null || chance === undefined ? null : element("small", {}, ` ${number(chance)}`)));
  });
  const compared = Object.keys(map.chance).length > 0;
  byId("head-metrics").replaceChildren(...entries, compared ? element("small", {}, "Grey: with the tokens in random order.") : "");
}

/* Ask the server for finer cells of what is in sight. */
const asked = new Set();
let sharpening;

function sharpen(map, { q, k }) {
  if (!view.server) return;
  clearTimeout(sharpening);
  sharpening = setTimeout(async () => {
    const maps = tiledMap(map);
    const tile = maps.covering(q[0], q[1], k[0], k[1]);
    const rows = Math.min(q[1] - q[0], 256);
    const columns = Math.min(k[1] - k[0], 256);
    const sharp = tile.cellQ <= (1.01 * (q[1] - q[0])) / rows && tile.cellK <= (1.01 * (k[1] - k[0])) / columns;
    const question = { model: state.model, map: state.map, queries: q, keys: k, rows, columns };
    const key = JSON.stringify([generation, question]);
    if (sharp || asked.has(key)) return;
    asked.add(key);
    try {
      maps.add(await ask("tile", question));
      headMap?.refresh();
      for (const each of components) if (each.needs.includes("zoom")) each.drawn = null;
      schedule();
    } catch (error) {
      announce(error.message);
    }
  }, 150);
}

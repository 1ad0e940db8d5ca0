/* Two models: which head became which, how their maps differ, where they are least alike. */

function drawCompare() {
  const compared = view.models.length > 1 && view.matches.length > 0;
  byId("compare").hidden = !compared;
  if (!compared) return;
  const [first, second] = view.models;
  const key = ([map, head]) => `${map} ${head}`;
  const pairs = view.matches.map((match, index) => ({ ...match, index }));
  const byHead = new Map(pairs.map((match) => [key(match.first), match]));
  const worst = d3.least(pairs, (match) => match.same_place);
  byId("hurt").replaceChildren(
    `${label(first.name, 40)} and ${label(second.name, 40)} differ most in `,
    element("button", { type: "button", class: "plain link", onclick: () => choose({ pair: worst.index }) }, placeName(first.maps[worst.first[0]], worst.first[1])),
    `: similarity ${number(worst.same_place)} at the same place. The mean of all heads is ${number(d3.mean(pairs, (match) => match.same_place))}.`);

  const grid = element("div", { class: "cells", role: "group", "aria-label": "Similarity at the same place, by layer and head" });
  first.maps.forEach((map, i) => {
    const cells = d3.range(map.heads).map((head) => byHead.get(key([i, head]))).filter(Boolean);
    if (cells.length === 0) return;
    grid.append(element("div", { class: "cell-row" }, element("span", { class: "thumbnail-name" }, mapName(map)), cells.map((match) => {
      const text = `${placeName(map, match.first[1])}: similarity ${number(match.same_place)} at the same place`;
      const cell = element("button", { type: "button", "aria-label": text, title: text, "aria-pressed": String(match.index === state.pair), onclick: () => choose({ pair: match.index }) });
      cell.style.background = signedShade(-(1 - match.same_place));
      return cell;
    })));
  });
  byId("same-place").replaceChildren(element("h3", {}, "Where they differ"), element("p", { class: "muted" }, "A row for each layer, a cell for each head. The stronger the colour, the less alike are the two maps at this place."), grid);

  drawPair(view.matches[state.pair]);

  const columns = [{ name: label(first.name, 30), text: true }, { name: `Most like it in ${label(second.name, 30)}`, text: true }, { name: "Similarity" }, { name: "At the same place" }];
  const rows = pairs.map((match) => ({
    open: () => {
      choose({ pair: match.index });
      byId("pair").scrollIntoView({ block: "nearest" });
    },
    cells: [
      { text: placeName(first.maps[match.first[0]], match.first[1]), value: match.first[0] * 10000 + match.first[1] },
      { text: placeName(second.maps[match.second[0]], match.second[1]), value: match.second[0] * 10000 + match.second[1] },
      { text: number(match.similarity), value: match.similarity, fraction: match.similarity },
      { text: number(match.same_place), value: match.same_place, fraction: match.same_place },
    ],
  }));
  byId("matches").replaceChildren(sortableTable("Matched heads", columns, rows));
}

let pairMaps = [];

function drawPair(match) {
  pairMaps.forEach((each) => each.remove());
  pairMaps = [];
  const container = byId("pair");
  container.replaceChildren();
  const sides = [[view.models[0], match.first], [view.models[1], match.second]];
  const boxes = sides.map(([model, [index, head]], side) => {
    const map = model.maps[index];
    const box = element("div");
    const open = element("button", { type: "button", class: "plain link", onclick: () => choose({ model: side, map: index, head }) }, placeName(map, head));
    container.append(element("figure", {}, element("h3", {}, `${label(model.name, 30)}: `, open), box));
    return [box, map, head];
  });
  for (const [box, map, head] of boxes) {
    if (map.tiles.length > 0) pairMaps.push(new HeatMap(box, headOptions(map, head)));
  }
  const [a, b] = boxes.map(([, map, head]) => ({ maps: tiledMap(map), map, head }));
  if (!a.maps.available || !b.maps.available || a.maps.queries !== b.maps.queries || a.maps.keys !== b.maps.keys) return;
  const rows = Math.min(a.maps.queries, 192);
  const columns = Math.min(a.maps.keys, 192);
  const range = [[0, a.maps.queries], [0, a.maps.keys]];
  const before = a.maps.resample(a.head, ...range, rows, columns);
  const values = b.maps.resample(b.head, ...range, rows, columns).map((value, i) => value - before[i]);
  const tile = {
    q0: 0, q1: a.maps.queries, k0: 0, k1: a.maps.keys, rows, columns, values,
    cellQ: a.maps.queries / rows, cellK: a.maps.keys / columns,
  };
  const box = element("div");
  container.append(element("figure", {}, element("h3", {}, "Difference"), box,
    element("figcaption", {}, "Blue where the second looks more, orange where the first does.")));
  const options = headOptions(a.map, a.head);
  pairMaps.push(new HeatMap(box, {
    ...options, signed: true, tiles: () => [tile], title: `Difference of the two maps. ${options.title}`,
    describe: (q, k) => {
      const value = values[rowOf(tile, q) * columns + columnOf(tile, k)];
      return `${options.rowLabel(q)} → ${options.columnLabel(k)}: ${value > 0 ? "+" : "−"}${share(Math.abs(value))}`;
    },
  }));
}

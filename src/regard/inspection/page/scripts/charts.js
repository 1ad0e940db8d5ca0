/* The spectrum of maps, the importance of heads, the attribution of tokens, the logit lens. */

function drawSpectrum() {
  const { maps } = currentModel();
  const curves = maps.flatMap((map, i) => (map.spectrum ?? []).map((values, head) => ({ i, head, values })));
  byId("spectrum").hidden = curves.length === 0;
  if (curves.length === 0) return;
  const container = byId("spectrum-chart");
  const width = Math.max(280, Math.min(900, container.clientWidth - 30));
  const height = Math.min(360, width * 0.6);
  const margin = { left: 46, right: 14, top: 10, bottom: 40 };
  const longest = d3.max(curves, (curve) => curve.values.length);
  const x = d3.scaleLinear([1, Math.max(2, longest)], [margin.left, width - margin.right]);
  const y = d3.scaleLinear([0, 1], [height - margin.bottom, margin.top]);
  const line = d3.line((_, i) => x(i + 1), (value) => y(value));
  const svg = d3.create("svg").attr("width", width).attr("height", height).attr("role", "img")
    .attr("aria-label", "Cumulative share of the singular values of the map of each head.");
  svg.append("g").attr("transform", `translate(0,${height - margin.bottom})`).call(d3.axisBottom(x).ticks(Math.min(longest, width / 80)).tickFormat(d3.format("d")));
  svg.append("g").attr("transform", `translate(${margin.left},0)`).call(d3.axisLeft(y).ticks(5, "%"));
  svg.append("text").attr("x", (width + margin.left) / 2).attr("y", height - 6).attr("text-anchor", "middle").text("number of singular values");
  const tone = (i) => d3.interpolateHcl(colours.scheme === "dark" ? "#2c5f8a" : "#b9d6ec", colours.scheme === "dark" ? "#9bd0ff" : "#08406f")(maps.length > 1 ? i / (maps.length - 1) : 1);
  const isChosen = (curve) => curve.i === state.map && (state.head === ALL || curve.head === state.head);
  for (const curve of d3.sort(curves, (each) => (isChosen(each) ? 1 : 0))) {
    svg.append("path").attr("d", line(curve.values)).attr("fill", "none").attr("class", "curve")
      .attr("stroke", isChosen(curve) ? colours.warning : tone(curve.i)).attr("stroke-width", isChosen(curve) ? 2.5 : 1)
      .attr("stroke-opacity", isChosen(curve) ? 1 : 0.6)
      .on("click", () => choose({ map: curve.i, head: curve.head }))
      .append("title").text(placeName(maps[curve.i], curve.head));
  }
  const chosen = curves.filter(isChosen);
  const needed = (values) => values.findIndex((value) => value >= 0.9) + 1;
  const note = chosen.length === 0 ? "" : `${placeName(currentMap(), state.head)}, the thick line, reaches 90% with ${number(Math.round(d3.mean(chosen, (curve) => needed(curve.values))))} of ${thousands(chosen[0].values.length)} singular values.`;
  container.replaceChildren(svg.node(), element("p", { class: "muted" }, note, maps.length > 1 ? " The darker a line, the later the layer." : ""));
}

function drawImportance() {
  const { maps, importance = [] } = currentModel();
  byId("importance").hidden = importance.length === 0;
  const bars = (entries, title, name) => {
    if (entries.length === 0) return [];
    const sorted = d3.sort(entries, (each) => -Math.abs(each.change)).slice(0, 15);
    const largest = Math.abs(sorted[0].change) || 1;
    const items = sorted.map(({ map, head, change }) =>
      barItem(name(maps[map], head), "", number(change), Math.abs(change) / largest, () => choose({ map, head: head ?? ALL }), change < 0));
    return [element("div", { class: "card" }, element("h3", {}, title), element("ol", { class: "bars wide" }, items))];
  };
  byId("importance-bars").replaceChildren(
    ...bars(importance.filter((each) => each.head !== null), "Single heads", placeName),
    ...bars(importance.filter((each) => each.head === null), "Whole layers", mapName));
}

function drawAttribution() {
  const { attribution = {} } = currentModel();
  const own = view.sequences[0];
  byId("attribution").hidden = Object.keys(attribution).length === 0;
  const boxes = Object.entries(attribution).map(([method, scores]) => {
    const largest = d3.max(scores, Math.abs) || 1;
    const title = element("h3", {}, label(method.replaceAll("_", " "), 60));
    if (isPicture(own)) {
      const canvas = pictureCanvas(own, 320);
      drawOver(canvas, own, scores.map((score) => Math.max(0, score)));
      return element("div", { class: "card photo-card" }, title, canvas);
    }
    if (own.kind !== "text" || scores.length > own.tokens.length) {
      const best = d3.sort(d3.range(scores.length), (i) => -Math.abs(scores[i])).slice(0, 12);
      return element("div", { class: "card" }, title, element("ol", { class: "bars" }, best.map((i) =>
        barItem(tokenLabel(own, i), "", number(scores[i]), Math.abs(scores[i]) / largest, () => choose({ token: i }), scores[i] < 0))));
    }
    return element("div", { class: "card reading" }, title, element("p", {}, scores.slice(0, MOST_READING).map((score, i) => {
      const word = element("bdi", { class: "word", title: `${quoted(own.tokens[i])}: ${number(score)}` }, label(own.tokens[i]));
      word.style.background = signedShade(score / largest);
      return word;
    }), scores.length > MOST_READING ? element("span", { class: "muted" }, ` … ${plural(scores.length, "token")} in all`) : ""));
  });
  byId("attributions").replaceChildren(...boxes);
}

/* Rows are layers, the last at the top. Columns are positions, each with its most likely token; of a
   single position, the most likely tokens. */
function lensTable(lens, caption) {
  const own = view.sequences[0];
  const single = lens.positions.length === 1;
  const cell = (best, [token, probability]) => {
    const title = best.map(([text, p]) => `${quoted(String(text))} ${percent(p)}`).join("\n");
    const td = element("td", { title }, element("bdi", {}, label(String(token), 14)), element("small", {}, ` ${d3.format(".0%")(probability)}`));
    td.style.background = shade(probability * probability);
    return td;
  };
  const rows = lens.layers.map((cells, layer) => element("tr", {},
    element("th", { scope: "row" }, `after ${layer + 1}`),
    single ? cells[0].map((each) => cell(cells[0], each)) : cells.map((best) => cell(best, best[0]))));
  const columns = single ? lens.layers[0][0].map((_, rank) => `${rank + 1}.`) : lens.positions.map((position) => tokenLabel(own, position, 14));
  return element("div", { class: "scroll lens", tabindex: 0, role: "group", "aria-label": caption }, element("table", {},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "layer"), columns.map((name) => element("th", { scope: "col" }, element("bdi", {}, name))))),
    element("tbody", {}, rows.reverse())));
}

function drawLens() {
  const { lens } = currentModel();
  byId("lens").hidden = !lens;
  if (!lens) return;
  const caption = lens.positions.length === 1
    ? `Most likely answers at ${tokenName(view.sequences[0], lens.positions[0])}` : "Most likely token after each layer, by position";
  byId("lens-table").replaceChildren(lensTable(lens, caption));
}

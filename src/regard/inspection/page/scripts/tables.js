/* Tables: the numbers of all heads, and other results. Columns sort. */

/* columns: [{name, title, note}]; rows: [{cells: [{text, value, extra, fraction}], open, chosen()}] */
function sortableTable(caption, columns, rows, sort = null) {
  const body = element("tbody");
  const heads = columns.map((column, index) => {
    const button = element("button", { type: "button", class: "plain", title: column.note, onclick: () => order(index) }, column.name);
    return element("th", { scope: "col", "aria-sort": "none", class: column.text ? "name" : false }, button);
  });
  const made = rows.map((row) => {
    const cells = row.cells.map((cell, index) => {
      if (index === 0) {
        return element("th", { scope: "row" }, row.open ? element("button", { type: "button", class: "plain", onclick: row.open }, cell.text) : cell.text);
      }
      const td = element("td", { class: columns[index].text ? false : "number" }, cell.text, cell.extra ? element("small", {}, ` ${cell.extra}`) : null);
      if (cell.fraction !== undefined) {
        td.classList.add("measured");
        td.style.setProperty("--share", `${(100 * cell.fraction).toFixed(1)}%`);
      }
      return td;
    });
    const tr = element("tr", {}, cells);
    if (row.open) {
      tr.classList.add("opens");
      tr.addEventListener("click", row.open);
    }
    tr.row = row;
    return tr;
  });
  let sorted = { index: -1, down: false };
  const order = (index, down = sorted.index === index ? !sorted.down : !columns[index].text) => {
    sorted = { index, down };
    heads.forEach((th, i) => th.setAttribute("aria-sort", i !== index ? "none" : down ? "descending" : "ascending"));
    const value = (tr) => tr.row.cells[index].value;
    // what has no value is last, either way
    made.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      const less = typeof x === "number" && typeof y === "number" ? x - y : d3.ascending(String(x), String(y));
      return down ? -less : less;
    });
    body.replaceChildren(...made);
  };
  body.append(...made);
  if (sort !== null) order(sort, true);
  return element("div", { class: "scroll tall", tabindex: 0, role: "group", "aria-label": caption },
    element("table", {}, element("caption", {}, caption), element("thead", {}, element("tr", {}, heads)), body));
}

function drawTable() {
  const { maps } = currentModel();
  const names = [...new Set(maps.flatMap((map) => Object.keys(map.metrics)))];
  byId("numbers").hidden = names.length === 0;
  if (names.length === 0) return;
  const largest = new Map(names.map((name) => [name, d3.max(maps.flatMap((map) => map.metrics[name] ?? []), Math.abs) || 1]));
  const columns = [
    { name: "Head", text: true }, { name: "Map", text: true },
    ...names.map((name) => ({ name: metricName(name), note: METRICS[name] ?? visible(name) })),
  ];
  const rows = maps.flatMap((map, i) => (map.kind === "none" ? [] : d3.range(map.heads).map((head) => ({
    map: i, head,
    open: () => {
      choose({ map: i, head });
      byId("head").scrollIntoView({ block: "nearest" });
    },
    cells: [
      { text: placeName(map, head), value: i * 10000 + head },
      { text: KINDS[map.kind][0].toLowerCase(), value: map.kind },
      ...names.map((name) => {
        const value = map.metrics[name]?.[head] ?? null;
        const chance = map.chance[name]?.[head] ?? null;
        return { text: number(value), value, extra: chance === null ? "" : number(chance), fraction: value === null ? undefined : Math.abs(value) / largest.get(name) };
      }),
    ],
  }))));
  byId("table").replaceChildren(sortableTable(`${plural(rows.length, "head")}`, columns, rows));
  byId("meanings").replaceChildren(...names.flatMap((name) =>
    METRICS[name] ? [element("dt", {}, metricName(name)), element("dd", {}, METRICS[name])] : []));
  markTable();
}

function markTable() {
  for (const tr of byId("table").querySelectorAll("tbody tr")) {
    tr.classList.toggle("chosen-row", tr.row.map === state.map && (state.head === ALL || tr.row.head === state.head));
  }
}

function drawResults() {
  const { tables = [], figures = [] } = currentModel();
  byId("results").hidden = tables.length + figures.length === 0;
  const heading = (each) => element("h3", {}, label(each.title, 200));
  byId("tables").replaceChildren(...tables.flatMap((each) => {
    const numeric = each.columns.map((_, i) => i > 0 && each.rows.every((row) => row[i] === null || typeof row[i] === "number"));
    const columns = each.columns.map((name, i) => ({ name: label(name, 60), text: !numeric[i] }));
    const rows = each.rows.map((row) => ({
      cells: row.map((value) => ({ text: typeof value === "number" || value === null ? number(value) : label(String(value), 120), value })),
    }));
    return [heading(each), element("p", { class: "muted" }, visible(cut(each.caption, 1000))), sortableTable(plural(rows.length, "row"), columns, rows)];
  }));
  byId("figures").replaceChildren(...figures.map((each) => {
    const caption = visible(cut(each.caption, 1000));
    return element("figure", { class: "card" }, heading(each), element("img", { src: each.image, alt: caption, class: "figure" }), element("figcaption", {}, caption));
  }));
}

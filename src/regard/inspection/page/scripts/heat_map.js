/* A heat map on a canvas: zoom and pan, a cursor for the keyboard, sharper tiles as one zooms. */

const LABEL_SIZE = 11;
const SMALLEST_CELLS = 6; // cells across, when zoomed in as far as possible
const LARGEST_CELL = 44; // pixels, before zooming

class HeatMap {
  /*
    queries, keys: how many rows and columns
    tiles(): [{q0, q1, k0, k1, rows, columns, cellQ, cellK, values}], the coarsest first
    describe(q, k): what the cell says
    rowLabel(i), columnLabel(i); rowTitle, columnTitle: what the axes are
    rowHeight: of a map with few rows; else cells are square
    onSelect(q, k), onZoom({q, k}); marked(): a row to mark, or null
    signed: values from -largest to largest
    sharpens: whether zooming brings finer tiles
  */
  constructor(container, options) {
    Object.assign(this, { signed: false, zooms: true, sharpens: false, rowHeight: null, marked: () => null, ...options });
    this.canvas = element("canvas", { tabindex: 0, role: "img", "aria-label": this.title });
    this.tip = element("div", { class: "tip", "aria-hidden": "true", hidden: true });
    this.legend = element("canvas", { class: "legend-bar", width: 128, height: 1, "aria-hidden": "true" });
    this.largestLabel = element("span");
    this.leastLabel = element("span");
    this.coarseness = element("span", { class: "coarseness" });
    this.cursor = null;
    this.images = new Map();
    this.transform = d3.zoomIdentity;
    const buttons = [["+", "Zoom in", 2], ["−", "Zoom out", 0.5], ["Whole map", "Show the whole map", 0]].map(([text, name, factor]) =>
      element("button", { type: "button", "aria-label": name, onclick: () => this.scale(factor) }, text));
    this.frame = element("div", { class: "heat" }, this.canvas, this.tip);
    container.replaceChildren(
      this.frame,
      element("div", { class: "under" },
        element("span", { class: "legend-scale" }, this.leastLabel, this.legend, this.largestLabel),
        this.zooms ? element("span", { class: "choice" }, buttons) : null),
      this.coarseness);
    this.listen();
    this.observer = new ResizeObserver(() => this.measure());
    this.observer.observe(this.frame);
    this.measure();
  }

  remove() {
    this.observer.disconnect();
  }

  measure() {
    const width = this.frame.clientWidth;
    if (width === 0 || width === this.width) return;
    this.width = width;
    const context = this.canvas.getContext("2d");
    context.font = `${LABEL_SIZE}px ${colours.font}`;
    const widest = (count, text) => {
      const some = count <= 400 ? d3.range(count) : [...d3.range(200), ...d3.range(count - 200, count)];
      return Math.ceil(d3.max(some, (i) => context.measureText(text(i)).width) ?? 0);
    };
    const room = Math.max(40, width * 0.24);
    this.left = Math.min(room, widest(this.queries, this.rowLabel) + 8) + 16;
    this.top = Math.min(room * 0.9, widest(this.keys, this.columnLabel) + 8) + 18;
    this.right = Math.min(width - 4, this.left + this.keys * LARGEST_CELL);
    const across = this.right - this.left;
    const down = this.rowHeight
      ? this.rowHeight * this.queries
      : Math.max(60, Math.min((across * this.queries) / this.keys, across * 1.4));
    this.bottom = this.top + down;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round((this.bottom + 4) * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.bottom + 4}px`;
    this.x = d3.scaleLinear([0, this.keys], [this.left, this.right]);
    this.y = d3.scaleLinear([0, this.queries], [this.top, this.bottom]);
    if (this.zooms) {
      const area = [[this.left, this.top], [this.right, this.bottom]];
      this.zoom.extent(area).translateExtent(area)
        .scaleExtent([1, Math.max(1, Math.max(this.queries, this.keys) / SMALLEST_CELLS)]);
    }
    this.draw();
  }

  listen() {
    const canvas = d3.select(this.canvas);
    canvas.on("pointermove", (event) => this.point(this.cellAt(event), event));
    canvas.on("pointerleave", () => this.point(null));
    canvas.on("click", (event) => {
      const cell = this.cellAt(event);
      if (cell) this.onSelect?.(cell.q, cell.k);
    });
    canvas.on("keydown", (event) => this.key(event));
    canvas.on("focus", () => this.cursor ?? this.point(this.start()));
    canvas.on("blur", () => this.point(null));
    if (!this.zooms) return;
    // the wheel scrolls the page until the map was clicked; one finger scrolls it until it is zoomed
    this.zoom = d3.zoom()
      .filter((event) => {
        if (event.type === "wheel") return event.ctrlKey || event.metaKey || document.activeElement === this.canvas;
        if (event.touches) return event.touches.length > 1 || this.transform.k > 1;
        return !event.button;
      })
      .on("zoom", (event) => {
        this.transform = event.transform;
        this.canvas.style.touchAction = this.transform.k > 1 ? "none" : "pan-y";
        this.refresh();
      })
      .on("end", (event) => event.sourceEvent !== undefined && this.onZoom?.(this.window()));
    canvas.call(this.zoom);
    this.canvas.style.touchAction = "pan-y";
  }

  /* The tokens in sight. */
  window() {
    const ends = ([from, to], scale, count) => {
      const low = Math.max(0, Math.floor(scale.invert(from) + 1e-3));
      return [low, Math.max(low + 1, Math.min(count, Math.ceil(scale.invert(to) - 1e-3)))];
    };
    const x = this.transform.rescaleX(this.x);
    const y = this.transform.rescaleY(this.y);
    return { q: ends([this.top, this.bottom], y, this.queries), k: ends([this.left, this.right], x, this.keys) };
  }

  whole() {
    const { q, k } = this.window();
    return q[0] === 0 && k[0] === 0 && q[1] === this.queries && k[1] === this.keys;
  }

  showWindow({ q, k }) {
    const scale = Math.min(this.queries / (q[1] - q[0]), this.keys / (k[1] - k[0]));
    const transform = d3.zoomIdentity
      .translate(this.left, this.top).scale(scale).translate(-this.x(k[0]), -this.y(q[0]));
    d3.select(this.canvas).call(this.zoom.transform, transform);
  }

  scale(factor) {
    const canvas = d3.select(this.canvas);
    if (factor === 0) canvas.call(this.zoom.transform, d3.zoomIdentity);
    else canvas.call(this.zoom.scaleBy, factor, this.cursor ? this.centreOf(this.cursor) : undefined);
    this.onZoom?.(this.window());
  }

  centreOf({ q, k }) {
    return [this.transform.rescaleX(this.x)(k + 0.5), this.transform.rescaleY(this.y)(q + 0.5)];
  }

  cellAt(event) {
    const [px, py] = d3.pointer(event, this.canvas);
    const k = Math.floor(this.transform.rescaleX(this.x).invert(px));
    const q = Math.floor(this.transform.rescaleY(this.y).invert(py));
    const inside = px >= this.left && py >= this.top && q >= 0 && k >= 0 && q < this.queries && k < this.keys;
    return inside ? { q, k } : null;
  }

  point(cell) {
    this.cursor = cell;
    this.draw();
    this.tip.hidden = cell === null;
    if (cell === null) return;
    const text = this.describe(cell.q, cell.k);
    this.tip.textContent = text;
    const [x, y] = this.centreOf(cell);
    const room = this.width - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(x + 12, room))}px`;
    this.tip.style.top = `${y + 14}px`;
    if (document.activeElement === this.canvas) announce(text);
  }

  /* Where the keyboard begins: the chosen row, on the diagonal. */
  start() {
    const q = this.marked() ?? 0;
    return { q, k: Math.floor((q * this.keys) / this.queries) };
  }

  /* Draw again, with what the cell under the cursor says now. */
  refresh() {
    if (this.cursor) this.point(this.cursor);
    else this.draw();
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const cell = this.cursor ?? this.start();
    if (moves[event.key] && !event.altKey && !event.ctrlKey && !event.metaKey) {
      const [down, right] = moves[event.key];
      const { cellQ, cellK } = this.shown().at(-1) ?? { cellQ: 1, cellK: 1 };
      const q = Math.max(0, Math.min(this.queries - 1, cell.q + down * Math.max(1, Math.round(cellQ))));
      const k = Math.max(0, Math.min(this.keys - 1, cell.k + right * Math.max(1, Math.round(cellK))));
      this.follow({ q, k });
      this.point({ q, k });
    } else if (event.key === "Enter") this.onSelect?.(cell.q, cell.k);
    else if (this.zooms && ["+", "="].includes(event.key)) this.scale(2);
    else if (this.zooms && event.key === "-") this.scale(0.5);
    else if (this.zooms && event.key === "0") this.scale(0);
    else return;
    event.preventDefault();
  }

  /* Pan until a cell is in sight. */
  follow({ q, k }) {
    if (!this.zooms) return;
    const seen = this.window();
    if (q >= seen.q[0] && q < seen.q[1] && k >= seen.k[0] && k < seen.k[1]) return;
    d3.select(this.canvas).call(this.zoom.translateTo, this.x(k + 0.5), this.y(q + 0.5));
    this.onZoom?.(this.window());
  }

  /* Tiles in sight whose cells are not much smaller than a pixel; the coarsest always. */
  shown() {
    const { q, k } = this.window();
    const pixels = (this.right - this.left) / this.keys * this.transform.k;
    return this.tiles().filter((tile, i) =>
      (i === 0 || tile.cellK * pixels >= 0.75) && tile.q0 < q[1] && tile.q1 > q[0] && tile.k0 < k[1] && tile.k1 > k[0]);
  }

  image(tile, largest) {
    const key = `${colours.scheme} ${state.contrast} ${largest}`;
    const found = this.images.get(tile.values);
    if (found?.key === key) return found.image;
    const image = paint(tile.values, tile.rows, tile.columns, largest, this.signed);
    this.images.set(tile.values, { key, image });
    return image;
  }

  draw() {
    if (!this.width) return;
    const context = this.canvas.getContext("2d");
    const ratio = devicePixelRatio || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.bottom + 4);
    const x = this.transform.rescaleX(this.x);
    const y = this.transform.rescaleY(this.y);
    const tiles = this.shown();
    const largest = d3.max(tiles, (tile) => (tile.largest ??= d3.max(tile.values, Math.abs))) ?? 0;

    context.save();
    context.beginPath();
    context.rect(this.left, this.top, this.right - this.left, this.bottom - this.top);
    context.clip();
    for (const tile of tiles) {
      const pixels = (x(tile.k1) - x(tile.k0)) / tile.columns;
      context.imageSmoothingEnabled = pixels * ratio < 1;
      context.drawImage(this.image(tile, largest), x(tile.k0), y(tile.q0), x(tile.k1) - x(tile.k0), y(tile.q1) - y(tile.q0));
    }
    this.drawMarks(context, x, y);
    context.restore();
    context.strokeStyle = colours.line;
    context.strokeRect(this.left - 0.5, this.top - 0.5, this.right - this.left + 1, this.bottom - this.top + 1);
    this.drawLabels(context, x, y);
    this.drawLegend(largest);
    this.drawCoarseness(tiles);
  }

  /* Say how many tokens a cell is, and where the map is finer. */
  drawCoarseness(tiles) {
    const { q, k } = this.window();
    const covering = tiles.filter((t) => t.q0 <= q[0] && t.q1 >= q[1] && t.k0 <= k[0] && t.k1 >= k[1]).at(-1);
    const [rows, columns] = [covering?.cellQ ?? 1, covering?.cellK ?? 1].map((size) => Math.round(size * 10) / 10);
    const key = `${rows} ${columns} ${q} ${k}`;
    if (key === this.said) return;
    this.said = key;
    this.coarseness.replaceChildren();
    if (rows <= 1 && columns <= 1) return;
    this.coarseness.append(`A cell is the mean of ${rows} × ${columns} tokens. `);
    const finer = this.tiles().filter((tile) => tile.cellQ * tile.cellK < covering.cellQ * covering.cellK);
    const away = (tile) => Math.hypot(tile.q0 + tile.q1 - q[0] - q[1], tile.k0 + tile.k1 - k[0] - k[1]);
    const nearest = d3.least(finer, away);
    if (!this.zooms || this.sharpens || !nearest) return;
    this.coarseness.append(element("button", {
      type: "button", class: "plain link", onclick: () => {
        this.showWindow({ q: [nearest.q0, nearest.q1], k: [nearest.k0, nearest.k1] });
        this.onZoom?.(this.window());
      },
    }, "Zoom into the nearest part that is finer"));
  }

  drawMarks(context, x, y) {
    const marked = this.marked();
    if (marked !== null) {
      context.strokeStyle = colours.warning;
      context.lineWidth = 1.5;
      context.strokeRect(this.left + 1, y(marked), this.right - this.left - 2, Math.max(2, y(marked + 1) - y(marked)));
    }
    if (this.cursor) {
      const { q, k } = this.cursor;
      context.fillStyle = colours.ink;
      context.globalAlpha = 0.08;
      context.fillRect(this.left, y(q), this.right - this.left, Math.max(1, y(q + 1) - y(q)));
      context.fillRect(x(k), this.top, Math.max(1, x(k + 1) - x(k)), this.bottom - this.top);
      context.globalAlpha = 1;
      context.strokeStyle = colours.ink;
      context.lineWidth = 1;
      context.strokeRect(x(k), y(q), Math.max(3, x(k + 1) - x(k)), Math.max(3, y(q + 1) - y(q)));
    }
    context.lineWidth = 1;
  }

  drawLabels(context, x, y) {
    context.font = `${LABEL_SIZE}px ${colours.font}`;
    context.textBaseline = "middle";
    const write = (text, at, room, chosen) => {
      context.fillStyle = chosen ? colours.ink : colours.muted;
      let shown = text;
      while (shown.length > 1 && context.measureText(shown).width > room) shown = `${shown.slice(0, -2)}…`;
      context.fillText(shown, ...at);
    };
    const seen = this.window();
    const step = (scale) => Math.max(1, Math.ceil((LABEL_SIZE + 1) / (scale(1) - scale(0))));
    // every label if there is room, else round numbers of tokens
    const which = ([from, to], every) => {
      if (every === 1) return d3.range(from, to);
      return d3.ticks(from, to, Math.max(2, (to - from) / every / 3)).filter((i) => Number.isInteger(i) && i < to);
    };
    context.textAlign = "right";
    for (const q of which(seen.q, step(y))) {
      write(this.rowLabel(q), [this.left - 5, y(q + 0.5)], this.left - 20, q === this.cursor?.q || q === this.marked());
    }
    for (const k of which(seen.k, step(x))) {
      context.save();
      context.translate(x(k + 0.5), this.top - 5);
      context.rotate(-Math.PI / 2);
      context.textAlign = "left";
      write(this.columnLabel(k), [0, 0], this.top - 22, k === this.cursor?.k);
      context.restore();
    }
    context.fillStyle = colours.muted;
    context.textAlign = "left";
    context.fillText(this.columnTitle, this.left, 7);
    context.save();
    context.translate(7, this.bottom);
    context.rotate(-Math.PI / 2);
    context.fillText(this.rowTitle, 0, 0);
    context.restore();
  }

  drawLegend(largest) {
    const steps = d3.range(128).map((i) => (this.signed ? i / 63.5 - 1 : i / 127));
    this.legend.getContext("2d").drawImage(paint(steps, 1, 128, 1, this.signed), 0, 0);
    this.leastLabel.textContent = this.signed ? `−${number(largest)}` : "0";
    this.largestLabel.textContent = number(largest);
  }
}

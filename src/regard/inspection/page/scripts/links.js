/* Who looks at whom: lines from the tokens that look, on the left, to what they look at, on the right. */

const MOST_LINES = 1200;
const MOST_SLOTS = 160; // tokens on each side of the lines
const GROUPS = 64; // groups of tokens, where there are more
const ROW = 20; // pixels

/* The tokens from..to in groups of equal size, but for the last: one token each if there is room. */
function slots([from, to], cell) {
  const groups = to - from > MOST_SLOTS ? Math.ceil((to - from) / GROUPS) : 1;
  const size = Math.max(groups, Math.round(cell));
  return d3.range(from, to, size).map((start) => ({ from: start, to: Math.min(to, start + size), size }));
}

const slotLabel = (sequence, slot) => (slot.to - slot.from === 1 ? tokenLabel(sequence, slot.from) : `${slot.from}–${slot.to - 1}`);

class TokenLinks {
  constructor(container, map, head) {
    this.map = map;
    this.heads = head === ALL ? d3.range(map.heads) : [head];
    this.sides = { left: sequence(map.queries), right: sequence(map.keys) };
    this.hovered = null;
    this.weigh();
    this.build(container, head);
    this.listen();
    this.paint();
    this.observer = new ResizeObserver(() => this.paint());
    this.observer.observe(this.columns);
  }

  remove() {
    this.observer.disconnect();
  }

  /* How much each group of queries looks at each group of keys: the share of its attention. */
  weigh() {
    const maps = tiledMap(this.map);
    const seen = zoomWindow(this.map) ?? { q: [0, maps.queries], k: [0, maps.keys] };
    const tile = maps.covering(seen.q[0], seen.q[1], seen.k[0], seen.k[1]);
    const left = slots(seen.q, tile.cellQ);
    const right = slots(seen.k, tile.cellK);
    const range = (list) => [list[0].from, list[0].from + list.length * list[0].size];
    this.slots = { left, right };
    this.mean = new Float32Array(left.length * right.length);
    const lines = [];
    for (const head of this.heads) {
      const weights = maps.resample(head, range(left), range(right), left.length, right.length);
      left.forEach((from, i) => right.forEach((to, j) => {
        // a cell at the end is partly outside of the map, where the weights are 0
        const weight = weights[i * right.length + j] * to.size * (from.size / (from.to - from.from));
        this.mean[i * right.length + j] += weight / this.heads.length;
        lines.push({ left: i, right: j, head, weight });
      }));
    }
    this.largestMean = d3.max(this.mean);
    this.largest = d3.max(lines, (line) => line.weight) || 1;
    const strong = lines.filter((line) => line.weight > 0.02 * this.largest);
    this.lines = d3.sort(strong, (line) => -line.weight).slice(0, MOST_LINES).reverse();
  }

  weight(left, right) {
    return this.mean[left * this.slots.right.length + right];
  }

  build(container, head) {
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.columns = element("div", { class: "links" },
      this.column("left", "Tokens that look"), element("div", { class: "lines" }, this.canvas), this.column("right", "Tokens that are looked at"));
    const single = [...this.slots.left, ...this.slots.right].every((slot) => slot.size === 1);
    const key = this.heads.map((each) => {
      const sample = element("span", { class: "sample" });
      sample.style.background = headColour(each, this.map.heads);
      return element("li", {}, element("button", { type: "button", class: "plain", onclick: () => choose({ head: each }) }, sample, `Head ${each}`));
    });
    container.replaceChildren(
      element("h3", {}, placeName(this.map, head)),
      this.heads.length > 1 ? element("ul", { class: "legend" }, key) : "",
      element("div", { class: "scroll-y" }, this.columns),
      single ? "" : element("p", { class: "muted" }, "The tokens are too many for a line each: these are groups. Zoom into the map above to see tokens."));
  }

  column(side, title) {
    const own = this.sides[side];
    return element("div", { class: `side ${side}`, role: "listbox", "aria-label": title }, this.slots[side].map((slot, index) => {
      const name = slot.size === 1 ? `${quoted(tokenText(own, slot.from))}, token ${slot.from}` : `tokens ${slot.from} to ${slot.to - 1}`;
      return element("div", { class: "slot", role: "option", tabindex: -1, "data-index": index, "data-side": side, title: name },
        element("bdi", {}, slotLabel(own, slot)));
    }));
  }

  listen() {
    const { columns } = this;
    const slotOf = (event) => {
      const found = event.target.closest?.(".slot");
      return found ? { side: found.dataset.side, index: Number(found.dataset.index) } : null;
    };
    const hover = (slot) => {
      this.hovered = slot;
      this.paint();
    };
    columns.addEventListener("pointerover", (event) => hover(slotOf(event)));
    columns.addEventListener("pointerleave", () => hover(null));
    columns.addEventListener("focusout", () => hover(null));
    columns.addEventListener("focusin", (event) => {
      hover(slotOf(event));
      if (this.hovered) announce(this.describe(this.hovered));
    });
    columns.addEventListener("click", (event) => slotOf(event) && this.select(slotOf(event)));
    columns.addEventListener("keydown", (event) => {
      if (!["Enter", " "].includes(event.key) || !slotOf(event)) return;
      event.preventDefault();
      this.select(slotOf(event));
    });
    for (const list of columns.querySelectorAll(".side")) {
      rovingFocus(list, ".slot", (pressed) => ({ ArrowDown: 1, ArrowUp: -1 })[pressed]);
      list.firstElementChild.tabIndex = 0;
    }
  }

  select({ side, index }) {
    choose({ side: side === "left" ? "query" : "key", token: this.slots[side][index].from });
  }

  /* The slot of the token that was chosen; null if it is not in sight. */
  chosen() {
    const side = state.side === "query" ? "left" : "right";
    const index = this.slots[side].findIndex((slot) => slot.from <= state.token && state.token < slot.to);
    return index < 0 ? null : { side, index };
  }

  describe({ side, index }) {
    const other = side === "left" ? "right" : "left";
    const weight = (i) => (side === "left" ? this.weight(index, i) : this.weight(i, index));
    const best = d3.sort(d3.range(this.slots[other].length), (i) => -weight(i)).slice(0, 3);
    const list = best.map((i) => `${slotLabel(this.sides[other], this.slots[other][i])} ${share(weight(i))}`).join(", ");
    return `${slotLabel(this.sides[side], this.slots[side][index])} ${side === "left" ? "looks at" : "is looked at by"} ${list}`;
  }

  paint() {
    const chosen = this.chosen();
    const focus = this.hovered ?? chosen;
    const width = this.canvas.parentElement.clientWidth;
    const height = ROW * Math.max(this.slots.left.length, this.slots.right.length);
    const ratio = devicePixelRatio || 1;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    for (const line of this.lines) {
      const lit = !focus || line[focus.side] === focus.index;
      const [start, end] = [(line.left + 0.5) * ROW, (line.right + 0.5) * ROW];
      context.beginPath();
      context.moveTo(0, start);
      context.bezierCurveTo(width * 0.45, start, width * 0.55, end, width, end);
      context.strokeStyle = this.heads.length > 1 ? headColour(line.head, this.map.heads) : colours.accent;
      context.globalAlpha = contrast(line.weight / this.largest) * (lit ? 0.9 : 0.07);
      context.lineWidth = 0.75 + 3 * (line.weight / this.largest);
      context.stroke();
    }
    for (const slot of this.columns.querySelectorAll(".slot")) {
      const { side } = slot.dataset;
      const index = Number(slot.dataset.index);
      const is = (other) => other !== null && other.side === side && other.index === index;
      const across = focus && focus.side !== side;
      const weight = across ? (side === "right" ? this.weight(focus.index, index) : this.weight(index, focus.index)) : 0;
      slot.style.background = weight > 0 ? shade(weight / this.largestMean) : "";
      slot.classList.toggle("focus", is(focus));
      slot.setAttribute("aria-selected", String(is(chosen)));
    }
  }
}

let links = null;

function drawLinks() {
  links?.remove();
  links = new TokenLinks(byId("links"), currentMap(), state.head);
}

/* Images: where a patch or the class token looks, over the picture itself. */

const pictures = new Map();

/* The image of a sequence, once it is loaded. */
function loadPicture(own, then) {
  if (!pictures.has(own.image)) {
    const image = new Image();
    image.onload = schedule;
    image.src = own.image;
    pictures.set(own.image, image);
  }
  const image = pictures.get(own.image);
  if (image.complete && image.naturalWidth > 0) then(image);
  else image.addEventListener("load", () => then(image), { once: true });
}

/* Draw the picture with each patch as bright as its weight. */
function drawOver(canvas, own, weights, chosen = null) {
  loadPicture(own, (image) => {
    const [rows, columns] = own.grid;
    const context = canvas.getContext("2d");
    const { width, height } = canvas;
    const first = own.first_patch ?? 0;
    const patches = weights.slice(first, first + rows * columns);
    const largest = d3.max(patches) || 1;
    context.clearRect(0, 0, width, height);
    context.imageSmoothingEnabled = image.naturalWidth > width;
    context.drawImage(image, 0, 0, width, height);
    patches.forEach((weight, i) => {
      const x = Math.round(((i % columns) * width) / columns);
      const y = Math.round((Math.floor(i / columns) * height) / rows);
      const right = Math.round(((i % columns) + 1) * width / columns);
      const bottom = Math.round((Math.floor(i / columns) + 1) * height / rows);
      context.fillStyle = `rgb(10 14 22 / ${(0.8 * (1 - contrast(weight / largest))).toFixed(3)})`;
      context.fillRect(x, y, right - x, bottom - y);
    });
    const patch = chosen === null ? -1 : chosen - first;
    if (patch >= 0 && patch < rows * columns) {
      context.strokeStyle = "#ffb000";
      context.lineWidth = Math.max(2, width / 180);
      context.strokeRect(((patch % columns) * width) / columns, (Math.floor(patch / columns) * height) / rows, width / columns, height / rows);
    }
  });
}

function pictureCanvas(own, width) {
  const canvas = element("canvas", { class: "photo", width, height: width });
  loadPicture(own, (image) => {
    const height = Math.round((width * image.naturalHeight) / image.naturalWidth);
    if (canvas.height !== height) canvas.height = height;
  });
  return canvas;
}

const isPicture = (own) => Boolean(own.image && own.grid);

function drawPicture() {
  const map = currentMap();
  const own = sequence(map.keys);
  const shown = isPicture(own) && tiledMap(map).available;
  byId("picture").hidden = !shown;
  if (!shown) return;
  const self = map.queries === map.keys;
  const token = state.side === "query" || !self ? state.token : Math.floor(own.count / 2);
  const weights = tiledMap(map).row(state.head, token);
  const large = pictureCanvas(own, 640);
  large.tabIndex = 0;
  large.setAttribute("role", "img");
  large.setAttribute("aria-label", "The picture, bright where the chosen token looks. Arrow keys choose another patch.");
  const [rows, columns] = own.grid;
  const first = own.first_patch ?? 0;
  const name = (i) => tokenName(own, i);
  const chosen = self ? token : null;
  const tip = element("p", { class: "muted" });
  const showTip = (i) => (tip.textContent = i === null ? summary : `${name(i)}: ${share(weights[i])}`);
  const onClass = first > 0 ? `${share(d3.sum(weights.slice(0, first)))} of it on tokens outside the picture.` : "";
  const summary = `${self ? name(token) : tokenName(sequence(map.queries), token)} looks here, ${headName(state.head)}. ${onClass}`;
  showTip(null);
  const patchAt = (event) => {
    const { left, top, width, height } = large.getBoundingClientRect();
    const column = Math.min(columns - 1, Math.floor(((event.clientX - left) / width) * columns));
    const row = Math.min(rows - 1, Math.floor(((event.clientY - top) / height) * rows));
    return first + Math.max(0, row) * columns + Math.max(0, column);
  };
  large.addEventListener("pointermove", (event) => showTip(patchAt(event)));
  large.addEventListener("pointerleave", () => showTip(null));
  if (self) {
    large.addEventListener("click", (event) => choose({ token: patchAt(event), side: "query" }));
    large.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
      const next = token + by;
      if (!by || next < 0 || next >= own.count) return;
      event.preventDefault();
      choose({ token: next, side: "query" });
      announce(name(next));
    });
  }
  const others = self ? d3.range(first).map((i) =>
    element("button", { type: "button", "aria-pressed": String(i === token), onclick: () => choose({ token: i, side: "query" }) }, tokenLabel(own, i))) : [];
  const focused = document.activeElement?.closest?.("#picture-large canvas");
  byId("picture-large").replaceChildren(large, tip, ...(others.length > 0 ? [element("p", { class: "controls" }, others)] : []));
  if (focused) large.focus({ preventScroll: true });
  drawOver(large, own, weights, chosen);

  const small = (weightsOf, title, pressed, open) => {
    const canvas = pictureCanvas(own, 160);
    drawOver(canvas, own, weightsOf, null);
    return element("button", { type: "button", class: "photo-button", "aria-pressed": String(pressed), onclick: open }, canvas, title);
  };
  byId("picture-heads").replaceChildren(
    element("h3", {}, `By head, ${mapName(map)}`),
    element("div", { class: "photos" }, d3.range(map.heads).map((head) =>
      small(tiledMap(map).row(head, token), `Head ${head}`, head === state.head, () => choose({ head })))));

  const layers = currentModel().maps.map((each, index) => ({ each, index }))
    .filter(({ each }) => each.keys === map.keys && each.queries === map.queries && each.tiles.length > 0);
  const row = layers.map(({ each, index }) =>
    small(tiledMap(each).row(ALL, token), mapName(each), index === state.map, () => choose({ map: index })));
  const { rollout } = currentModel();
  if (rollout && own.id === view.sequences[0].id && self) {
    const weightsOf = new TiledMap([rollout], own.count, own.count, 1).row(0, token);
    row.push(element("span", { class: "photo-button" }, small(weightsOf, "Rollout: all layers multiplied", false, () => {}).firstChild, "Rollout: all layers multiplied"));
  }
  byId("picture-layers").replaceChildren(
    element("h3", {}, "By layer, the mean of all heads"), element("div", { class: "photos" }, row));
}

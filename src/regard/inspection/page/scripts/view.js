/* The data of the page and what is derived from them. */

let view = JSON.parse(byId("data").textContent);
let generation = 0; // raised when data changed: a finer tile, or another input
let tiled = new Map();

const sequence = (id) => view.sequences.find((each) => each.id === id);
const currentModel = () => view.models[state.model];
const currentMap = () => currentModel().maps[state.map];

function tiledMap(map) {
  if (!tiled.has(map)) {
    tiled.set(map, new TiledMap(map.tiles, sequence(map.queries).count, sequence(map.keys).count, map.heads));
  }
  return tiled.get(map);
}

function replaceView(other) {
  view = other;
  tiled = new Map();
  generation += 1;
  setEdits([]);
  resetState();
  start();
}

function tokenText(sequence, index) {
  return sequence.tokens[index] ?? `${index}`;
}

/* The row and column of a patch of an image; null for other tokens. */
function patchPlace(sequence, index) {
  if (!sequence.grid) return null;
  const [rows, columns] = sequence.grid;
  const patch = index - (sequence.first_patch ?? 0);
  return patch >= 0 && patch < rows * columns ? [Math.floor(patch / columns), patch % columns] : null;
}

/* A token on an axis: its text, or the row and column of a patch. */
function tokenLabel(sequence, index, length = 24) {
  return patchPlace(sequence, index)?.join(", ") ?? label(tokenText(sequence, index), length);
}

/* A token in a sentence. */
function tokenName(sequence, index) {
  const place = patchPlace(sequence, index);
  if (place) return `patch ${place.join(", ")}`;
  return index < sequence.tokens.length ? label(sequence.tokens[index], 40) : `token ${index}`;
}

const ROLES = { self: "Self-attention", encoder: "Encoder", decoder: "Decoder", cross: "Cross-attention" };
const SHORT_ROLES = { self: "Layer", encoder: "Encoder", decoder: "Decoder", cross: "Cross" };

/* "Layer 3"; with a letter if several maps are of the same layer. */
function mapName(map) {
  const owner = view.models.find((model) => model.maps.includes(map));
  const alike = owner ? owner.maps.filter((each) => each.role === map.role && each.layer === map.layer) : [map];
  const letter = alike.length > 1 ? String.fromCharCode(97 + (alike.indexOf(map) % 26)) : "";
  return `${SHORT_ROLES[map.role]} ${map.layer}${letter}`;
}

const headName = (head) => (head === ALL ? "all heads" : `head ${head}`);
const placeName = (map, head) => `${mapName(map)}, ${headName(head)}`;

const KINDS = {
  exact: ["Exact", "What this head passes on is this map times its values"],
  implied: ["Implied", "This mechanism works in several steps and never computes such a map. This is what the steps amount to together."],
  influence: ["Influence", "This layer has no attention weights. The map shows how strongly each output changes when an input changes a little (the norm of the derivative)."],
  none: ["No map", ""],
};

function kindText(map) {
  if (map.kind === "none") return map.reason;
  const error = map.error === null ? "" : `, with an error of at most ${map.error.toExponential(0).replace("-", "−")} of the largest output`;
  return `${KINDS[map.kind][1]}${map.kind === "exact" ? `${error}.` : ""} ${map.reason}`.trim();
}

/* What the metrics mean, by their names in regard/inspection/metrics.py. */
const METRICS = {
  entropy: "How spread the attention of a token is, in bits: 0 if it looks at one token only.",
  distance: "How far a token looks, on average: in tokens, or in patches of an image.",
  "effective rank": "How many dimensions the map has in effect: the exponential of the entropy of its singular values.",
  first: "Share of attention on the first token.",
  previous: "Share of attention on the token before.",
  same: "Share of attention on the token itself.",
  next: "Share of attention on the token after.",
  "same word": "Share of attention on other places with the same token.",
  duplicate: "Share of attention on earlier places with the same token.",
  induction: "Share of attention on the token that came after an earlier copy of this one: the head that continues what was seen before.",
};
const metricName = (name) => label(name[0].toUpperCase() + name.slice(1), 30);

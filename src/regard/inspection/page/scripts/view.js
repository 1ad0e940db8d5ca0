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
  Object.assign(state, { token: null, zoom: "", pair: 0 });
  generation += 1;
  setEdits([]);
  clampState();
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
const headName = (head) => (head === ALL ? "all heads" : `head ${head}`);
const placeName = (map, head) => `${label(map.name, 40)}, ${headName(head)}`;

const KINDS = {
  exact: ["Exact", "What this head passes on is this map times its values"],
  implied: ["Implied", "This mechanism works in several steps and never computes such a map. This is what the steps amount to together."],
  influence: ["Influence", "This layer has no attention weights. The map shows how strongly each output changes when an input changes a little (the norm of the derivative)."],
  none: ["No map", ""],
};

function kindText(map) {
  if (map.kind === "none") return map.reason;
  const text = KINDS[map.kind][1];
  if (map.kind !== "exact") return map.reason ? `${text} ${map.reason}` : text;
  return map.error === null ? `${text}.` : `${text} (largest relative error ${map.error.toExponential(0).replace("-", "−")}).`;
}

/* Metrics that are known by name, with what they mean. */
const METRICS = {
  entropy: ["Entropy", "How spread the attention of a token is: 0 if it looks at one token, larger the more it looks at."],
  mean_distance: ["Distance", "How far a token looks, on average: in tokens, or in patches of an image."],
  distance: ["Distance", "How far a token looks, on average: in tokens, or in patches of an image."],
  effective_rank: ["Rank", "How many dimensions the map has in effect: the exponential of the entropy of its singular values."],
  rank: ["Rank", "How many dimensions the map has in effect."],
  first: ["First", "Share of attention on the first token."],
  previous: ["Previous", "Share of attention on the token before."],
  same: ["Same", "Share of attention on the token itself."],
  next: ["Next", "Share of attention on the token after."],
  induction: ["Induction", "Share of attention on the token that came after an earlier copy of this token: the head that continues what was seen before."],
  duplicate: ["Duplicate", "Share of attention on earlier copies of the same token."],
};
const metricName = (name) => METRICS[name]?.[0] ?? label(name.replaceAll("_", " "), 30);

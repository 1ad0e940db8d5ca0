/* What the reader chose. It is in the address after #, so that a view can be shared. */

const state = { model: 0, map: null, head: 0, token: null, side: "query", contrast: "weak", pair: 0, zoom: "", at: "" };
const NUMBERS = new Set(["model", "map", "head", "token", "pair"]);
const initial = { ...state }; // what the address leaves out; map and token depend on the view

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const found = { ...initial };
  for (const key of Object.keys(initial)) {
    if (!given.has(key)) continue;
    const text = given.get(key);
    if (!NUMBERS.has(key)) found[key] = text;
    else if (text === "all") found[key] = ALL;
    else if (/^\d{1,9}$/.test(text)) found[key] = Number(text);
  }
  Object.assign(state, found);
  clampState();
}

/* Choose what a view opens with. */
function resetState() {
  Object.assign(initial, { map: null, token: null });
  Object.assign(state, initial);
  clampState();
  Object.assign(initial, { map: state.map, token: state.token });
}

function address(changes = {}) {
  const parts = new URLSearchParams();
  for (const [key, value] of Object.entries({ ...state, ...changes })) {
    if (value !== initial[key] && value !== "") parts.set(key, key === "head" && value === ALL ? "all" : value);
  }
  return `#${parts}`;
}

/* Replace what is not there by the nearest that is. */
function clampState() {
  const within = (value, count) => Math.max(0, Math.min(Number.isInteger(value) ? value : 0, count - 1));
  state.model = within(state.model, view.models.length);
  const { maps } = view.models[state.model];
  if (state.map === null) {
    // a translation opens with its alignment
    const cross = maps.findIndex((map) => map.role === "cross" && map.tiles.length > 0);
    state.map = cross >= 0 ? cross : maps.findIndex((map) => map.tiles.length > 0);
  }
  state.map = within(state.map, maps.length);
  if (maps.length > 0) {
    const map = maps[state.map];
    if (state.head !== ALL || map.heads < 2) state.head = within(state.head, map.heads);
    const { count, first_patch: first } = sequence(state.side === "key" ? map.keys : map.queries);
    state.token = within(state.token ?? (first ? 0 : Math.floor(count / 2)), count);
  }
  if (!["query", "key"].includes(state.side)) state.side = "query";
  if (!["weak", "even"].includes(state.contrast)) state.contrast = "weak";
  if (!/^\d{1,9}-\d{1,9},\d{1,9}-\d{1,9}$/.test(state.zoom)) state.zoom = "";
  state.pair = within(state.pair, view.matches.length);
}

const components = [];
let waiting = false;

function choose(changes) {
  const moved = "map" in changes || "model" in changes;
  Object.assign(state, changes);
  clampState();
  if (moved) state.zoom = keepsShape() ? state.zoom : "";
  try {
    history.replaceState(null, "", address());
  } catch {
    // a page inside a notebook may have no address of its own
  }
  schedule();
}

let shape = "";
function keepsShape() {
  const map = view.models[state.model].maps[state.map];
  const now = map ? `${map.queries} ${map.keys}` : "";
  const same = now === shape;
  shape = now;
  return same;
}

function schedule() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    draw();
  });
}

/* Components draw again if what they depend on changed. */
function draw() {
  for (const component of components) {
    const key = JSON.stringify([colours.scheme, generation, ...component.needs.map((name) => state[name])]);
    if (key === component.drawn) continue;
    component.drawn = key;
    component.draw();
  }
}

function component(needs, draw) {
  components.push({ needs, draw, drawn: null });
}

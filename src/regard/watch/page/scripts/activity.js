/* Which endpoint follows which, and the odd path of an alert over it. */

import { get } from "./api.js";
import { address } from "./main.js";
import { element, percent, pictureWidth, select, shape, visible } from "./elements.js";

const LABEL = 230; // pixels beside the circle for names
const LONGEST = 34; // characters of a name
const LINE = 14; // pixels between names

export async function showActivity(view, parameters) {
  const tenant = parameters.tenant ?? "";
  const [{ nodes, edges }, found] = await Promise.all([
    get("/v1/graph", { tenant }),
    get("/v1/alerts", { kind: "path", limit: 50 }),
  ]);
  const alerts = await Promise.all(found.alerts.slice(0, 20).map((alert) => get(`/v1/alerts/${encodeURIComponent(alert.id)}`)));
  if (parameters.alert && !alerts.some((alert) => alert.id === parameters.alert)) {
    alerts.unshift(await get(`/v1/alerts/${encodeURIComponent(parameters.alert)}`));
  }
  const odd = alerts.filter((alert) => alert.steps.length > 1);
  const chosen = odd.find((alert) => alert.id === parameters.alert) ?? odd[0];
  if (nodes.length === 0 && !chosen) {
    view.append(element("p", { class: "note" }, "No graph: start `regard watch serve` with --model, of a model with the level “sequence”."));
    return;
  }
  const steps = chosen?.steps ?? [];
  view.append(
    element("h2", {}, "What usually follows what"),
    odd.length === 0 ? "" : element("form", { class: "filters" }, select("Odd path", odd.map((alert) => [alert.id, visible(`${alert.entity}: ${alert.steps.join(" → ")}`).slice(0, 120)]), chosen.id,
      (id) => { location.hash = address("activity", { tenant, alert: id }); })),
    element("p", { class: "muted" }, "Lines are steps from one endpoint to another, thicker the more often they are taken; point at one to read it.",
      chosen ? " The marked line with arrows is the odd path." : ""),
    element("div", { class: "card scroll fit" }, drawing(nodes, edges, steps, pictureWidth(view, 640, 1060))),
    chosen ? element("p", {}, element("a", { href: address("alerts", { id: chosen.id }) }, "Why is this path odd?")) : "",
    table(edges),
  );
}

function drawing(nodes, edges, steps, width) {
  const known = nodes.map((node) => node.name);
  const names = d3.sort([...new Set([...known, ...steps])], (name) => name.replace(/^\S+ /, ""), (name) => name);
  const height = Math.max(560, Math.min(760, names.length * 24));
  const radius = Math.min(width / 2 - LABEL, height / 2 - 40);
  const place = new Map(names.map((name, i) => {
    const angle = (2 * Math.PI * i) / names.length - Math.PI / 2;
    return [name, { left: Math.cos(angle) < -0.01, label: height / 2 + (radius + 12) * Math.sin(angle), x: width / 2 + radius * Math.cos(angle), y: height / 2 + radius * Math.sin(angle) }];
  }));
  separate([...place.values()].filter((each) => each.left));
  separate([...place.values()].filter((each) => !each.left));
  const size = d3.scaleSqrt([0, d3.max(nodes, (node) => node.count) ?? 1], [2, 8]);
  const thick = d3.scaleSqrt([0, d3.max(edges, (edge) => edge.count) ?? 1], [0.5, 5]);
  const bend = (from, to) => `M${from.x},${from.y}Q${width / 2 + (from.x + to.x - width) * 0.12},${height / 2 + (from.y + to.y - height) * 0.12} ${to.x},${to.y}`;
  const lines = edges.map((edge) => shape("path", { class: "edge", d: bend(place.get(edge.source), place.get(edge.target)), "stroke-width": thick(edge.count) },
    shape("title", {}, `${edge.source} → ${edge.target}: ${percent(edge.share)} of what follows, ${d3.format(",")(edge.count)} times`)));
  const path = d3.pairs(steps).map(([one, next], i) => shape("path", { class: "odd-edge", d: bend(place.get(one), place.get(next)), "marker-end": "url(#arrow)" }, shape("title", {}, `step ${i + 1}: ${one} → ${next}`)));
  const dots = names.map((name) => {
    const { x, y, left, label } = place.get(name);
    const on = steps.includes(name);
    const node = nodes.find((each) => each.name === name);
    const number = steps.map((step, i) => (step === name ? i + 1 : 0)).filter(Boolean).join(", ");
    return shape("g", { class: on ? "node on" : "node" },
      shape("circle", { cx: x, cy: y, r: node ? size(node.count) : 2 }),
      shape("text", { x: x + (left ? -12 : 12), y: label + 4, "text-anchor": left ? "end" : "start" },
        `${number ? `${number}. ` : ""}${name.length > LONGEST ? `${name.slice(0, LONGEST)}…` : name}`),
      shape("title", {}, node ? `${name}: ${d3.format(",")(node.count)} times` : `${name}: new`));
  });
  return shape("svg", { width, height, class: "graph", role: "img", "aria-label": `${names.length} endpoints and ${edges.length} steps${steps.length ? `; odd path: ${steps.join(" to ")}` : ""}` },
    shape("defs", {}, shape("marker", { id: "arrow", viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 5, markerHeight: 5, orient: "auto-start-reverse" }, shape("path", { d: "M0,0L10,5L0,10z", class: "arrow" }))),
    lines, path, dots);
}

/* Move the labels of one side apart until none covers another. */
function separate(side) {
  const sorted = d3.sort(side, (each) => each.label);
  for (let round = 0; round < 100; round++) {
    for (const [above, below] of d3.pairs(sorted)) {
      const missing = LINE - (below.label - above.label);
      if (missing > 0) {
        above.label -= missing / 2;
        below.label += missing / 2;
      }
    }
  }
}

const table = (edges) => edges.length === 0 ? "" : element("details", {}, element("summary", {}, "The steps as a table"),
  element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ["From", "To", "Times", "Share"].map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, edges.slice(0, 100).map((edge) => element("tr", {}, element("td", {}, element("bdi", {}, edge.source)), element("td", {}, element("bdi", {}, edge.target)),
      element("td", { class: "number" }, d3.format(",")(edge.count)), element("td", { class: "number" }, percent(edge.share))))))));

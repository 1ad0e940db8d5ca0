/* Series per endpoint and entity, with the band that was expected. */

import { get } from "./api.js";
import { address } from "./main.js";
import { element, kindName, select, shape, time, visible } from "./elements.js";

const HEIGHT = 150;
const MARGIN = { left: 52, right: 12, top: 8, bottom: 22 };

export async function showSeries(view, parameters) {
  const { subjects } = await get("/v1/series");
  if (subjects.length === 0) {
    view.append(element("p", { class: "note" }, "No series yet. `regard watch follow` writes them, if the model has the level “series”."));
    return;
  }
  const name = (each) => `${each.tenant}\u0000${each.subject}`;
  const chosen = subjects.find((each) => each.subject === parameters.subject && each.tenant === (parameters.tenant ?? "")) ?? subjects[0];
  view.append(element("form", { class: "filters" }, select("Series of", subjects.map((each) => [name(each), `${visible(each.subject)}${each.tenant ? ` (${visible(each.tenant)})` : ""}`]), name(chosen), (picked) => {
    const [tenant, subject] = picked.split("\u0000");
    location.hash = address("series", { subject, tenant });
  })));
  const { points } = await get("/v1/series", { subject: chosen.subject, tenant: chosen.tenant });
  const charts = element("div", { class: "charts" });
  view.append(charts);
  const draw = () => charts.replaceChildren(...[...d3.group(points, (point) => point.name)].map(([quantity, values]) => chart(quantity, values, charts.clientWidth)));
  draw();
  window.addEventListener("resize", draw);
  return () => window.removeEventListener("resize", draw);
}

const outside = (point) => (point.high !== null && point.value > point.high) || (point.low !== null && point.value < point.low);

function chart(quantity, points, available) {
  const width = Math.max(280, (available > 1100 ? available / 2 - 8 : available) - 36);
  const banded = points.filter((point) => point.low !== null && point.high !== null);
  const x = d3.scaleUtc(d3.extent(points, (point) => point.time * 1000), [MARGIN.left, width - MARGIN.right]);
  const top = d3.max(points, (point) => Math.max(point.value, point.high ?? point.value));
  const bottom = Math.min(0, d3.min(points, (point) => point.value));  // a band below what can be is cut off
  const y = d3.scaleLinear([bottom, top || 1], [HEIGHT - MARGIN.bottom, MARGIN.top]).nice(4);
  const area = d3.area((point) => x(point.time * 1000), (point) => y(Math.max(bottom, point.low)), (point) => y(Math.max(bottom, point.high))).curve(d3.curveMonotoneX);
  const line = d3.line((point) => x(point.time * 1000), (point) => y(point.value));
  const odd = points.filter(outside);
  const number = (content) => d3.format(Math.abs(content) >= 10000 ? ".3~s" : ".3~r")(content);
  const picture = shape("svg", { width, height: HEIGHT, role: "img", "aria-label": `${kindName(quantity)}: ${points.length} points, ${odd.length} outside the expected band` },
    y.ticks(4).map((tick) => [
      shape("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
      shape("text", { class: "tick", x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, y.tickFormat(4, top >= 10000 ? "~s" : undefined)(tick))]),
    x.ticks(width / 110).map((tick) => shape("text", { class: "tick", x: x(tick), y: HEIGHT - 6, "text-anchor": "middle" }, x.tickFormat()(tick))),
    banded.length > 1 ? shape("path", { class: "band", d: area(banded) }) : null,
    shape("path", { class: "line", d: line(points) }),
    odd.map((point) => shape("circle", { class: "odd", cx: x(point.time * 1000), cy: y(point.value), r: 3.5 },
      shape("title", {}, `${new Date(point.time * 1000).toLocaleString()}: ${number(point.value)}${point.high === null ? "" : `, expected ${number(point.low)} to ${number(point.high)}`}`))));
  const last = odd.at(-1);
  return element("figure", { class: "card" }, element("figcaption", {}, element("strong", {}, kindName(quantity)),
    last ? element("span", { class: "muted" }, ` ${odd.length} outside the band, last `, time(last.time)) : null), picture);
}

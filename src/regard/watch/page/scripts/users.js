/* Where users are among their clusters, and who left their usual one. */

import { get } from "./api.js";
import { address } from "./main.js";
import { count, element, pictureWidth, shape, time } from "./elements.js";

const COLOURS = 8; // --cluster-0 ... in the style sheet
const MARGIN = 18;

export async function showUsers(view) {
  const places = await get("/v1/clusters");
  if (places.length === 0) {
    view.append(element("p", { class: "note" }, "No users yet. `regard watch follow` places them, if the model has the level “user”."));
    return;
  }
  const moved = places.filter((place) => place.cluster !== place.home);
  const width = pictureWidth(view, 260, 1060), height = Math.round(width * 0.6);
  const x = d3.scaleLinear(d3.extent(places, (place) => place.x), [MARGIN, width - MARGIN]);
  const y = d3.scaleLinear(d3.extent(places, (place) => place.y), [height - MARGIN, MARGIN]);
  const radius = d3.scaleSqrt([0, d3.max(places, (place) => place.events)], [2.5, 9]);
  const dot = (place) => {
    const link = shape("a", { href: address("alerts", { entity: place.entity }), class: place.cluster === place.home ? "dot" : "dot moved", "aria-label": `${place.entity}: cluster ${place.cluster}` },
      shape("circle", { cx: x(place.x), cy: y(place.y), r: radius(place.events) }),
      shape("title", {}, `${place.entity}: cluster ${place.cluster}${place.cluster === place.home ? "" : `, usually ${place.home}`}, ${count(place.events, "event")}`));
    link.style.setProperty("--colour", `var(--cluster-${place.cluster % COLOURS})`);
    return link;
  };
  const clusters = d3.sort(d3.rollups(places, (each) => each.length, (place) => place.cluster), ([cluster]) => cluster);
  view.append(
    element("h2", {}, `${count(places.length, "user")} in ${count(clusters.length, "cluster")}`),
    element("p", { class: "muted" }, "Users who act alike are near each other. A ring marks those who now act like another cluster than their own."),
    element("ul", { class: "legend" }, clusters.map(([cluster, number]) => {
      const sample = element("span", { class: "sample" });
      sample.style.setProperty("--colour", `var(--cluster-${cluster % COLOURS})`);
      return element("li", {}, sample, `cluster ${cluster}: ${number}`);
    })),
    element("div", { class: "card fit" }, shape("svg", { width, height, role: "group", "aria-label": "Map of users" }, d3.sort(places, (place) => place.cluster !== place.home).map(dot))),
    element("h2", {}, moved.length === 0 ? "Nobody has moved" : "Who has moved"),
    moved.length === 0 ? "" : element("div", { class: "scroll card" }, element("table", {},
      element("thead", {}, element("tr", {}, ["User", "Acts like", "Usually", "Events", "Last seen"].map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, moved.slice(0, 100).map((place) => element("tr", {},
        element("th", { scope: "row" }, element("a", { href: address("alerts", { entity: place.entity }) }, element("bdi", {}, place.entity))),
        element("td", {}, `cluster ${place.cluster}`), element("td", {}, `cluster ${place.home}`), element("td", {}, d3.format(",")(place.events)), element("td", {}, time(place.time))))))),
  );
}

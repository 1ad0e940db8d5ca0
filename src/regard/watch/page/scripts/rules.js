/* New shapes of requests, mutes, and drifts. */

import { get, post, remove } from "./api.js";
import { attempt } from "./main.js";
import { button, count, element, time, value } from "./elements.js";

export async function showRules(view) {
  const [shapes, mutes, drifts] = await Promise.all([get("/v1/shapes"), get("/v1/mutes"), get("/v1/drifts")]);
  const again = () => { view.replaceChildren(); return showRules(view); };
  view.append(
    element("h2", {}, "New shapes of requests"),
    element("p", { class: "muted" }, "Endpoints that were never called, keys that an endpoint has not had, and keys that every earlier request had. Each is reported once."),
    table(["Endpoint", "New", "Missing", "Events", "Users", "Last seen", ""], shapes.map((each) => [
      value(each.endpoint), each.added.length + each.missing.length === 0 ? "the endpoint" : listed(each.added.map(([path, kind]) => `${path} (${kind})`)), listed(each.missing),
      d3.format(",")(each.events), d3.format(",")(each.entities), time(each.last_seen),
      each.status === "accepted" ? "accepted" : button("Accept", () => attempt(async () => { await post(`/v1/shapes/${encodeURIComponent(each.id)}/accept`); await again(); }, "Accepted as normal.")),
    ]), "No new shapes."),
    element("h2", {}, "Mutes"),
    table(["Endpoint", "Path", "Values", "Reason", "Alerts muted", "Ends", ""], mutes.map((each) => [
      value(each.endpoint || "any"), value(each.path || "any"), value(each.value_class || "any"), value(each.reason || "–"), d3.format(",")(each.alerts),
      each.expires === null ? "never" : each.expires * 1000 < Date.now() ? "has ended" : time(each.expires),
      button("End", () => attempt(async () => { await remove(`/v1/mutes/${each.id}`); await again(); }, "The mute has ended."), { "aria-label": `End mute ${each.id}` }),
    ]), "Nothing is muted."),
    element("h2", {}, "Drift"),
    element("p", { class: "muted" }, "Endpoints whose events became more or less surprising, by ADWIN."),
    table(["Endpoint", "When", "Bits before", "Bits after", "Events"], drifts.slice(0, 100).map((each) => [
      value(each.endpoint), time(each.time), each.before.toFixed(1), each.after.toFixed(1), d3.format(",")(each.events),
    ]), "No drift was found."),
  );
}

const listed = (names) => names.length === 0 ? "–" : element("ul", { class: "plain" }, names.slice(0, 8).map((name) => element("li", {}, element("code", {}, name))), names.length > 8 ? element("li", {}, count(names.length - 8, "more key")) : null);

const table = (columns, rows, empty) => rows.length === 0 ? element("p", { class: "note" }, empty) : element("div", { class: "scroll card" }, element("table", {},
  element("thead", {}, element("tr", {}, columns.map((name) => name === "" ? element("td", {}) : element("th", { scope: "col" }, name)))),
  element("tbody", {}, rows.map((cells) => element("tr", {}, cells.map((cell) => element("td", {}, cell)))))));

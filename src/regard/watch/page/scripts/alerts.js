/* The list of alerts with its filters, and the chosen alert beside it. */

import { get } from "./api.js";
import { address, attempt, say } from "./main.js";
import { count, element, kindName, rarity, select, time, visible } from "./elements.js";
import { drawAlert } from "./alert.js";

const REFRESH = 5000; // milliseconds
const PAGE = 50; // alerts
const STATUSES = [["alert", "to judge"], ["shadow", "shadow: new endpoint"], ["repeated", "repeated"], ["muted", "muted"], ["known_shape", "known shape"], ["accepted", "accepted"]];
const SEVERITIES = ["critical", "high", "medium", "low"];

export async function showAlerts(view, parameters) {
  const chosen = { status: "alert", order: "priority", ...parameters };
  const filters = element("form", { class: "filters", "aria-label": "Filters" });
  const total = element("p", { class: "muted" });
  const list = element("ul", { class: "alerts", "aria-label": "Alerts" });
  const more = element("p", {});
  const detail = element("article", { class: "detail", "aria-label": "The chosen alert", tabindex: -1 });
  view.append(element("div", { class: "columns" }, element("section", { class: "list" }, filters, total, list, more), detail));
  let ids = "", size = PAGE, open = null;

  const change = (name, content) => {
    location.hash = address("alerts", { ...chosen, [name]: content, id: "" });
  };
  const options = (counts, all, chosenValue) => {
    const known = Object.entries(counts).map(([name, number]) => [name, `${visible(kindName(name)) || "(none)"} (${d3.format(",")(number)})`]);
    if (chosenValue && !(chosenValue in counts)) known.push([chosenValue, visible(chosenValue)]);
    return [["", all], ...known];
  };

  async function drawFilters() {
    const found = await get("/v1/filters", { status: chosen.status });
    const focused = filters.contains(document.activeElement);
    if (focused) return; // do not take a list away from someone who is choosing
    filters.replaceChildren(
      select("Status", STATUSES.map(([name, text]) => [name, `${text} (${d3.format(",")(found.status[name] ?? 0)})`]), chosen.status, (name) => change("status", name)),
      select("Endpoint", options(found.endpoint, "all endpoints", chosen.endpoint), chosen.endpoint ?? "", (name) => change("endpoint", name)),
      select("Entity", options(found.entity, "everyone", chosen.entity), chosen.entity ?? "", (name) => change("entity", name)),
      select("Kind", options(found.kind, "all kinds", chosen.kind), chosen.kind ?? "", (name) => change("kind", name)),
      select("Severity", [["", "all severities"], ...SEVERITIES.map((name) => [name, `${name} (${found.severity[name] ?? 0})`])], chosen.severity ?? "", (name) => change("severity", name)),
      select("Label", [["", "any label"], ["none", "not judged"], ["attack", "attack"], ["normal", "normal"]], chosen.label ?? "", (name) => change("label", name)),
      select("Order", [["priority", "most urgent first"], ["time", "latest first"]], chosen.order, (name) => change("order", name)),
    );
  }

  async function drawList() {
    const { id, ...query } = chosen;
    const found = await get("/v1/alerts", { ...query, limit: size });
    const now = JSON.stringify(found.alerts.map((alert) => [alert.id, alert.label, alert.status]));
    if (now === ids) return;
    ids = now;
    total.textContent = found.total === 0 ? "" : `${count(found.total, "alert")}${found.total > found.alerts.length ? `, the first ${found.alerts.length} shown` : ""}`;
    const hadFocus = list.contains(document.activeElement) ? document.activeElement.dataset.id : null;
    list.replaceChildren(...found.alerts.map(item));
    more.replaceChildren(...(found.total > found.alerts.length ? [element("button", { type: "button", onclick: () => { size += PAGE; attempt(drawList); } }, "Show more")] : []));
    if (found.alerts.length === 0) {
      list.replaceChildren(element("li", { class: "empty" }, element("p", {}, "No alerts here."),
        element("p", { class: "muted" }, "Nothing that was seen was unusual enough, or the filters leave nothing.")));
    }
    mark();
    if (hadFocus) list.querySelector(`[data-id="${CSS.escape(hadFocus)}"]`)?.focus();
    const first = chosen.id ?? found.alerts[0]?.id;
    if (open === null && first) await choose(first, false);
  }

  function item(alert) {
    return element("li", {}, element("button", { type: "button", class: `alert ${alert.severity}`, "data-id": alert.id, onclick: () => attempt(() => choose(alert.id)) },
      element("span", { class: "row" }, element("strong", {}, kindName(alert.kind)), alert.label ? element("span", { class: `tag ${alert.label}` }, alert.label) : null, time(alert.time)),
      element("bdi", { class: "endpoint" }, alert.endpoint || "(no endpoint)"),
      element("span", { class: "row muted" }, element("bdi", { class: "cut" }, alert.findings[0]?.path ?? ""), element("bdi", { class: "cut who" }, alert.entity || "(no entity)")),
      element("span", { class: "unseen" }, `${alert.severity}, ${rarity(alert.p)}`)));
  }

  function mark() {
    for (const each of list.querySelectorAll(".alert")) {
      if (each.dataset.id === open) each.setAttribute("aria-current", "true");
      else each.removeAttribute("aria-current");
    }
  }

  async function choose(id, focus = true) {
    open = id;
    mark();
    history.replaceState(null, "", address("alerts", { ...chosen, id }));
    const alert = await get(`/v1/alerts/${encodeURIComponent(id)}`);
    if (open !== id) return; // another one was chosen meanwhile
    drawAlert(detail, alert, { changed: refresh });
    if (focus && matchMedia("(max-width: 60rem)").matches) detail.scrollIntoView();
  }

  async function refresh() {
    ids = "";
    await drawFilters();
    await drawList();
    if (open !== null) await choose(open, false);
  }

  function move(step) {
    const all = [...list.querySelectorAll(".alert")];
    const at = all.findIndex((each) => each.dataset.id === open);
    const next = all[Math.max(0, Math.min(all.length - 1, at + step))];
    if (!next || next.dataset.id === open) return;
    next.focus();
    attempt(() => choose(next.dataset.id));
  }

  const keys = { j: () => move(1), k: () => move(-1), ArrowDown: () => move(1), ArrowUp: () => move(-1) };
  for (const [key, name] of [["a", "attack"], ["n", "normal"], ["l", "learn"], ["m", "mute"]]) {
    keys[key] = () => detail.querySelector(`[data-action="${name}"]`)?.click();
  }
  function press(event) {
    const typing = event.target.closest("input, select, textarea, dialog[open]");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.startsWith("Arrow") && !list.contains(event.target)) return; // they scroll the page
    if (event.key in keys) {
      event.preventDefault();
      keys[event.key]();
    }
  }

  document.addEventListener("keydown", press);
  await drawFilters();
  await drawList();
  if (open === null) {
    detail.replaceChildren(element("p", { class: "muted empty" }, "Choose an alert to see why it is one."));
  }
  const timer = setInterval(() => {
    if (!document.hidden) attempt(async () => { await drawFilters(); await drawList(); });
  }, REFRESH);
  return () => {
    clearInterval(timer);
    document.removeEventListener("keydown", press);
    say("");
  };
}

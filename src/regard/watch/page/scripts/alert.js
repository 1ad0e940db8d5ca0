/* One alert: what is unusual, what was expected, the event beside the nearest normal one. */

import { post } from "./api.js";
import { address, attempt } from "./main.js";
import { asText, button, element, kindName, percent, rarity, time, value } from "./elements.js";

const MAX_BITS = 24; // the darkest shade of a leaf
const MOST_LEAVES = 200;
const MOST_FINDINGS = 3; // the others are folded
const MOST_TABLES = 1; // findings with a table; the sentences of the others name what is usual

export function drawAlert(container, alert, { changed }) {
  const first = alert.findings[0];
  const title = `Unusual ${kindName(alert.kind)}${first?.path && !first.path.startsWith("(") ? ` at ${first.path}` : ""}`;
  const parts = [
    element("header", {},
      element("h2", {}, element("bdi", {}, title)),
      element("p", { class: "row" },
        element("span", { class: `tag ${alert.severity}` }, alert.severity),
        alert.status === "alert" ? null : element("span", { class: "tag" }, kindName(alert.status)),
        alert.label ? element("span", { class: `tag ${alert.label}` }, `labelled ${alert.label}`) : null,
        element("span", {}, rarity(alert.p), alert.extrapolated ? element("span", { class: "muted", title: `Fewer than ${alert.baseline} normal events were seen, so this is an extrapolation.` }, " (extrapolated)") : null)),
      actions(alert, changed)),
    element("dl", { class: "facts" },
      fact("Who", element("a", { href: address("alerts", { entity: alert.entity }) }, element("bdi", {}, alert.entity || "(unknown)"))),
      fact("What", element("a", { href: address("alerts", { endpoint: alert.endpoint }) }, element("bdi", {}, alert.endpoint || "(unknown)"))),
      fact("When", time(alert.time, true)),
      fact("Where", value(alert.source)),
      alert.tenant ? fact("Tenant", value(alert.tenant)) : null,
      alert.reason ? fact("Reason", value(alert.reason)) : null,
      alert.note ? fact("Note", value(alert.note)) : null),
    section("Why", findings(alert)),
    section("The event", leaves(alert)),
    section("What if", whatIf(alert)),
    section("Steps before", steps(alert)),
    element("footer", { class: "muted" }, `Alert ${alert.id} · `,
      element("a", { href: `/v1/alerts/${encodeURIComponent(alert.id)}?format=ocsf`, target: "_blank", rel: "noopener" }, "OCSF"), " · ",
      element("a", { href: `/v1/alerts/${encodeURIComponent(alert.id)}?format=ecs`, target: "_blank", rel: "noopener" }, "ECS"),
      ` · ${d3.format(",")(alert.baseline)} normal events behind p · model ${alert.model || "unknown"}`),
  ];
  container.replaceChildren(...parts.filter((part) => part !== null));
  container.scrollTop = 0;
}

const fact = (name, ...content) => [element("dt", {}, name), element("dd", {}, ...content)];
const section = (title, content) => (content ? element("section", {}, element("h3", {}, title), content) : null);

function actions(alert, changed) {
  const path = `/v1/alerts/${encodeURIComponent(alert.id)}`;
  const label = (name) => attempt(async () => {
    await post(`${path}/label`, { label: alert.label === name ? "" : name, note: alert.note });
    await changed();
  }, alert.label === name ? "Label removed." : `Labelled as ${name}.`);
  const labelButton = (name, text, key) => button([text, element("kbd", { "aria-hidden": "true" }, key)], () => label(name),
    { "data-action": name, "aria-pressed": String(alert.label === name), class: name, "aria-keyshortcuts": key });
  return element("div", { class: "actions", role: "group", "aria-label": "Judge this alert" },
    labelButton("attack", "Attack", "a"), labelButton("normal", "Normal", "n"),
    button(["Learn as normal", element("kbd", { "aria-hidden": "true" }, "l")], () => attempt(async () => {
      await post(`${path}/accept`);
      await changed();
    }, "Accepted: regard watch follow learns this event as normal."), { "data-action": "learn", disabled: alert.status === "accepted", "aria-keyshortcuts": "l", title: "The event was normal: teach it to the model, so that such events are not reported again." }),
    button(["Mute …", element("kbd", { "aria-hidden": "true" }, "m")], () => askMute(alert, changed), { "data-action": "mute", "aria-keyshortcuts": "m", title: "Stop reporting this finding for some time, without teaching it." }));
}

function askMute(alert, changed) {
  const dialog = document.getElementById("dialog");
  const first = alert.findings[0] ?? { path: "" };
  const input = (name, label, content) => element("label", { class: "field" }, element("span", {}, label), element("input", { name, value: content, autocomplete: "off" }));
  const form = element("form", { method: "dialog" },
    element("h2", { id: "dialog-title" }, "Mute this finding"),
    element("p", { class: "muted" }, "Alerts whose findings match are no longer reported. An empty field matches anything, * any text."),
    input("endpoint", "Endpoint", alert.endpoint), input("path", "Path", first.path), input("value_class", "Class of values", ""), input("reason", "Reason", ""),
    element("label", { class: "field" }, element("span", {}, "For"), element("select", { name: "hours" },
      [["24", "a day"], ["168", "a week"], ["720", "30 days"], ["", "ever"]].map(([hours, text]) => element("option", { value: hours, selected: hours === "168" }, text)))),
    element("div", { class: "actions" }, button("Mute", null, { type: "submit", class: "primary" }), button("Cancel", () => dialog.close())));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const { hours, ...fields } = Object.fromEntries(new FormData(form));
    attempt(async () => {
      await post("/v1/mutes", { ...fields, tenant: alert.tenant, hours: hours === "" ? null : Number(hours) });
      dialog.close();
      await changed();
    }, "Muted. Alerts that are stored already stay.");
  });
  dialog.replaceChildren(form);
  dialog.showModal();
}

function findings(alert) {
  if (alert.findings.length === 0) return null;
  const list = (found, first) => element("ol", { class: "findings", start: first + 1 }, found.map((finding, i) => oneFinding(finding, first + i < MOST_TABLES)));
  const others = alert.findings.slice(MOST_FINDINGS);
  return element("div", {}, list(alert.findings.slice(0, MOST_FINDINGS), 0),
    others.length === 0 ? null : element("details", {}, element("summary", {}, `${others.length} more`), list(others, MOST_FINDINGS)));
}

const oneFinding = (finding, tabulated) => element("li", {},
  element("p", { class: "row" }, element("strong", {}, kindName(finding.kind)), finding.path ? element("code", {}, finding.path) : null,
    element("span", { class: "muted" }, `${finding.bits.toFixed(1)} bits`)),
  finding.text ? element("p", {}, element("bdi", {}, finding.text)) : null,
  tabulated && finding.expected.length > 0 ? expectedTable(finding) : null);

const expectedTable = (finding) => element("table", { class: "expected" },
  element("caption", { class: "unseen" }, "Observed and expected values"),
  element("tbody", {},
    element("tr", { class: "observed" }, element("th", { scope: "row" }, value(finding.observed)), element("td", {}, "observed"), element("td", {})),
    finding.expected.slice(0, 5).map(([content, share]) => element("tr", {},
      element("th", { scope: "row" }, value(content)), element("td", {}, percent(share)), element("td", {}, bar(share))))));

function bar(share) {
  const filled = element("span", { class: "bar" });
  filled.style.setProperty("--share", Math.min(1, share));
  return filled;
}

/* The leaves in the order of the event, coloured by surprise, beside the nearest normal event. */
function leaves(alert) {
  if (alert.leaves.length === 0) return null;
  const normal = alert.nearest_normal;
  const beside = Object.keys(normal).length > 0;
  const seen = new Set(alert.leaves.map((leaf) => leaf.path));
  const missing = Object.keys(normal).filter((path) => !seen.has(path)).map((path) => ({ path, value: undefined, bits: 0 }));
  let sorted = false;
  const body = element("tbody", {});
  const draw = () => {
    const rows = [...alert.leaves, ...missing];
    if (sorted) rows.sort((one, other) => other.bits - one.bits);
    body.replaceChildren(...rows.slice(0, MOST_LEAVES).map((leaf) => leafRow(leaf, normal, beside)));
  };
  draw();
  const order = button("Most surprising first", () => {
    sorted = !sorted;
    order.setAttribute("aria-pressed", String(sorted));
    draw();
  }, { "aria-pressed": "false", class: "small" });
  const hidden = alert.leaves.length + missing.length - MOST_LEAVES;
  return element("div", {}, element("p", { class: "row" }, order, element("span", { class: "muted" }, "The darker a row, the more surprising its value.")),
    element("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Leaves of the event" }, element("table", { class: "leaves" },
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Path"), element("th", { scope: "col" }, "This event"),
        beside ? element("th", { scope: "col" }, "Nearest normal event") : null, element("th", { scope: "col", class: "number" }, "Bits"))), body)),
    hidden > 0 ? element("p", { class: "muted" }, `and ${hidden} more`) : null);
}

function leafRow(leaf, normal, beside) {
  const absent = leaf.value === undefined;
  const known = leaf.path in normal;
  const same = known && asText(normal[leaf.path]) === asText(leaf.value);
  const row = element("tr", { class: absent ? "absent" : leaf.bits > MAX_BITS / 4 ? "odd" : null },
    element("th", { scope: "row" }, element("bdi", {}, leaf.path)),
    element("td", {}, absent ? element("span", { class: "muted" }, "missing") : value(leaf.value)),
    beside ? element("td", {}, same ? element("span", { class: "muted", title: "the same" }, "same") : known ? value(normal[leaf.path]) : element("span", { class: "muted" }, "not there")) : null,
    element("td", { class: "number" }, absent ? "" : leaf.bits.toFixed(1)));
  row.style.setProperty("--surprise", Math.min(1, Math.max(0, leaf.bits / MAX_BITS)).toFixed(3));
  return row;
}

function whatIf(alert) {
  if (alert.what_if.length === 0) return null;
  return element("ul", { class: "plain" }, alert.what_if.map((change) => element("li", {},
    "With ", element("code", {}, change.path), " = ", value(change.value), " the event would be ",
    element("strong", {}, change.p_after === undefined ? `${change.bits_after.toFixed(1)} bits` : rarity(change.p_after)),
    element("span", { class: "muted" }, ` (${change.bits_before?.toFixed(1)} → ${change.bits_after?.toFixed(1)} bits)`))));
}

function steps(alert) {
  const context = alert.findings.flatMap((finding) => finding.context);
  if (alert.steps.length < 2 && context.length === 0) return null;
  return element("div", {},
    alert.steps.length < 2 ? null : element("ol", { class: "steps" }, alert.steps.map((name) => element("li", {}, element("bdi", {}, name)))),
    alert.steps.length < 2 ? null : element("p", {}, element("a", { href: address("activity", { tenant: alert.tenant, alert: alert.id }) }, "Show on the activity graph")),
    context.length === 0 ? null : element("ul", { class: "plain" }, context.slice(0, 8).map(([source, weight]) => element("li", {}, value(source), element("span", { class: "muted" }, ` weighs ${percent(weight)}`)))));
}

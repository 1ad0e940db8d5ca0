/* Elements are built from text only: nothing that came from a request is ever read as HTML. */

const SVG = "http://www.w3.org/2000/svg";
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/* Text with control characters, which could hide or reorder it, written as escapes. */
export const visible = (text) =>
  String(text).replace(HIDDEN, (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(visible(child)))));
  return node;
}

export const element = (name, attributes, ...children) => build(document.createElement(name), attributes, children);
export const shape = (name, attributes, ...children) => build(document.createElementNS(SVG, name), attributes, children);

/* A value of a request: isolated, so that its direction changes no text around it. */
export const value = (content, attributes) => element("bdi", { class: "value", ...attributes }, asText(content));

export function asText(content) {
  if (content === null) return "null";
  if (typeof content === "string") return content === "" ? "“”" : content;
  return typeof content === "object" ? JSON.stringify(content) : String(content);
}

export const button = (label, onclick, attributes) => element("button", { type: "button", onclick, ...attributes }, label);

export function select(label, options, chosen, onchange) {
  const list = element("select", { onchange: (event) => onchange(event.target.value) },
    options.map(([name, text]) => element("option", { value: name, selected: name === chosen }, text)));
  return element("label", { class: "field" }, element("span", {}, label), list);
}

export const count = (number, word) => `${d3.format(",")(number)} ${word}${number === 1 ? "" : "s"}`;

const dateTime = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const shortTime = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });

export function time(seconds, long = false) {
  const moment = new Date(seconds * 1000);
  if (Number.isNaN(moment.getTime())) return element("span", {}, "unknown time");
  return element("time", { datetime: moment.toISOString(), title: dateTime.format(moment) }, (long ? dateTime : shortTime).format(moment));
}

/* A p-value as people say it: "1 in 50,000 normal events". */
export function rarity(p) {
  if (!(p > 0)) return "rarer than any normal event";
  const events = 1 / p;
  return events < 2 ? "usual" : `1 in ${d3.format(",")(Number(events.toPrecision(2)))} normal events`;
}

export const percent = (share) => (share >= 0.995 || share === 0 ? d3.format(".0%") : share < 0.001 ? d3.format(".2~%") : d3.format(".1~%"))(share);

export const kindName = (kind) => kind.replaceAll("_", " ");

/* The width for a picture in a card of a view: without the paddings of both. */
export const pictureWidth = (view, least, most) => Math.max(least, Math.min(most, view.clientWidth - 76));

/* Elements. Text from the data becomes text nodes only, and its control characters are spelled out. */

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.flat().filter((child) => child !== null));
  return made;
}

const byId = (id) => document.getElementById(id);

/* Control, bidirectional, zero-width and unpaired surrogate characters, as \u{...}. */
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\p{Cs}]/gu;

function visible(text) {
  return text.replace(UNSEEN, (each) => {
    if (each === "\n") return "↵";
    if (each === "\t") return "⇥";
    return `\\u{${each.codePointAt(0).toString(16)}}`;
  });
}

function cut(text, length) {
  const characters = [...text.slice(0, 2 * length + 2)];
  return characters.length > length ? characters.slice(0, length - 1).join("") + "…" : characters.join("");
}

/* A short label: a space before a word is left out, other spaces are drawn. */
function label(text, length = 24) {
  if (text === "") return "∅";
  const shown = visible(cut(text, 4 * length)).replace(/^ (?=\S)/, "");
  return cut(/^\s+$/.test(shown) ? "␣".repeat(Math.min(3, shown.length)) : shown, length);
}

function quoted(text) {
  return `“${visible(cut(text, 300))}”`;
}

const percent = d3.format(".1%");
const thousands = d3.format(",");

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const sign = value < 0 ? "−" : "";
  if (Number.isInteger(size) || size >= 1000) return sign + thousands(Math.round(size));
  if (size >= 0.001) return sign + size.toFixed(size >= 10 ? 1 : size >= 0.1 ? 2 : 3);
  return sign + size.toExponential(0).replace("-", "−");
}

/* Weights: per cent where one can read them, else powers of ten. */
function share(value) {
  if (value >= 0.0995) return d3.format(".0%")(value);
  if (value >= 0.0005) return percent(value);
  return value === 0 ? "0%" : value.toExponential(0).replace("-", "−");
}

const plural = (count, noun) => `${thousands(count)} ${noun}${count === 1 ? "" : "s"}`;

let announcing;
function announce(text) {
  clearTimeout(announcing);
  announcing = setTimeout(() => (byId("live").textContent = text), 150);
}

/* Buttons of which one is pressed. */
function choice(title, options, chosen, choose) {
  const buttons = options.map(([value, text]) =>
    element("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => choose(value) }, text));
  return element("span", { role: "group", "aria-label": title, class: "choice" }, buttons);
}

/* One stop for the Tab key in a group; arrow keys move inside it. */
function rovingFocus(container, selector, step) {
  container.addEventListener("keydown", (event) => {
    const items = [...container.querySelectorAll(selector)];
    const at = items.indexOf(event.target.closest(selector));
    const to = items[at + (step(event.key, items, at) ?? NaN)];
    if (at < 0 || !to) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  });
}

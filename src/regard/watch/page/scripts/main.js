/* The frame: sign-in, views by the address after "#", messages. */

import { NotSignedIn, post } from "./api.js";
import { element, button } from "./elements.js";
import { showAlerts } from "./alerts.js";
import { showSeries } from "./series.js";
import { showUsers } from "./users.js";
import { showActivity } from "./activity.js";
import { showRules } from "./rules.js";

const VIEWS = { alerts: showAlerts, series: showSeries, users: showUsers, activity: showActivity, rules: showRules };
const view = document.getElementById("view");
const state = document.getElementById("state");
let leave = () => {};

/* "#/alerts?entity=u1" -> the name of the view and its parameters. */
function readAddress() {
  const [name, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: name in VIEWS ? name : "alerts", parameters: Object.fromEntries(new URLSearchParams(query)) };
}

export function address(name, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, content]) => content));
  return query.size ? `#/${name}?${query}` : `#/${name}`;
}

export function say(message, wrong = false) {
  state.textContent = message;
  state.classList.toggle("wrong", wrong);
}

/* Run something; errors are shown, and a lost sign-in asks for the token. */
export async function attempt(action, done = "") {
  try {
    const result = await action();
    if (done) say(done);
    return result;
  } catch (error) {
    if (error instanceof NotSignedIn) showSignIn();
    else say(error.message, true);
    return undefined;
  }
}

async function show() {
  leave();
  leave = () => {};
  const { name, parameters } = readAddress();
  document.getElementById("views").hidden = false;
  for (const link of document.querySelectorAll("#views a")) {
    if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  view.replaceChildren();
  say("");
  leave = (await attempt(() => VIEWS[name](view, parameters))) ?? (() => {});
}

function showSignIn() {
  leave();
  leave = () => {};
  document.getElementById("views").hidden = true;
  const input = element("input", { type: "password", autocomplete: "off", required: true, id: "token" });
  const form = element("form", { class: "card sign-in" },
    element("h2", {}, "Sign in"),
    element("p", {}, "Paste the token that `regard watch serve` printed when it was started."),
    element("label", { class: "field", for: "token" }, element("span", {}, "Token"), input),
    button("Sign in", null, { type: "submit", class: "primary" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    signIn(input.value);
  });
  view.replaceChildren(form);
  input.focus();
}

async function signIn(token) {
  try {
    await post("/sign-in", { token: token.trim() });
  } catch (error) {
    showSignIn();
    say(error.message, true);
    return;
  }
  history.replaceState(null, "", "/#/alerts");
  show();
}

window.addEventListener("hashchange", show);
/* The printed address is /sign-in#TOKEN: what follows "#" is not sent to any server by itself. */
if (location.pathname === "/sign-in" && location.hash.length > 1) signIn(decodeURIComponent(location.hash.slice(1)));
else show();

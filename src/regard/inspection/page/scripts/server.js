/* What a server can do: finer tiles, changes of the model, another input. */

async function ask(question, body) {
  let answer;
  try {
    answer = await fetch(`api/${question}`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ...body, revision: view.revision }), credentials: "omit",
    });
  } catch {
    throw new Error("The server does not answer. Is `regard look --serve` still running?");
  }
  if (answer.ok) return answer.json();
  const text = await answer.text();
  const refused = answer.headers.get("content-type") === "application/json";
  throw new Error(refused ? JSON.parse(text).error : text);
}

const REPLACEMENTS = [
  ["zero", "Switch off"], ["uniform", "Look everywhere alike"], ["identity", "Look at itself only"], ["example", "Look as in another text"],
];
let edits = [];
let edited = 0; // the model that they are for

function drawInterventions() {
  const map = currentMap();
  byId("interventions").hidden = !view.server || !map;
  if (byId("interventions").hidden) return;
  if (edited !== state.model) {
    edited = state.model;
    setEdits([]);
  }
  const example = element("textarea", { rows: 2, "aria-label": "The other text", placeholder: "The other text", hidden: true });
  const replace = element("select", { "aria-label": "What is there instead", onchange: () => (example.hidden = replace.value !== "example") },
    REPLACEMENTS.map(([value, text]) => element("option", { value }, text)));
  const add = (heads) => {
    const rest = edits.filter((edit) => edit.map !== state.map || (!heads.includes(edit.head) && !heads.includes(null)));
    const text = replace.value === "example" ? { example: example.value } : {};
    setEdits([...rest, ...heads.map((head) => ({ map: state.map, head, replace: replace.value, ...text }))]);
  };
  const button = (text, heads, primary = false) =>
    element("button", { type: "button", class: primary ? "primary" : false, onclick: () => add(heads) }, text);
  const all = [null];
  const others = d3.range(map.heads).filter((head) => head !== state.head);
  const name = mapName(map);
  const buttons = state.head === ALL || others.length === 0
    ? [button(`Change all heads of ${name}`, all, true)]
    : [button(`Change ${placeName(map, state.head)}`, [state.head], true), button("All heads of the layer but this", others), button("All heads of the layer", all)];
  byId("edit-controls").replaceChildren(element("div", { class: "controls" }, replace, buttons), example);
}

async function setEdits(chosen) {
  edits = chosen;
  byId("edit-list").replaceChildren(...edits.map((edit) => {
    const name = placeName(view.models[edited].maps[edit.map], edit.head ?? ALL);
    const what = REPLACEMENTS.find(([value]) => value === edit.replace)[1].toLowerCase();
    const undo = () => setEdits(edits.filter((each) => each !== edit));
    return element("li", {}, `${name}: ${what} `, element("button", { type: "button", "aria-label": `Undo: ${name}`, onclick: undo }, "×"));
  }));
  const result = byId("edit-result");
  result.replaceChildren();
  if (edits.length === 0) return;
  result.append(element("p", { class: "muted" }, "The model runs …"));
  try {
    const found = await ask("intervene", { model: edited, edits });
    if (chosen === edits) result.replaceChildren(...beforeAfter(found));
  } catch (error) {
    if (chosen === edits) result.replaceChildren(element("p", { class: "warning" }, visible(error.message)));
  }
}

function beforeAfter({ before, after, metric }) {
  const side = (title, output, other) => {
    const list = output.probabilities.map(([name, probability]) => {
      const was = other?.probabilities.find(([each]) => each === name)?.[1];
      return element("li", {}, barCells(label(name, 30), "", percent(probability) + (was === undefined ? "" : `, was ${percent(was)}`), probability));
    });
    return element("div", { class: "card" }, element("h3", {}, title), element("p", { class: "prediction" }, element("bdi", {}, label(output.prediction, 400))),
      element("ol", { class: "bars answers" }, list), output.lens ? lensTable(output.lens, `Logit lens, ${title.toLowerCase()}`) : null);
  };
  const parts = [element("div", { class: "split even" }, side("Unchanged", before), side("With the changes", after, before))];
  if (metric) {
    parts.unshift(element("p", {}, `${visible(metric.name)} on ${plural(metric.examples, "example")}: ${number(metric.before)} before, `,
      element("strong", {}, number(metric.after)), " with the changes."));
  }
  return parts;
}

function drawAnother() {
  const texts = view.sequences.filter((each) => each.kind === "text");
  byId("another").hidden = !view.server || texts.length === 0;
  if (byId("another").hidden) return;
  const areas = texts.map((each, i) => element("textarea", {
    rows: 3, "aria-label": texts.length > 1 ? `Text ${i + 1}: ${visible(each.id)}` : "Text", placeholder: texts.length > 1 ? visible(each.id) + (each.id === "target" ? " (empty: what the model writes)" : "") : "A text", spellcheck: "false",
  }));
  const status = element("p", { role: "status" });
  const form = element("form", {
    onsubmit: async (event) => {
      event.preventDefault();
      status.textContent = "The model reads …";
      try {
        replaceView(await ask("look", { texts: areas.map((area) => area.value) }));
      } catch (error) {
        status.textContent = visible(error.message);
      }
    },
  }, areas, element("div", { class: "controls" }, element("button", { type: "submit", class: "primary" }, "Look")), status);
  byId("another-form").replaceChildren(form);
}

/* What a server can do: finer tiles, changes of the model, another input. */

async function ask(question, body) {
  let answer;
  try {
    answer = await fetch(`api/${question}`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), credentials: "omit",
    });
  } catch {
    throw new Error("The server does not answer. Is `regard look --serve` still running?");
  }
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

const REPLACEMENTS = [
  ["zero", "Switch off"], ["uniform", "Look everywhere alike"], ["identity", "Look at itself only"], ["example", "Look as in another text"],
];
let edits = [];

function drawInterventions() {
  const section = byId("interventions");
  const map = currentMap();
  section.hidden = !view.server || !map;
  if (section.hidden) return;
  const box = byId("edits");
  const example = element("textarea", { rows: 2, "aria-label": "The other text", placeholder: "The other text" });
  const replace = element("select", { "aria-label": "What is there instead", onchange: () => (example.hidden = replace.value !== "example") },
    REPLACEMENTS.map(([value, text]) => element("option", { value }, text)));
  example.hidden = true;
  const add = (heads) => {
    for (const head of heads) {
      edits = edits.filter((edit) => !(edit.map === state.map && (edit.head === head || head === null)));
      edits.push({ map: state.map, head, replace: replace.value, ...(replace.value === "example" ? { example: example.value } : {}) });
    }
    run();
  };
  const one = state.head === ALL ? null : state.head;
  const others = d3.range(map.heads).filter((head) => head !== state.head);
  const buttons = [
    element("button", { type: "button", class: "primary", onclick: () => add([one]) }, `Change ${placeName(map, state.head)}`),
    one === null || others.length === 0 ? null : element("button", { type: "button", onclick: () => add(others) }, `Change all heads of ${label(map.name, 30)} but this`),
    one === null || others.length === 0 ? null : element("button", { type: "button", onclick: () => add([null]) }, `Change all of ${label(map.name, 30)}`),
  ];
  const list = element("ul", { class: "edits" });
  const result = element("div", { "aria-live": "polite" });
  box.replaceChildren(element("div", { class: "controls" }, replace, buttons), example, list, result);

  const listEdits = () => list.replaceChildren(...edits.map((edit) => {
    const name = placeName(currentModel().maps[edit.map], edit.head ?? ALL);
    const what = REPLACEMENTS.find(([value]) => value === edit.replace)[1].toLowerCase();
    return element("li", {}, `${name}: ${what} `, element("button", {
      type: "button", "aria-label": `Undo: ${name}`, onclick: () => {
        edits = edits.filter((each) => each !== edit);
        run();
      },
    }, "×"));
  }));
  const run = async () => {
    listEdits();
    if (edits.length === 0) {
      result.replaceChildren();
      return;
    }
    result.replaceChildren(element("p", { class: "muted" }, "The model runs …"));
    const mine = edits;
    try {
      const found = await ask("intervene", { model: state.model, edits });
      if (mine === edits) result.replaceChildren(...beforeAfter(found));
    } catch (error) {
      result.replaceChildren(element("p", { class: "warning" }, visible(error.message)));
    }
  };
  if (edits.length > 0) run();
}

function beforeAfter({ before, after, metric }) {
  const side = (title, output, other) => {
    const list = output.probabilities.map(([name, probability]) => {
      const was = other?.probabilities.find(([each]) => each === name)?.[1];
      const change = was === undefined ? "" : ` ${probability >= was ? "+" : "−"}${percent(Math.abs(probability - was))}`;
      return barItem(label(name, 30), "", percent(probability) + change, probability, () => {});
    });
    return element("div", { class: "card" }, element("h3", {}, title), element("p", { class: "prediction" }, element("bdi", {}, label(output.prediction, 400))),
      element("ol", { class: "bars" }, list), output.lens ? lensTable(output.lens, `Logit lens, ${title.toLowerCase()}`) : null);
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
    rows: 3, "aria-label": texts.length > 1 ? `Text ${i + 1}` : "Text", maxlength: 100000, spellcheck: "false",
  }, each.tokens.length > 0 && each.tokens.length < 400 ? "" : ""));
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

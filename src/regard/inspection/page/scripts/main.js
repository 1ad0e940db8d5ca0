/* The page: what is on it, and when each part is drawn again. */

const CONTENTS = {
  heads: "Heads", tokens: "Tokens", picture: "Picture", layers: "Layers", compare: "Side by side", numbers: "Numbers", spectrum: "Spectrum",
  importance: "Importance", interventions: "Change it", attribution: "Attribution", lens: "Logit lens", results: "More", another: "Another input",
};

function drawHeader() {
  byId("title").textContent = label(view.title, 200);
  const models = view.models.map((model) => {
    const heads = d3.sum(model.maps, (map) => map.heads);
    const name = view.models.length > 1 || model.name !== view.title ? `${label(model.name, 60)}: ` : "";
    const parts = [`${name}${plural(model.parameters, "parameter")}, ${plural(model.maps.length, "layer")}, ${plural(heads, "head")}`];
    if (model.prediction) parts.push(`predicts ${label(model.prediction, 200)}`);
    return parts.join(", ");
  });
  const inputs = view.sequences.map((each) => (isPicture(each) ? `a picture of ${each.grid.join(" × ")} patches` : plural(each.count, "token")));
  byId("summary").textContent = `${models.join(" · ")}. Input: ${inputs.join(" and ")}.`;
  byId("notes").replaceChildren(...view.notes.map((note) => element("li", {}, visible(cut(note, 1000)))));
}

function drawContents() {
  const links = Object.entries(CONTENTS).filter(([id]) => !byId(id).hidden).map(([id, text]) =>
    element("li", {}, element("a", {
      href: address({ at: id }), onclick: (event) => {
        event.preventDefault();
        choose({ at: id });
        byId(id).scrollIntoView();
      },
    }, text)));
  byId("contents").replaceChildren(...links);
}

function drawSections() {
  const map = currentMap();
  const drawable = Boolean(map) && tiledMap(map).available;
  byId("heads").hidden = !map;
  byId("tokens").hidden = !drawable;
  byId("layers").hidden = !drawable;
}

const HEAD = ["model", "map", "head", "contrast"];
const whenMaps = (drawIt) => () => currentMap() && drawIt();
const whenTiles = (drawIt) => () => currentMap() && tiledMap(currentMap()).available && drawIt();

component([], drawHeader);
component(["model", "map"], drawSections);
component(HEAD, whenMaps(drawBar));
component(["model", "contrast"], whenMaps(drawOverview));
component(["model", "map", "head"], whenMaps(markThumbnail));
component(HEAD, whenMaps(drawHead));
component(["token", "side"], () => headMap?.draw());
component(["model", "map", "side", "token"], whenTiles(drawTokenPicker));
component([...HEAD, "token", "side", "zoom"], whenTiles(drawReading));
component([...HEAD, "zoom"], whenTiles(drawLinks));
component(["token", "side"], repaintLinks);
component([...HEAD, "token", "side", "zoom"], whenTiles(drawInOut));
component([...HEAD, "token", "side"], () => (currentMap() ? drawPicture() : (byId("picture").hidden = true)));
component(["model", "map", "contrast", "token", "side"], whenTiles(drawByLayer));
component(["model", "contrast"], whenTiles(drawRollout));
component(["contrast", "pair"], drawCompare);
component(["model"], drawTable);
component(["model", "map", "head"], markTable);
component(["model", "map", "head"], drawSpectrum);
component(["model"], drawImportance);
component(["model", "map", "head"], drawInterventions);
component(["model", "contrast"], drawAttribution);
component(["model", "contrast"], drawLens);
component(["model"], drawResults);
component([], drawAnother);
component(["model", "map"], drawContents);

function start() {
  readColours();
  draw();
  if (state.at && CONTENTS[state.at]) byId(state.at).scrollIntoView();
  document.documentElement.dataset.drawn = "yes";
}

addEventListener("hashchange", () => {
  readAddress();
  schedule();
  if (state.at && CONTENTS[state.at]) byId(state.at).scrollIntoView();
});
darkScheme.addEventListener("change", () => {
  readColours();
  schedule();
});
let resizing;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(drawSpectrum, 200);
});

resetState();
readAddress();
start();

/* Colours of weights: from the background of a card to the accent, in the colour scheme of the reader. */

const darkScheme = matchMedia("(prefers-color-scheme: dark)");

const SEQUENTIAL = {
  light: ["#ffffff", "#cfe3f4", "#6aaedd", "#0b62a8", "#052a4d"],
  dark: ["#1b1f26", "#173f5f", "#2c7ab5", "#7cc0f5", "#f2f9ff"],
};
const DIVERGING = {
  light: ["#7a3b00", "#d97706", "#fbd9a5", "#ffffff", "#cfe3f4", "#4b98d2", "#063f70"],
  dark: ["#ffd9a0", "#e08a1e", "#5f3d12", "#1b1f26", "#173f5f", "#2c86c8", "#c9e6ff"],
};

function table(colours) {
  const interpolate = d3.interpolateRgbBasis(colours);
  const bytes = new Uint8ClampedArray(256 * 4);
  for (let i = 0; i < 256; i++) {
    const { r, g, b } = d3.rgb(interpolate(i / 255));
    bytes.set([r, g, b, 255], 4 * i);
  }
  return bytes;
}

const colours = {};

function readColours() {
  const scheme = darkScheme.matches ? "dark" : "light";
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "muted", "line", "accent", "card", "warning"]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
  colours.scheme = scheme;
  colours.sequential = table(SEQUENTIAL[scheme]);
  colours.diverging = table(DIVERGING[scheme]);
  colours.font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif";
}

const headColour = (head, heads) => d3.hcl((25 + (360 * head) / heads) % 360, 60, darkScheme.matches ? 72 : 48).formatHex();

/* Weak weights show with the square root, as most maps have a few large weights and many small. */
const contrast = (value) => (state.contrast === "even" ? value : Math.sqrt(value));

/* The background of text: light enough at any weight between 0 and 1 to read the text on it. */
function shade(value) {
  const tone = colours.scheme === "dark" ? "84 168 230" : "44 132 205";
  return `rgb(${tone} / ${(0.55 * contrast(Math.min(1, Math.max(0, value)))).toFixed(3)})`;
}

/* Blue for positive, orange for negative, behind text that must stay readable. */
function signedShade(value) {
  const tone = value < 0 ? (colours.scheme === "dark" ? "224 138 30" : "217 119 6") : colours.scheme === "dark" ? "76 160 220" : "30 120 190";
  return `rgb(${tone} / ${(0.6 * Math.min(1, Math.abs(value))).toFixed(3)})`;
}

/* A canvas with a pixel for each cell. Signed values run from -largest to largest. */
function paint(values, rows, columns, largest, signed = false) {
  const canvas = element("canvas", { width: columns, height: rows });
  const context = canvas.getContext("2d");
  const picture = context.createImageData(columns, rows);
  const pixels = new Uint32Array(picture.data.buffer);
  const lookup = new Uint32Array((signed ? colours.diverging : colours.sequential).buffer);
  const factor = largest > 0 ? 1 / largest : 0;
  for (let i = 0; i < values.length; i++) {
    const value = Math.max(-1, Math.min(1, values[i] * factor));
    const place = signed ? 0.5 + 0.5 * Math.sign(value) * contrast(Math.abs(value)) : contrast(Math.max(0, value));
    pixels[i] = lookup[Math.round(255 * place)];
  }
  context.putImageData(picture, 0, 0);
  return canvas;
}

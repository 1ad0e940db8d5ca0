/* Maps as tiles: rectangles of weights at several resolutions, the coarsest first. */

function decodeTile(tile) {
  const text = atob(tile.weights);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const [q0, q1] = tile.q;
  const [k0, k1] = tile.k;
  return {
    q0, q1, k0, k1, bytes, rows: tile.rows, columns: tile.columns, scale: tile.scale,
    cellQ: (q1 - q0) / tile.rows, cellK: (k1 - k0) / tile.columns, planes: new Map(),
  };
}

/* The cell of a token; cell i begins at floor(i * size / cells), as in Python. */
const cellOf = (token, size, cells) => Math.ceil(((token + 1) * cells) / size) - 1;
const cellStart = (cell, size, cells) => Math.floor((cell * size) / cells);

const rowOf = (tile, q) => cellOf(q - tile.q0, tile.q1 - tile.q0, tile.rows);
const columnOf = (tile, k) => cellOf(k - tile.k0, tile.k1 - tile.k0, tile.columns);

const ALL = -1; // in place of the number of a head: the mean of all heads

/* The weights of a head (rows x columns), as numbers. */
function plane(tile, head) {
  if (tile.planes.has(head)) return tile.planes.get(head);
  const size = tile.rows * tile.columns;
  const heads = tile.scale.length;
  const weights = new Float32Array(size);
  for (let h = head === ALL ? 0 : head; h < (head === ALL ? heads : head + 1); h++) {
    const factor = tile.scale[h] / 255 / (head === ALL ? heads : 1);
    for (let i = 0; i < size; i++) weights[i] += tile.bytes[h * size + i] * factor;
  }
  tile.planes.set(head, weights);
  return weights;
}

class TiledMap {
  constructor(tiles, queries, keys, heads) {
    this.queries = queries;
    this.keys = keys;
    this.heads = heads;
    this.raw = tiles;
    this.decoded = null;
  }

  get available() {
    return this.raw.length > 0;
  }

  /* Decoded on first use, since a page has many maps and shows few of them. */
  get tiles() {
    this.decoded ??= this.raw.map(decodeTile).sort((a, b) => b.cellQ * b.cellK - a.cellQ * a.cellK);
    return this.decoded;
  }

  add(tile) {
    this.decoded = [...this.tiles, decodeTile(tile)].sort((a, b) => b.cellQ * b.cellK - a.cellQ * a.cellK);
  }

  /* The finest tile that covers a rectangle. */
  covering(q0, q1, k0, k1) {
    const found = this.tiles.filter((t) => t.q0 <= q0 && q1 <= t.q1 && t.k0 <= k0 && k1 <= t.k1);
    return found.at(-1) ?? this.tiles[0];
  }

  weight(head, q, k) {
    const tile = this.covering(q, q + 1, k, k + 1);
    const row = rowOf(tile, q);
    const column = columnOf(tile, k);
    return { weight: plane(tile, head)[row * tile.columns + column], tile, row, column };
  }

  /* The weights of a query for every key; in a coarse tile, the mean of a cell for each. */
  row(head, q) {
    const weights = new Float32Array(this.keys);
    for (const tile of this.tiles) {
      if (q < tile.q0 || q >= tile.q1) continue;
      const start = rowOf(tile, q) * tile.columns;
      const values = plane(tile, head);
      for (let k = tile.k0; k < tile.k1; k++) {
        weights[k] = values[start + columnOf(tile, k)];
      }
    }
    return weights;
  }

  /* The weights that every query has for a key. */
  column(head, k) {
    const weights = new Float32Array(this.queries);
    for (const tile of this.tiles) {
      if (k < tile.k0 || k >= tile.k1) continue;
      const column = columnOf(tile, k);
      const values = plane(tile, head);
      for (let q = tile.q0; q < tile.q1; q++) {
        const row = rowOf(tile, q);
        weights[q] = values[row * tile.columns + column];
      }
    }
    return weights;
  }

  /* Mean weights of a rectangle in rows x columns cells. */
  resample(head, [q0, q1], [k0, k1], rows, columns) {
    const tile = this.covering(q0, q1, k0, k1);
    const values = plane(tile, head);
    const vertical = overlaps(tile.q0, tile.cellQ, tile.rows, q0, (q1 - q0) / rows, rows);
    const horizontal = overlaps(tile.k0, tile.cellK, tile.columns, k0, (k1 - k0) / columns, columns);
    const result = new Float32Array(rows * columns);
    vertical.forEach((parts, r) => {
      horizontal.forEach((others, c) => {
        let sum = 0;
        for (const [i, a] of parts) for (const [j, b] of others) sum += values[i * tile.columns + j] * a * b;
        result[r * columns + c] = sum;
      });
    });
    return result;
  }
}

/* For each of `count` cells of width `to` from `start`: the source cells in it, with their share. */
function overlaps(origin, from, sources, start, to, count) {
  return d3.range(count).map((cell) => {
    const low = (start + cell * to - origin) / from;
    const high = low + to / from;
    const parts = [];
    for (let i = Math.max(0, Math.floor(low + 1e-6)); i < Math.min(sources, Math.ceil(high - 1e-6)); i++) {
      parts.push([i, (Math.min(high, i + 1) - Math.max(low, i)) / (high - low)]);
    }
    return parts;
  });
}

"""Views made on the spot, for the tests of the page of `regard look`."""

import base64
import struct
import zlib

import numpy as np

from regard.inspection.data import FORMAT

TEXT = "The animal did not cross the street because it was too tired , said the man to the animal"

TARGET = "Das Tier ging nicht über die Straße , weil es"


def make_map(n, m, heads, seed, *, causal=False):
    """Maps (heads, n, m): rows sum to 1; near the diagonal, on the first token, or anywhere."""
    rng = np.random.default_rng(seed)
    distance = np.arange(n)[:, None] * m / n - np.arange(m)[None]
    scores = rng.normal(size=(heads, n, m)) * 1.2
    for head in range(heads):
        if head % 3 == 0:
            scores[head] -= np.abs(distance - head % 2) * 1.5
        elif head % 3 == 1:
            scores[head, :, 0] += 4
    if causal:
        scores[:, distance < 0] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def make_tile(weights, cells=512, q=None, k=None):
    """A tile of maps (heads, n, m), or of a rectangle of them."""
    _, n, m = weights.shape
    (q0, q1), (k0, k1) = q or (0, n), k or (0, m)
    rows, columns = min(cells, q1 - q0), min(cells, k1 - k0)
    part = weights[:, q0:q1, k0:k1]
    for axis, count in ((1, rows), (2, columns)):
        size = part.shape[axis]
        starts = [i * size // count for i in range(count)]
        sizes = np.diff([*starts, size]).reshape([-1 if a == axis else 1 for a in range(3)])
        part = np.add.reduceat(part, starts, axis) / sizes
    scale = part.max((1, 2))
    values = np.round(part / np.maximum(scale, 1e-30)[:, None, None] * 255).astype(np.uint8)
    return {
        "q": [q0, q1],
        "k": [k0, k1],
        "rows": rows,
        "columns": columns,
        "scale": scale.tolist(),
        "weights": base64.b64encode(values.tobytes()).decode(),
    }


def make_map_data(layer, n, m, heads=4, *, queries="input", keys="input", **changes):
    """The maps of a layer with metrics, chance and spectrum."""
    weights = make_map(n, m, heads, layer, causal=changes.get("causal", False))
    entropy = -(weights * np.log(np.maximum(weights, 1e-30))).sum(-1).mean(-1)
    first = weights[:, :, 0].mean(-1)
    singular = np.linalg.svd(weights, compute_uv=False)
    return {
        "layer": layer,
        "name": f"Layer {layer}",
        "mixer": "softmax",
        "role": "self",
        "queries": queries,
        "keys": keys,
        "heads": heads,
        "causal": False,
        "kind": "exact",
        "error": 3e-7,
        "reason": "",
        "tiles": [make_tile(weights)],
        "metrics": {"entropy": entropy.tolist(), "first": first.tolist()},
        "chance": {"entropy": (entropy * 1.1).tolist(), "first": [1 / m] * heads},
        "spectrum": (np.cumsum(singular, -1) / singular.sum(-1, keepdims=True)).tolist(),
    } | changes


def make_view(models, sequences, title="A view", **changes):
    """A view of these models over these sequences."""
    view = {"format": FORMAT, "title": title, "notes": [], "matches": [], "server": False}
    return view | {"sequences": sequences, "models": models} | changes


def make_model(maps, name="a model", **changes):
    """A model with these maps."""
    return {"name": name, "parameters": 1234567, "maps": maps} | changes


def text_sequence(tokens, id="input", count=None):
    """A sequence of texts."""
    return {"id": id, "kind": "text", "count": count or len(tokens), "tokens": list(tokens)}


def text_view(tokens=None, layers=3, heads=4, **changes):
    """A view of a text with everything that a model can have."""
    tokens = TEXT.split() if tokens is None else tokens
    n = len(tokens)
    rng = np.random.default_rng(0)
    maps = [make_map_data(layer, n, n, heads) for layer in range(layers)]
    lens = [[[[tokens[(p + r) % n], 0.6 / (r + 1)] for r in range(3)] for p in range(n)]] * layers
    model = make_model(
        maps,
        prediction="animal",
        rollout=make_tile(make_map(n, n, 1, 9)),
        attribution={"gradient_x_input": rng.normal(size=n).tolist()},
        importance=[
            {"map": layer, "layer": layer, "head": head, "change": float(rng.exponential())}
            for layer in range(layers)
            for head in (*range(heads), None)
        ],
        lens={"positions": list(range(n)), "layers": lens},
        tables=[
            {
                "title": "Agreement with occlusion",
                "caption": "Rank correlation with leaving tokens out.",
                "columns": ["method", "agreement"],
                "rows": [["rollout", 0.31], ["gradient", 0.72], ["attention", None]],
            }
        ],
        figures=[
            {"title": "A figure", "caption": "Grey.", "image": png_uri(np.full((8, 8, 3), 128))}
        ],
    )
    return make_view([model], [text_sequence(tokens)], "The animal", **changes)


def image_view(layers=3, heads=4, grid=(14, 14)):
    """A view of a picture."""
    n = grid[0] * grid[1] + 1
    y, x = np.mgrid[:112, :112] / 112
    disc = ((x - 0.6) ** 2 + (y - 0.45) ** 2 < 0.06)[..., None] * np.array([90, 40, -60])
    pixels = np.stack([120 + 80 * y, 140 + 60 * x, 200 - 90 * y], -1) + disc
    sequence = {"id": "image", "kind": "image", "count": n, "tokens": ["class token"]}
    sequence |= {"image": png_uri(pixels.clip(0, 255)), "grid": list(grid), "first_patch": 1}
    maps = [
        make_map_data(layer, n, n, heads, queries="image", keys="image") for layer in range(layers)
    ]
    model = make_model(maps, prediction="a disc", rollout=make_tile(make_map(n, n, 1, 9)))
    return make_view([model], [sequence], "A picture")


def translation_view(layers=2, heads=4):
    """A view of an encoder and a decoder with cross-attention."""
    source, target = TEXT.split()[:11], TARGET.split()
    n, m = len(target), len(source)
    maps = []
    for layer in range(layers):
        for role, q, k in (("encoder", m, m), ("decoder", n, n), ("cross", n, m)):
            ids = {"queries": "source" if role == "encoder" else "target"}
            ids |= {"keys": "target" if role == "decoder" else "source"}
            data = make_map_data(len(maps), q, k, heads, causal=role == "decoder", **ids)
            maps.append(data | {"layer": layer, "role": role, "name": f"{role.title()} {layer}"})
    sequences = [text_sequence(source, "source"), text_sequence(target, "target")]
    return make_view([make_model(maps, prediction=" ".join(target))], sequences, "A translation")


def pair_view():
    """A view of two models side by side; the second has an influence map and one without maps."""
    view = text_view()
    tokens = view["sequences"][0]["tokens"]
    second = [make_map_data(10 + layer, len(tokens), len(tokens)) for layer in range(3)]
    second[1] |= {"kind": "influence", "error": None, "mixer": "fnet"}
    second[2] |= {"kind": "none", "error": None, "tiles": [], "metrics": {}, "chance": {}}
    second[2] |= {"reason": "the mixer has no maps", "spectrum": []}
    matches = [
        {
            "first": [i, h],
            "second": [i % 2, (h + 1) % 4],
            "similarity": 0.9 - 0.1 * i,
            "same_place": 0.2 * h,
        }
        for i in range(3)
        for h in range(4)
    ]
    view["models"].append(make_model(second, "another model"))
    return view | {"matches": matches}


def long_view(n=16_384, heads=2):
    """A view of a long sequence without texts: a coarse tile, and a fine one."""
    near = np.exp(-np.abs(np.subtract.outer(np.arange(128), np.arange(128))) / 2.0)
    coarse = make_tile(np.stack([near, near.T[::-1]])[:heads] / 128)
    coarse |= {"q": [0, n], "k": [0, n]}
    fine = make_tile(make_map(256, 256, heads, 1))
    fine |= {"q": [0, 256], "k": [0, 256]}
    data = make_map_data(0, 64, 64, heads) | {"tiles": [coarse, fine]}
    return make_view([make_model([data])], [text_sequence([], count=n)], "A long text")


def png_uri(pixels):
    """A data URI of a PNG of pixels (h, w, 3)."""
    pixels = np.asarray(pixels).astype(np.uint8)
    height, width, _ = pixels.shape

    def chunk(kind, content):
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    content += chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(content).decode()

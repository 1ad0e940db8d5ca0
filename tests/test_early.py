"""Before 2017: the cells against loops written from their papers, and what the generic tests
cannot see."""

import itertools

import pytest
import torch

import regard
from oracles.early import filters as naive_filters, look
from regard.attentions import additive
from regard.cells import (
    BahdanauDecoder,
    BiEncoder,
    CaptionCell,
    CaptionOutput,
    DeepOutput,
    FilterBank,
    GatedUnit,
    Reader,
    Reinforce,
    WindowCell,
    Writer,
    doubly_stochastic,
)
from regard.cells.draw import read_patch, write_patch


def built(kind, *arguments, **more):
    torch.manual_seed(0)
    return kind(*arguments, **more).double()


def same(got, want, leaves):
    """Two lists of outputs, and the gradients of all leaves, agree."""
    weights = [
        torch.randn(t.shape, dtype=t.dtype, generator=torch.Generator().manual_seed(i))
        for i, t in enumerate(want)
    ]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    sums = (sum((t * w).sum() for t, w in zip(side, weights, strict=True)) for side in (got, want))
    for a, b in zip(
        *(torch.autograd.grad(s, leaves, allow_unused=True) for s in sums), strict=True
    ):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def unit_step(p, x, h, c=None, prefix=""):
    """Bahdanau et al.

    2015, section A.1.1 and A.2.2, of one example; the rows of W, U and C are those of z, r and h̃.
    """
    n = len(h)
    given = p[prefix + "x.weight"] @ x + p[prefix + "x.bias"]
    if c is not None:
        given = given + p[prefix + "context.weight"] @ c
    z = torch.sigmoid(given[:n] + p[prefix + "gates.weight"][:n] @ h)
    r = torch.sigmoid(given[n : 2 * n] + p[prefix + "gates.weight"][n:] @ h)
    return (1 - z) * h + z * torch.tanh(given[2 * n :] + p[prefix + "candidate.weight"] @ (r * h))


# ---------------------------------------------------------------------------------------- Bahdanau
@pytest.mark.parametrize("context", [0, 5])
def test_the_gated_unit(context, rand):
    """Fails if it resets after the product, as torch's does, or mixes old and new the other way
    round."""
    unit = built(GatedUnit, 3, 4, context=context)
    x, h, c = (rand(2, size).requires_grad_() for size in (3, 4, context or 1))
    more = (c,) if context else ()
    p = dict(unit.named_parameters())
    want = torch.stack([unit_step(p, *(t[a] for t in (x, h, *more))) for a in range(2)])
    same([unit(x, h, *more)], [want], [x, h, *more, *unit.parameters()])
    with pytest.raises(ValueError, match="context"):
        unit(x, h, *(() if context else (c,)))


def test_the_encoder_reads_from_both_ends(rand):
    """Fails if a state is not the naive one, or a left-out token changes it."""
    encoder, x = built(BiEncoder, 3, 4), rand(2, 6, 3).requires_grad_()
    mask = torch.tensor([[True] * 6, [True, False, True, True, False, False]])
    p, want = dict(encoder.named_parameters()), []
    for a in range(2):
        real = [i for i in range(6) if mask[a, i]]
        halves = []
        for name, order in (("forwards.", real), ("backwards.", real[::-1])):
            h, states = x.new_zeros(4), {}
            for i in order:
                states[i] = h = unit_step(p, x[a, i], h, prefix=name)
            halves.append(torch.stack([states.get(i, x.new_zeros(4)) for i in range(6)]))
        want.append(torch.cat(halves, -1))
    got = encoder(x, mask=mask) * mask[..., None]
    same([got], [torch.stack(want)], [x, *encoder.parameters()])
    torch.testing.assert_close(
        encoder(x[1:, :4], mask=mask[1:, :4]), encoder(x[1:], mask=mask[1:])[:, :4]
    )
    assert encoder(x[:, :0]).shape == (2, 0, 8)


@pytest.mark.parametrize("masked", [False, True])
def test_the_decoder_looks_before_each_step(masked, rand):
    """Fails if a step, its context or its map is not that of the paper, or padding is looked at."""
    decoder = built(BahdanauDecoder, 3, 4, 6, width=5)
    words, notes = rand(2, 4, 3).requires_grad_(), rand(2, 7, 6).requires_grad_()
    mask = torch.arange(7).expand(2, 7) % 3 != 1 if masked else None
    p, want = dict(decoder.named_parameters()), [[], [], []]
    for a in range(2):
        seen = [j for j in range(7) if mask is None or mask[a, j]]
        s = torch.tanh(p["first.weight"] @ notes[a, 0, 3:] + p["first.bias"])
        for y in words[a]:
            q, k = (
                p["align.query.weight"] @ s,
                notes[a] @ p["align.key.weight"].T + p["align.key.bias"],
            )
            c = look(p["align.v"], q, k, notes[a], seen)
            want[2].append(look(p["align.v"], q, k, torch.eye(7, dtype=torch.float64), seen))
            s = unit_step(p, y, s, c, prefix="unit.")
            want[0].append(s)
            want[1].append(c)
    got = decoder(words, notes, mask=mask)
    same(
        list(got),
        [torch.stack(t).view(2, 4, -1) for t in want],
        [words, notes, *decoder.parameters()],
    )
    torch.testing.assert_close(got.weights.sum(-1), torch.ones(2, 4, dtype=torch.float64))


def test_steps_are_the_whole(rand):
    """Fails if one step at a time is not the same decoder."""
    decoder, words, notes = built(BahdanauDecoder, 3, 4, 6), rand(2, 4, 3), rand(2, 7, 6)
    s, states = decoder.initial_state(notes), []
    for y in words.unbind(1):
        s, _ = decoder.step(y, s, notes)
        states.append(s)
    torch.testing.assert_close(torch.stack(states, 1), decoder(words, notes).states)


def test_maxout(rand):
    """Fails if it is not the larger of each pair that counts."""
    out = built(DeepOutput, 3, 4, 6, 9, width=5)
    s, y, c = rand(2, 4), rand(2, 3), rand(2, 6)
    t = out.s(s) + out.y(y) + out.c(c)
    largest = torch.stack([torch.maximum(t[:, 2 * j], t[:, 2 * j + 1]) for j in range(5)], 1)
    torch.testing.assert_close(out(s, y, c), out.out(largest))


@pytest.mark.parametrize("causal", [False, True])
def test_additive_scores_in_parts(causal, rand, monkeypatch):
    """Fails if queries that come in parts give something else, or their gradients are others."""
    torch.manual_seed(0)
    mixer = regard.create("bahdanau", dim=8, heads=2, causal=causal).double()
    x = rand(2, 30, 8).requires_grad_()
    leaves, results = [x, *mixer.parameters()], []
    for most in (additive.MAX_ELEMENTS, 7 * 2 * 30 * 8):
        monkeypatch.setattr(additive, "MAX_ELEMENTS", most)
        y = mixer(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_training_keeps_no_tanh_of_all_pairs(rand, monkeypatch):
    """Fails if the backward pass holds e numbers for each pair."""
    monkeypatch.setattr(additive, "MAX_ELEMENTS", 64 * 16 * 4)
    sizes, q = [], rand(1, 1, 64, 16).requires_grad_()

    def note(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        additive.additive_scores(q, q, rand(1, 16))
    assert max(sizes, default=0) < 64 * 64 * 16


# ------------------------------------------------------------------------------------------ Graves
def test_the_window_step_by_step(rand):
    """Fails if a step is not the paper's, or κ moves backwards."""
    cell, states, text = (
        built(WindowCell, 3, 2),
        rand(5, 2, 3).requires_grad_(),
        rand(2, 7, 4).requires_grad_(),
    )
    mask = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
    p, kappa = dict(cell.named_parameters()), cell.initial_state(text)
    windows, phis, before = [], [], kappa
    for h in states:
        window, kappa, phi = cell(h, kappa, text, mask=mask)
        assert (kappa > before).all()
        before = kappa
        windows.append(window)
        phis.append(phi)
    want, want_phi = [], []
    for a in range(2):
        k = [torch.zeros((), dtype=torch.float64)] * 2
        for h in states[:, a]:
            raw = p["shape.shape.weight"] @ h + p["shape.shape.bias"]
            k = [k[i] + raw[4 + i].exp() for i in range(2)]
            phi = [
                sum(raw[i].exp() * torch.exp(-raw[2 + i].exp() * (k[i] - u) ** 2) for i in range(2))
                * mask[a, u - 1]
                for u in range(1, 8)
            ]
            want_phi.append(torch.stack(phi))
            want.append(sum(f * c for f, c in zip(phi, text[a], strict=True)))
    same(
        [torch.stack(windows, 1), torch.stack(phis, 1)],
        [torch.stack(want).view(2, 5, 4), torch.stack(want_phi).view(2, 5, 7)],
        [states, text, *cell.parameters()],
    )


def test_the_mixer_is_the_cell_run_over_all_tokens(rand):
    """Fails if the two drift apart."""
    torch.manual_seed(0)
    mixer = regard.create("graves_window", dim=4, mixtures=3).double()
    cell, x, text = built(WindowCell, 4, 3), rand(2, 6, 4), rand(2, 9, 4)
    cell.shape.load_state_dict(mixer.shape.state_dict())
    kappa, windows = cell.initial_state(text), []
    for h in x.unbind(1):
        window, kappa, _ = cell(h, kappa, text)
        windows.append(window)
    torch.testing.assert_close(mixer(x, text), torch.stack(windows, 1))


# -------------------------------------------------------------------------------------------- maps
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("graves_window", {}), ("show_attend", {}), ("draw_read", {"width": 4, "patch": 3})],
)
def test_maps_are_true(name, arguments, crossed, masked, rand):
    """Fails if the map, times what is looked at, is not the output."""
    torch.manual_seed(0)
    mixer = regard.create(name, dim=8, **arguments).double()
    x, source = rand(2, 11, 8), rand(2, 14, 8)
    inputs = (x, source) if crossed else (x,)
    looked = inputs[-1]
    mask = {"mask": torch.arange(looked.shape[1]).expand(2, -1) % 5 != 3} if masked else {}
    kept = looked * mask["mask"][..., None] if masked else looked
    torch.testing.assert_close(
        mixer.attention_map(*inputs, **mask)[:, 0] @ kept, mixer(*inputs, **mask)
    )


# -------------------------------------------------------------------------------------------- DRAW
def test_filters_sum_to_one(rand):
    """Fails if a row of filters does not, even far outside the image or ever so narrow."""
    bank = built(FilterBank, 6, 3)
    for scale in (1, 30):
        found = bank(scale * rand(4, 6), 9, 12)
        assert (
            found.rows.shape == (4, 3, 9)
            and found.columns.shape == (4, 3, 12)
            and (found.intensity > 0).all()
        )
        for part in (found.rows, found.columns):
            torch.testing.assert_close(part.sum(-1), torch.ones(4, 3, dtype=torch.float64))


def narrow(bank, **biases):
    """Filters that do not depend on the state: centred, a pixel apart where N is the size, and
    narrow unless told."""
    names = ("x", "y", "log_variance", "log_stride", "log_intensity")
    values = {"log_variance": -12.0, **biases}
    with torch.no_grad():
        bank.place.weight.zero_()
        bank.place.bias.copy_(torch.tensor([values.get(name, 0.0) for name in names]))


def test_reading_and_writing_all_pixels_is_the_identity(rand):
    """Fails if a grid as large as the image, its filters narrow, is not the image itself, or γ
    does not cancel."""
    bank, image = built(FilterBank, 6, 8), rand(2, 3, 8, 8)
    narrow(bank, log_intensity=0.7)
    filters = bank(rand(2, 6), 8, 8)
    patch = read_patch(image, filters)
    torch.testing.assert_close(patch, image * torch.tensor(0.7, dtype=torch.float64).exp())
    torch.testing.assert_close(write_patch(patch, filters), image)


def test_where_a_glimpse_looks(rand):
    """Fails if g̃ = 0 is not the middle, g̃ = ±1/2 not a quarter, or x and y are confused."""
    bank, image = (
        built(FilterBank, 6, 1),
        torch.arange(15 * 7, dtype=torch.float64).view(1, 1, 15, 7),
    )
    for x, y, row, column in ((0.0, 0.0, 7, 3), (-0.5, 0.0, 7, 1), (0.0, 0.5, 11, 3)):
        narrow(bank, x=x, y=y)
        torch.testing.assert_close(
            read_patch(image, bank(rand(1, 6), 15, 7))[0, 0, 0, 0], image[0, 0, row, column]
        )


def test_reader_and_writer(rand):
    """Fails if a patch that is read or written is not the sum over all pixels that the paper
    says."""
    reader, writer = built(Reader, 6, 3), built(Writer, 6, 2, channels=2)
    image, state = rand(2, 2, 5, 7).requires_grad_(), rand(2, 6).requires_grad_()
    p, q = dict(reader.named_parameters()), dict(writer.named_parameters())
    patches, canvases = [], []
    for a in range(2):
        rows, columns, gamma = naive_filters(p, state[a], 5, 7, 3)
        cells = [
            gamma
            * sum(
                rows[i, y] * columns[j, x] * image[a, c, y, x] for y in range(5) for x in range(7)
            )
            for c in range(2)
            for i in range(3)
            for j in range(3)
        ]
        patches.append(torch.stack(cells).view(2, 3, 3))
        rows, columns, gamma = naive_filters(q, state[a], 5, 7, 2)
        drawn = (q["draw.weight"] @ state[a] + q["draw.bias"]).view(2, 2, 2)
        cells = [
            sum(rows[i, y] * columns[j, x] * drawn[c, i, j] for i in range(2) for j in range(2))
            / gamma
            for c in range(2)
            for y in range(5)
            for x in range(7)
        ]
        canvases.append(torch.stack(cells).view(2, 5, 7))
    got = [reader(image, state)[0], writer(state, 5, 7)[0]]
    same(
        got,
        [torch.stack(patches), torch.stack(canvases)],
        [image, state, *reader.parameters(), *writer.parameters()],
    )


def test_padding_does_not_make_an_image_taller(rand):
    """Fails if rows of padding move the middle of the image."""
    for name in ("draw_read", "draw_write"):
        torch.manual_seed(0)
        mixer, x = regard.create(name, dim=8, width=4, patch=3).double(), rand(2, 20, 8)
        mask = torch.stack((torch.arange(20) < 8, torch.arange(20) < 13))
        y = mixer(x, mask=mask)
        torch.testing.assert_close(y[0, :8], mixer(x[:1, :8])[0])
        torch.testing.assert_close(y[1, :13], mixer(x[1:, :13])[0])


# --------------------------------------------------------------------------- show, attend and tell
def test_a_caption_step(rand):
    """Fails if a step, from the first state to the logits, is not that of the paper."""
    cell, out = built(CaptionCell, 3, 4, 5, width=6), built(CaptionOutput, 3, 4, 5, 9)
    word, cells = rand(2, 3).requires_grad_(), rand(2, 7, 5).requires_grad_()
    mask = torch.tensor([[True] * 7, [True, False] * 3 + [False]])
    memory = cell.initial_state(cells, mask=mask)
    after, seen = cell.step(word, memory, cells, mask=mask)
    p, want = dict(cell.named_parameters()), [[], [], [], []]
    for a in range(2):
        real = [i for i in range(7) if mask[a, i]]
        h, c = (torch.tanh(f(cells[a, real].mean(0))) for f in (cell.first_h, cell.first_c))
        q, k = p["align.query.weight"] @ h, cells[a] @ p["align.key.weight"].T + p["align.key.bias"]
        alpha = look(p["align.v"], q, k, torch.eye(7, dtype=torch.float64), real)
        z = torch.sigmoid(p["gate.weight"][0] @ h + p["gate.bias"][0]) * (alpha @ cells[a])
        raw = (
            p["cell.weight_ih"] @ torch.cat((word[a], z))
            + p["cell.weight_hh"] @ h
            + p["cell.bias_ih"]
            + p["cell.bias_hh"]
        )
        i, f, g, o = raw.view(4, 4)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        for part, value in zip(want, (torch.sigmoid(o) * torch.tanh(c), c, z, alpha), strict=True):
            part.append(value)
    same(
        [after.h, after.c, seen.context, seen.weights],
        [torch.stack(t) for t in want],
        [word, cells, *cell.parameters()],
    )
    logits = out.out(word + out.h(after.h) + out.z(seen.context))
    torch.testing.assert_close(out(word, after.h, seen.context), logits)


def test_hard_attention_looks_at_one_cell(rand):
    """Fails if the context is not one cell, or the choice does not follow the weights, the mask
    and the seed."""
    cell = built(CaptionCell, 3, 4, 5, hard=True)
    word, cells, mask = (
        rand(4000, 3) * 0,
        rand(1, 3, 5).expand(4000, 3, 5),
        torch.tensor([True, False, True]).expand(4000, 3),
    )
    memory = cell.initial_state(cells, mask=mask)
    runs = [
        cell.step(word, memory, cells, mask=mask, generator=torch.Generator().manual_seed(s))[1]
        for s in (0, 0, 1)
    ]
    assert torch.equal(runs[0].chosen, runs[1].chosen) and not torch.equal(
        runs[0].chosen, runs[2].chosen
    )
    gate = torch.sigmoid(cell.gate(memory.h))
    torch.testing.assert_close(runs[0].context, gate * cells[torch.arange(4000), runs[0].chosen])
    often = torch.bincount(runs[0].chosen, minlength=3) / 4000
    torch.testing.assert_close(often, runs[0].weights[0].float(), rtol=0, atol=0.04)
    assert often[1] == 0
    with pytest.raises(ValueError, match="generator"):
        cell.step(word, memory, cells)


def expected(scores, rewards):
    """Σ over all choices of p(s) log p(y|s), exactly: scores (t m), rewards (m, ..., m)."""
    alpha, total = scores.softmax(-1), 0
    for choice in itertools.product(range(scores.shape[1]), repeat=scores.shape[0]):
        chance = torch.stack([alpha[t, s] for t, s in enumerate(choice)]).prod()
        total = total + chance * rewards[choice]
    return total


@pytest.mark.parametrize("baseline", [0.0, -1.5])
def test_reinforce_is_the_gradient_of_the_bound(baseline, rand):
    """Fails if, over many draws, the estimate is not the exact gradient of Σ_s p(s) log p(y|s),
    whatever the baseline."""
    draws = 40_000
    scores, rewards = rand(2, 3).requires_grad_(), rand(3, 3).requires_grad_()
    alpha = scores.softmax(-1)
    chosen = torch.multinomial(
        alpha.detach(), draws, replacement=True, generator=torch.Generator().manual_seed(0)
    ).T
    loss = Reinforce().double().eval()
    loss.baseline.fill_(baseline)
    value = loss(rewards[chosen[:, 0], chosen[:, 1]], alpha.expand(draws, 2, 3), chosen)
    want = torch.autograd.grad(expected(scores, rewards), (scores, rewards))
    for got, exact in zip(torch.autograd.grad(value, (scores, rewards)), want, strict=True):
        torch.testing.assert_close(-got, exact, rtol=0, atol=0.02)


def test_a_baseline_lowers_the_variance(rand):
    """Fails if the baseline does not what it is there for."""
    scores, rewards = rand(1, 3).requires_grad_(), rand(3) - 5
    alpha = scores.softmax(-1)[None]
    spread = []
    for baseline in (0.0, -5.0):
        loss = Reinforce().double().eval()
        loss.baseline.fill_(baseline)
        grads = [
            torch.autograd.grad(
                loss(rewards[[s]], alpha, torch.tensor([[s]])), scores, retain_graph=True
            )[0]
            for s in range(3)
        ]
        spread.append(torch.stack(grads).var(0).sum())
    assert spread[1] < 0.2 * spread[0]


def test_the_baseline_moves_and_the_entropy_counts(rand):
    """Fails if the moving average is not 0.9 and 0.1, moves in eval mode, or entropy is not
    rewarded."""
    loss, weights = Reinforce(entropy=0.5).double(), rand(2, 3, 4).softmax(-1).requires_grad_()
    likelihood, chosen = (
        torch.tensor([-2.0, -4.0], dtype=torch.float64),
        torch.zeros(2, 3, dtype=torch.long),
    )
    value = loss(likelihood, weights, chosen)
    entropy = -(weights * weights.log()).sum((1, 2))
    torch.testing.assert_close(
        value, -(likelihood + likelihood * weights[..., 0].log().sum(1) + 0.5 * entropy).mean()
    )
    torch.testing.assert_close(loss.baseline, torch.tensor(-0.3, dtype=torch.float64))
    loss(likelihood, weights, chosen)
    torch.testing.assert_close(loss.baseline, torch.tensor(-0.57, dtype=torch.float64))
    loss.eval()(likelihood, weights, chosen)
    torch.testing.assert_close(loss.baseline, torch.tensor(-0.57, dtype=torch.float64))
    assert "baseline" in loss.state_dict()


def test_reinforce_leaves_out_padded_steps(rand):
    """Fails if a padded step changes the loss, its gradients or the baseline, whatever it holds."""
    likelihood, chosen = rand(2).requires_grad_(), torch.tensor([[1, 3, 0], [2, -1, -1]])
    weights, mask = rand(2, 3, 4).softmax(-1), torch.tensor([[True] * 3, [True, False, False]])
    weights[1, 1], weights[1, 2] = 0.0, torch.nan
    weights.requires_grad_()
    padded, cut = Reinforce(entropy=0.5).double(), Reinforce(entropy=0.5).double().eval()
    got = padded(likelihood, weights, chosen, mask=mask)
    alone = [
        cut(likelihood[i : i + 1], weights[i : i + 1, :steps], chosen[i : i + 1, :steps])
        for i, steps in enumerate((3, 1))
    ]
    want = (alone[0] + alone[1]) / 2
    torch.testing.assert_close(got, want)
    for ours, exact in zip(
        torch.autograd.grad(got, (likelihood, weights)),
        torch.autograd.grad(want, (likelihood, weights)),
        strict=True,
    ):
        torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(padded.baseline, 0.1 * likelihood.detach().mean())
    with pytest.raises(ValueError, match="mask"):
        cut(likelihood, weights, chosen, mask=mask[:, :2])


def test_doubly_stochastic(rand):
    """Fails if a cell that was looked at once costs something, or one that was not costs
    nothing."""
    assert doubly_stochastic(torch.eye(4)[None]) == 0
    assert doubly_stochastic(torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]), scale=3.0) == 3 * (1 + 1)
    mask = torch.tensor([[True, False]])
    assert doubly_stochastic(torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]), mask=mask) == 1


def test_show_attend_tells_its_cost(rand):
    """Fails if the cost is not told, is told for a stream, or counts padding."""
    torch.manual_seed(0)
    mixer = regard.create("show_attend", dim=8, penalty=0.5).double()
    x, memory = rand(2, 6, 8), rand(2, 9, 8)
    mask = (torch.arange(9) < 5).expand(2, 9)
    with regard.collect_aux() as notes:
        mixer(x, memory, mask=mask)
        mixer(x, memory[:, :5])
    alpha = mixer.attention_map(x, memory[:, :5])[:, 0] / torch.sigmoid(mixer.gate(x))
    for told in notes.all("doubly stochastic"):
        torch.testing.assert_close(told, 0.5 * (1 - alpha.sum(1)).square().sum(-1).mean())
    notes.loss().backward()
    assert mixer.score.grad.abs().max() > 0
    own = (torch.arange(6) < 4).expand(2, 6)
    with regard.collect_aux() as notes:
        mixer(x, mask=own)
        mixer(x[:, :4])
        regard.create("show_attend", dim=8, penalty=0.0)(x.float())
        regard.create("show_attend", dim=8, causal=True).stream(x.float())
    padded, cut = notes.all("doubly stochastic")
    torch.testing.assert_close(padded, cut)


# --------------------------------------------------------------------------------------- bad input
ABSURD = [
    ("graves_window", {"mixtures": 0}, "mixtures"),
    ("graves_window", {"heads": 0}, "heads must be an integer >= 1"),
    ("draw_read", {"width": 0}, "width"),
    ("draw_read", {"width": 4, "patch": 0}, "patch"),
    ("draw_write", {"width": 4, "heads": 2.5}, "heads must be an integer"),
    ("show_attend", {"hidden": 0}, "hidden"),
    ("show_attend", {"penalty": -1.0}, "penalty"),
    ("show_attend", {"penalty": "much"}, "penalty"),
    ("bahdanau", {"heads": 3}, "divisible"),
]


@pytest.mark.parametrize(("name", "arguments", "words"), ABSURD)
def test_arguments_that_make_no_sense(name, arguments, words):
    """Fails if nonsense is built, or the message does not name it."""
    with pytest.raises((ValueError, TypeError), match=words):
        regard.create(name, dim=8, **arguments)


def test_left_padding_does_not_begin_the_decoder():
    """Fails if the decoder starts from padding."""
    torch.manual_seed(0)
    encoder, decoder = BiEncoder(8, 6).double(), BahdanauDecoder(8, 6, 12).double()
    source, words = torch.randn(1, 9, 8).double(), torch.randn(1, 4, 8).double()
    mask = torch.arange(9)[None] >= 3
    padded = decoder(words, encoder(source, mask=mask), mask=mask).states
    torch.testing.assert_close(padded, decoder(words, encoder(source[:, 3:])).states)


def test_hard_attention_without_a_cell_says_so():
    cell, cells = CaptionCell(4, 5, 6, hard=True), torch.randn(2, 7, 6)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    with pytest.raises(ValueError, match="at least one unmasked cell"):
        cell.step(
            torch.randn(2, 4),
            cell.initial_state(cells, mask=mask),
            cells,
            mask=mask,
            generator=torch.Generator(),
        )


def test_large_states_of_a_window_have_gradients():
    """Fails if the square of a distance overflows."""
    mixer = regard.create("graves_window", dim=64)
    x = (torch.randn(1, 50, 64, generator=torch.Generator().manual_seed(0)) * 40).requires_grad_()
    mixer(x).sum().backward()
    assert x.grad.isfinite().all()

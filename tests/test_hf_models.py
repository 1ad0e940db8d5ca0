"""Regard models in transformers: Auto classes, `generate`, pipelines, Trainer."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import regard
from hf_models import randomize_weights
from regard import Can, Mixer, Unsupported, models, registry
from regard.models import module_spec

hf = pytest.importorskip("transformers", minversion="5.0", reason="pip install 'regard[hf]'")
from regard import hf as regard_hf  # noqa: E402

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


pytestmark = pytest.mark.usefixtures("seeded")


def causal(mixer="vanilla", **changes):
    config = models.gpt(2, 16, 2, vocab_size=31, length=64, mixer=mixer, dropout=0.0).replace(
        **changes
    )
    return randomize_weights(
        regard_hf.RegardForCausalLM(regard_hf.RegardConfig.from_model_config(config, **IDS)),
        torch.float32,
        1.0,
    )


def translating(**changes):
    config = models.transformer(2, 16, 2, vocab_size=31, dropout=0.0).replace(**changes)
    return randomize_weights(
        regard_hf.RegardForConditionalGeneration(
            regard_hf.RegardConfig.from_model_config(config, **IDS)
        ),
        torch.float32,
        1.0,
    )


def encoding(kind, **more):
    config = models.bert(2, 16, 2, vocab_size=31, length=64, dropout=0.0, head=None)
    return randomize_weights(
        kind(regard_hf.RegardConfig.from_model_config(config, **IDS, **more)), torch.float32, 1.0
    )


def tokens(b=3, n=9):
    return torch.randint(3, 31, (b, n))


def left_padded():
    """Three prompts of 9, 5 and 8 tokens."""
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = mask[2, :1] = 0
    return tokens() * mask, mask


# -------------------------------------------------------------------------------------------- files
KINDS = {
    "causal": (lambda: causal(), hf.AutoModelForCausalLM),
    "masked": (lambda: encoding(regard_hf.RegardForMaskedLM), hf.AutoModelForMaskedLM),
    "classes": (
        lambda: encoding(regard_hf.RegardForSequenceClassification, num_labels=5),
        hf.AutoModelForSequenceClassification,
    ),
    "tags": (
        lambda: encoding(regard_hf.RegardForTokenClassification, num_labels=4),
        hf.AutoModelForTokenClassification,
    ),
    "bare": (lambda: encoding(regard_hf.RegardModel), hf.AutoModel),
}


@pytest.mark.parametrize("kind", KINDS)
def test_auto_classes_save_and_load(kind, tmp_path):
    """Fails if a file is loaded as another class, with other weights, or untied."""
    make, reader = KINDS[kind]
    model, x = make(), tokens()
    model.save_pretrained(tmp_path)
    again = reader.from_pretrained(tmp_path)
    assert type(again) is type(model) and not again.training
    assert torch.equal(again(x)[0], model(x)[0]) and again.config.regard == model.config.regard
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}


def test_encoder_decoder_save_and_load(tmp_path):
    """Fails if shared embeddings are saved more than once or loaded untied."""
    model, x, y = translating(), tokens(), tokens(n=6)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shared = [name for name in file.keys() if "embed.tokens" in name or "head" in name]  # noqa: SIM118
    assert shared == ["net.encoder.embed.tokens.weight"]
    again = hf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(again(x, decoder_input_ids=y).logits, model(x, decoder_input_ids=y).logits)
    assert (
        again.net.head.proj.weight
        is again.net.decoder.embed.tokens.weight
        is again.net.encoder.embed.tokens.weight
    )


def test_another_head_on_the_same_backbone(tmp_path):
    """Fails if exchanging the head changes the backbone or leaves the head uninitialized."""
    model, x = causal(), tokens()
    model.save_pretrained(tmp_path)
    found = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=7)
    assert found(x).logits.shape == (3, 7) and found(x).logits.isfinite().all()
    torch.testing.assert_close(found.net.backbone(x)[0], model.net.backbone(x)[0])
    bare = hf.AutoModel.from_pretrained(tmp_path)
    torch.testing.assert_close(bare(x).last_hidden_state, model.net.backbone(x)[0])


def test_computed_buffers_survive_loading(tmp_path):
    """Fails if loading leaves a computed buffer empty, as on the meta device."""
    config = models.bert(
        1, 16, 2, vocab_size=31, length=64, mixer="average_pool", head=models.MaskedLMHeadConfig()
    )
    model, x = (
        randomize_weights(
            regard_hf.RegardForMaskedLM(regard_hf.RegardConfig.from_model_config(config)),
            torch.float32,
            1.0,
        ),
        tokens(),
    )
    model.save_pretrained(tmp_path)
    assert torch.equal(
        regard_hf.RegardForMaskedLM.from_pretrained(tmp_path)(x).logits, model(x).logits
    )


def test_wrap_model(tmp_path):
    """Fails if wrapping copies or changes a model, or chooses the wrong class."""
    for config, kind in (
        (models.gpt(1, 8, 2, vocab_size=31, length=16), regard_hf.RegardForCausalLM),
        (models.bert(1, 8, 2, vocab_size=31, length=16), regard_hf.RegardForMaskedLM),
        (models.transformer(1, 8, 2, vocab_size=31), regard_hf.RegardForConditionalGeneration),
    ):
        ours = models.build(config).eval()
        coat = regard_hf.wrap_model(ours, **IDS)
        assert type(coat) is kind and coat.net is ours and not coat.training
        coat.save_pretrained(tmp_path)
        again = kind.from_pretrained(tmp_path)
        assert all(
            torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True)
        )
        assert coat.device.type == "cpu"
    with pytest.raises(Unsupported, match="no class for the head 'pooling'"):
        regard_hf.wrap_model(
            models.build(models.bert(1, 8, 2, vocab_size=31, head=models.PoolingHeadConfig()))
        )


# --------------------------------------------------------------------------------------- generation
MIXERS = [
    "vanilla",
    module_spec("local", window=3),
    "linear",
    "retnet",
    "top_k",
    module_spec("reformer", buckets=4, chunk=4),
]


@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_greedy_search_with_prompts_of_different_lengths(mixer):
    """Fails if left padding changes the output, or the cache gives another than the whole text."""
    model, (x, mask) = causal(mixer, head=models.LMHeadConfig(tie_weights=False)), left_padded()
    found = model.generate(x, attention_mask=mask, max_new_tokens=7, do_sample=False)
    plain = model.generate(
        x, attention_mask=mask, max_new_tokens=7, do_sample=False, use_cache=False
    )
    assert torch.equal(found, plain)
    for row, real in enumerate(mask.sum(1).tolist()):
        alone = model.generate(x[row : row + 1, 9 - real :], max_new_tokens=7, do_sample=False)[
            0, real:
        ]
        assert torch.equal(found[row, 9 : 9 + len(alone)], alone)
    assert len(set(found[:, 9:].flatten().tolist())) > 3, (
        "it says the same all the time, which shows nothing"
    )


@pytest.mark.parametrize("name", regard.list_recipes(can=["causal", "stream"]))
def test_every_recipe_generates_the_same_with_a_cache(name):
    """Fails if, with left padding, the cache gives another output than the whole text."""
    small = {
        key: value
        for key, value in registry.get_recipe(name).example_kwargs.items()
        if key not in ("patterns", "length")
    }
    config = models.gpt(
        1, 16, 2, vocab_size=31, length=32, mixer=module_spec(name, **small), dropout=0.0
    )
    model, (x, mask) = (
        regard_hf.RegardForCausalLM(regard_hf.RegardConfig.from_model_config(config))
        .double()
        .eval(),
        left_padded(),
    )
    after, longer = tokens(n=2), F.pad(mask, (0, 2), value=1)
    whole = model(torch.cat((x, after), 1), attention_mask=longer).logits
    first = model(x, attention_mask=mask, use_cache=True)
    second = model(after, attention_mask=longer, past_key_values=first.past_key_values)
    both = torch.cat((first.logits, second.logits), 1)
    torch.testing.assert_close(both[longer.bool()], whole[longer.bool()])


def test_greedy_search_equals_regard_generate():
    """Fails if `generate` of transformers and of Regard differ."""
    model, (x, mask) = causal(), left_padded()
    found = model.generate(x, attention_mask=mask, max_new_tokens=6, do_sample=False)
    prompts = [row[keep.bool()].tolist() for row, keep in zip(x, mask, strict=True)]
    for row, result in zip(
        found,
        models.generate(
            model.net.stream, prompts, max_new_tokens=6, stop=models.StoppingCriteria([2])
        ),
        strict=True,
    ):
        assert row[9 : 9 + len(result.tokens)].tolist() == result.tokens


@pytest.mark.parametrize("mixer", ["vanilla", "retnet"])
def test_beam_search(mixer):
    """Fails if states do not follow their beams."""
    model, (x, mask) = causal(mixer), left_padded()
    more = {
        "attention_mask": mask,
        "max_new_tokens": 6,
        "num_beams": 4,
        "num_return_sequences": 2,
        "do_sample": False,
    }
    found = model.generate(x, **more)
    assert found.shape[0] == 6 and torch.equal(found, model.generate(x, **more, use_cache=False))


def test_sampling():
    """Fails if samples depend on the use of a cache."""
    model, (x, mask) = causal("linear"), left_padded()
    found = []
    for cached in (True, False):
        torch.manual_seed(5)
        more = {
            "do_sample": True,
            "top_p": 0.9,
            "num_return_sequences": 2,
            "max_new_tokens": 6,
            "use_cache": cached,
        }
        found.append(model.generate(x, attention_mask=mask, **more))
    assert torch.equal(*found) and found[0].shape[0] == 6


@pytest.mark.parametrize("beams", [1, 3])
def test_encoder_decoder_generation(beams):
    """Fails if the source, its padding or the state is lost."""
    model, (x, mask) = translating(), left_padded()
    more = {"attention_mask": mask, "max_new_tokens": 6, "num_beams": beams, "do_sample": False}
    found = model.generate(x, **more)
    assert (
        torch.equal(found, model.generate(x, **more, use_cache=False)) and (found[:, 0] == 1).all()
    )
    if beams == 1:
        ours = models.generate(
            model.net.decoding_step(x, mask.bool()),
            [[1]] * 3,
            max_new_tokens=6,
            stop=models.StoppingCriteria([2]),
        )
        for row, result in zip(found, ours, strict=True):
            assert row[1 : 1 + len(result.tokens)].tolist() == result.tokens


class Still(Mixer):
    """The mean of all tokens so far; it has no state."""

    def __init__(self, dim, causal):
        super().__init__(dim, can=Can(stream="it keeps nothing"), causal=causal)

    def mix(self, x, memory, mask, state):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None], None


@pytest.fixture
def still():
    """A recipe that can be causal and cannot stream: there is none in the registry."""
    registry.get_recipe("vanilla")
    before = dict(registry._recipes)

    @registry.recipe("nobody", formula="mean")
    def still(dim: int, heads: int = 1, *, causal: bool = False) -> Mixer:
        """The mean so far."""
        return Still(dim, causal)

    yield "still"
    registry._recipes.clear()
    registry._recipes.update(before)


def test_models_without_streaming_generate_without_a_cache(still):
    """Fails if such a model is asked for a state."""
    model, (x, mask) = causal(still), left_padded()
    found = model.generate(x, attention_mask=mask, max_new_tokens=3, do_sample=False)
    alone = model.generate(x[1:2, 4:], max_new_tokens=3, do_sample=False)
    assert torch.equal(found[1, 9:], alone[0, 5:]) and not model.config.use_cache
    with pytest.raises(
        Unsupported, match="does not support a cache: it keeps nothing; use use_cache=False"
    ):
        model(x, use_cache=True)


def test_unsupported_generation_raises():
    """Fails if right padding, a foreign cache or cropping is accepted."""
    model, (x, mask) = causal(), left_padded()
    with pytest.raises(ValueError, match="padded on the left"):
        model(x, attention_mask=mask.flip(1), use_cache=True)
    with pytest.raises(
        TypeError, match="must be a StreamCache from the previous call, not DynamicCache"
    ):
        model(x, past_key_values=hf.DynamicCache())
    cache = model(x, attention_mask=mask, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="Padding among the tokens that continue a stream"):
        model(x[:, :2], attention_mask=F.pad(mask, (0, 2)), past_key_values=cache)
    with pytest.raises(Unsupported, match="cannot be cropped"):
        cache.crop(3)
    with pytest.raises(ValueError, match="leave out the cache"):
        model(x, labels=x, use_cache=True)
    with pytest.raises(ValueError, match=r"attention_mask must be \(b, n\)"):
        model(x, attention_mask=mask[:, None, None])
    with pytest.raises(ValueError, match=r"cover all tokens so far, \(3, 11\), not \(3, 2\)"):
        model(x[:, :2], attention_mask=mask[:, :2], past_key_values=cache)


def tokenizer():
    """Words of one letter, made here."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "<unk>"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)


def test_pipelines(tmp_path):
    """Fails if a saved folder does not work in transformers pipelines."""
    words = tokenizer()
    model = causal()
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    speak = hf.pipeline("text-generation", model=str(tmp_path), device="cpu")
    generated = speak(
        ["a b c d", "e"], max_new_tokens=5, do_sample=False, batch_size=2, pad_token_id=0
    )
    assert generated[0][0]["generated_text"].startswith("a b c d") and generated[1][0][
        "generated_text"
    ].startswith("e")
    alone = speak(["e"], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert alone[0][0]["generated_text"] == generated[1][0]["generated_text"]
    judge = hf.pipeline(
        "text-classification",
        model=encoding(regard_hf.RegardForSequenceClassification),
        tokenizer=words,
        device="cpu",
    )
    assert judge("a b c")[0]["label"] in ("LABEL_0", "LABEL_1")


# ------------------------------------------------------------------------------ losses and training
def test_causal_lm_loss():
    """Fails if labels are not shifted, or -100 or predictions from padding count."""
    model, (x, mask) = causal(), left_padded()
    labels = x.masked_fill(mask == 0, -100)
    labels[0, 4] = -100
    total, count = 0.0, 0
    for row in range(3):
        real = x[row][mask[row].bool()][None]
        logp = model(real).logits.log_softmax(-1)
        wanted = labels[row][mask[row].bool()]
        for at in range(1, real.shape[1]):
            if wanted[at] != -100:
                total, count = total - logp[0, at - 1, wanted[at]], count + 1
    torch.testing.assert_close(model(x, attention_mask=mask, labels=labels).loss, total / count)
    torch.testing.assert_close(
        model(x, attention_mask=mask, labels=labels, num_items_in_batch=5).loss, total / 5
    )


def test_other_losses():
    """Fails if -100 counts, or the target is not shifted behind the start token."""
    x, y = tokens(), tokens()
    y[:, 5:] = -100
    model = encoding(regard_hf.RegardForMaskedLM)
    torch.testing.assert_close(
        model(x, labels=y).loss, F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
    )
    model = encoding(regard_hf.RegardForTokenClassification, num_labels=4)
    tags = torch.where(y > 0, y % 4, y)
    torch.testing.assert_close(
        model(x, labels=tags).loss, F.cross_entropy(model(x).logits.flatten(0, 1), tags.flatten())
    )
    model = encoding(regard_hf.RegardForSequenceClassification, num_labels=1)
    torch.testing.assert_close(
        model(x, labels=torch.ones(3)).loss, (model(x).logits[:, 0] - 1).square().mean()
    )
    model = translating()
    read = torch.cat((torch.ones(3, 1, dtype=torch.long), y[:, :-1].clamp(min=0)), 1)
    wanted = F.cross_entropy(model(x, decoder_input_ids=read).logits.flatten(0, 1), y.flatten())
    torch.testing.assert_close(model(x, labels=y).loss, wanted)


def test_loss_includes_auxiliary_losses():
    """Fails if the Trainer's loss lacks the load balancing of experts."""
    model, x = causal(ffn=module_spec("switch", num_experts=4)), tokens()
    with regard.collect_aux() as notes:
        logits = model.net(x)
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    assert notes.loss() > 0
    torch.testing.assert_close(model(x, labels=x).loss, plain + notes.loss())
    torch.testing.assert_close(
        model(x, labels=x, num_items_in_batch=48).loss, (plain + notes.loss()) / 2
    )  # 24 of 48


def fresh(module):
    """Small weights, with which training begins."""
    if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
        torch.nn.init.normal_(module.weight, std=0.1)


@pytest.mark.parametrize("kind", ["causal", "classes", "seq2seq"])
def test_trainer(kind, tmp_path):
    """Fails if the Trainer does not run, or the loss does not fall."""
    pytest.importorskip("accelerate", reason="pip install accelerate")
    make = {
        "causal": causal,
        "seq2seq": translating,
        "classes": lambda: encoding(regard_hf.RegardForSequenceClassification),
    }[kind]
    model = make().apply(fresh)
    data = [
        {"input_ids": t, "labels": t.clone() if kind != "classes" else t[0] % 2}
        for t in tokens(8, 9)
    ]
    plan = hf.TrainingArguments(
        tmp_path,
        max_steps=30,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        gradient_accumulation_steps=2,
    )
    trainer = hf.Trainer(model, plan, train_dataset=data, eval_dataset=data)
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.7 * first
    trainer.save_model(tmp_path / "kept")
    assert (tmp_path / "kept" / "model.safetensors").is_file()


@pytest.mark.parametrize("make", [causal, translating])
def test_resize_token_embeddings(make, tmp_path):
    """Fails if embeddings are resized without logits, tying or the configuration."""
    model = make()
    x = tokens()
    before = model.get_input_embeddings().weight[:31].clone()
    model.resize_token_embeddings(40)
    assert model.config.vocab_size == 40 == model.config.regard.tokens.vocab_size
    assert (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
        and torch.equal(model.get_input_embeddings().weight[:31], before)
    )
    more = {} if make is causal else {"decoder_input_ids": x}
    assert model(x, **more).logits.shape == (3, 9, 40)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again(x, **more).logits, model(x, **more).logits)
    model.resize_token_embeddings(31)
    assert model(x, **more).logits.shape == (3, 9, 31)


# -------------------------------------------------------------------------------------------- other
def test_global_attention_mask_and_token_types():
    """Fails if global_attention_mask or token_type_ids are ignored."""
    config = models.bert(
        1, 16, 2, vocab_size=31, length=64, mixer=module_spec("longformer", window=1), dropout=0.0
    )
    model, x = (
        randomize_weights(
            regard_hf.RegardForMaskedLM(regard_hf.RegardConfig.from_model_config(config)),
            torch.float32,
            1.0,
        ),
        tokens(),
    )
    global_attention_mask, types = torch.zeros_like(x), torch.ones_like(x)
    global_attention_mask[:, 0] = 1
    plain = model(x).logits
    assert not torch.allclose(plain, model(x, global_attention_mask=global_attention_mask).logits)
    assert not torch.allclose(plain, model(x, token_type_ids=types).logits)
    assert causal()(x, token_type_ids=0 * x).logits.shape == (3, 9, 31)
    with pytest.raises(ValueError, match="This model has no token types"):
        causal()(x, token_type_ids=types)


def test_wrong_models_and_configurations_raise(tmp_path):
    """Fails if a wrong kind of model, a broken configuration or checkpointing is accepted."""
    of = regard_hf.RegardConfig.from_model_config
    with pytest.raises(
        ValueError,
        match="RegardForCausalLM expects a model of kind 'decoder', not 'encoder'",
    ):
        regard_hf.RegardForCausalLM(of(models.bert(1, 8, 2, vocab_size=31)))
    with pytest.raises(
        ValueError, match=r"expects tokens, but the input is patches: use regard.hf.HubModel"
    ):
        regard_hf.RegardModel(of(models.vit(1, 8, 2, image_size=32)))
    with pytest.raises(ValueError, match="configuration has no model"):
        regard_hf.RegardModel(regard_hf.RegardConfig())
    with pytest.raises(Unsupported, match='stack="reversible" stores no activations'):
        causal().gradient_checkpointing_enable()
    causal().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["model"]["mixxer"] = settings["model"].pop("mixer")
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="did you mean 'mixer'"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        models.vit(
            1,
            8,
            2,
            image_size=32,
            patch_size=8,
            head=models.SequenceClassificationHeadConfig(num_classes=3),
        ),
        models.ModelConfig(
            kind="encoder",
            input=models.VectorInput(width=3),
            position="none",
            dim=8,
            heads=2,
            layers=1,
            mixer=module_spec("isab", points=4),
            head=models.RegressionHeadConfig(pooling="pma"),
        ),
    ],
    ids=["vision", "sets"],
)
def test_hub_model_save_and_load(config, tmp_path):
    """Fails if a model without a class in transformers is loaded differently."""
    x = torch.randn(2, 3, 32, 32) if config.input.kind == "patches" else torch.randn(2, 7, 3)
    model = regard_hf.HubModel.wrap(models.build(config)).eval()
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    again = regard_hf.HubModel.from_pretrained(tmp_path).eval()
    assert torch.equal(again(x), model(x)) and again.net.config == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("net.head.out.bias"), "Missing.*net.head.out.bias"),
        (lambda tensors: tensors.update(odd=torch.zeros(2)), "Unexpected.*odd"),
        (
            lambda tensors: tensors.update({"net.head.out.bias": torch.zeros(9)}),
            r"net.head.out.bias.*\[9\]",
        ),
    ],
)
def test_hub_model_refuses_wrong_weights(change, message, tmp_path):
    """Fails if missing or unexpected weights are ignored, as huggingface_hub does."""
    regard_hf.HubModel.wrap(
        models.vit(
            1,
            8,
            2,
            image_size=32,
            patch_size=8,
            head=models.SequenceClassificationHeadConfig(num_classes=3),
        )
    ).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"(?s){message}"):
        regard_hf.HubModel.from_pretrained(tmp_path)
    with pytest.raises(TypeError, match="not Linear"):
        regard_hf.HubModel.wrap(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["HubModel", "AutoModelForCausalLM"])
def test_pickles_are_refused(kind, tmp_path):
    """Fails if a pickle is opened, or the error does not explain how to convert it."""
    model = causal() if kind != "HubModel" else regard_hf.HubModel.wrap(causal().net)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"is a pickle.*save_file"):
        getattr(regard_hf if kind == "HubModel" else hf, kind).from_pretrained(tmp_path)

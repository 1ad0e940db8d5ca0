"""Conventions of transformers that `regard.hf.introspection` relies on.

They are compared with the source of all models of the installed transformers. If a test fails after
an upgrade, adjust the declarations in `regard.hf.families.interface`.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

import hf_models as small  # noqa: E402
from regard.hf import families, introspection  # noqa: E402

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
CALL = re.compile(rf"{INTERFACE}(?:\.get_interface|, self|\[)")
CLASS = re.compile(r"^class (\w+)\((.*?)\):\n(.*?)(?=^class |^def |^@|\Z)", re.M | re.S)
CAUSAL_MASK = re.compile(r"create_(?:sliding_window_|chunked_)?causal_mask\b")
BIDIRECTIONAL_MASK = re.compile(r"create_bidirectional_(?:sliding_window_)?mask\b")


def model_files():
    """The classes of each file that uses the interface: name -> (bases, body)."""
    root = Path(transformers.__file__).parent / "models"
    for path in sorted(root.glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if INTERFACE in source:
            yield {name: (bases, body) for name, bases, body in CLASS.findall(source)}


FILES = list(model_files())
# The layer name of Switch is a number; the merged attention of T5Gemma 2 reads both sequences.
OTHERS = ("switch_transformers", "t5gemma2")


def interface_classes(classes):
    """The classes whose forward calls the interface, also by inheritance."""
    found = {name for name, (_, body) in classes.items() if CALL.search(body)}
    for _ in range(3):
        found |= {
            name
            for name, (bases, body) in classes.items()
            if "def forward" not in body and found & {base.strip() for base in bases.split(",")}
        }
    return found


def test_there_are_models_to_compare_with():
    """Fails if transformers moves its models or renames the interface."""
    assert len(FILES) > 200 and sum(len(interface_classes(classes)) for classes in FILES) > 300


def test_layers_with_is_causal_are_those_that_use_the_interface():
    """Fails if a layer uses the interface without `is_causal` and without a declaration."""
    undeclared = set()
    for classes in FILES:
        for name in interface_classes(classes):
            bases, body = classes[name]
            inherited = "".join(
                classes[b.strip()][1] for b in bases.split(",") if b.strip() in classes
            )
            if "self.is_causal =" not in body + inherited:
                undeclared.add(name)
    assert undeclared == families.INTERFACE_ATTENTION


def test_layers_with_their_own_attention_are_declared():
    """Fails if a file that uses the interface has an attention layer that does not."""
    own = set()
    for classes in FILES:
        using = interface_classes(classes)
        wraps = re.compile("|".join(rf"\b{name}\(" for name in using) or r"(?!)")
        for name, (_, body) in classes.items():
            projects = re.search(r"nn\.(?:Linear|Conv2d)|Conv1D\(", body)
            if "Attention" in name and name not in using and projects and not wraps.search(body):
                own.add(name)
    assert own == families.OWN_ATTENTION


def test_modules_that_make_causal_masks_for_other_layers_are_declared():
    """Fails if a module gives causal masks to layers that all have is_causal=False."""
    causal = set()
    for classes in FILES:
        flags = [
            flag
            for name in interface_classes(classes)
            for flag in re.findall(r"self\.is_causal = (.+)", classes[name][1]) or ["False"]
        ]
        bidirectional = any(BIDIRECTIONAL_MASK.search(body) for _, body in classes.values())
        if not bidirectional and all(flag.startswith("False") for flag in flags):
            causal |= {name for name, (_, body) in classes.items() if CAUSAL_MASK.search(body)}
    causal.remove("DogeForCausalLM")  # for generation
    causal.remove("GitModel")  # its causal layers have their own attention, and the name is refused
    assert causal == families.CAUSAL_MODULES


def test_names_of_cross_attention():
    """Fails if a layer that transformers records as cross-attention has an undeclared name."""
    layers = []
    root = Path(transformers.__file__).parent / "models"
    for path in sorted(root.glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        for line in (
            re.findall(r'"cross_attentions":\s*(.+)', source) if INTERFACE in source else ()
        ):
            layer = re.search(r'layer_name="([^"]+)"', line)
            target = re.search(r"\b([A-Z]\w+Attention)\b", line)
            layers.append((path.parent.name, line, [m[1] for m in (layer, target) if m]))
    assert len(layers) > 40
    for model, line, names in layers:
        known = any(
            word in name.lower() for name in names for word in families.CROSS_ATTENTION_NAMES
        )
        own = not families.OWN_ATTENTION.isdisjoint(names)
        assert known or own or not names or model in OTHERS, (model, line)


@pytest.mark.parametrize("family", small.ALL)
def test_layers_are_found_in_real_models(family):
    """Fails if the convention finds other layers than those whose forward calls the interface."""
    model = small.build(family)
    found = {path for path, _ in introspection.attention_layers(model)}
    expected = {
        path
        for path, module in model.named_modules()
        if INTERFACE in inspect.unwrap(type(module).forward).__code__.co_names
    }
    assert found == expected and found


def test_roles():
    """Fails if causal, bidirectional or cross-attention layers are confused."""

    def roles(family, **changes):
        model = small.build(family, **changes)
        introspection.annotate_roles(model)
        layers = introspection.attention_layers(model)
        return {path: getattr(module, introspection.ROLE) for path, module in layers}

    assert set(roles("bert").values()) == {introspection.BIDIRECTIONAL}
    assert set(roles("bert", is_decoder=True).values()) == {introspection.CAUSAL}
    assert set(roles("llama").values()) == {introspection.CAUSAL}
    assert set(roles("vit").values()) == {introspection.BIDIRECTIONAL}
    for path, role in roles("clip").items():
        expected = introspection.CAUSAL if path.startswith("text_") else introspection.BIDIRECTIONAL
        assert role == expected, path
    for family, cross in (("t5", "EncDec"), ("bart", "encoder_attn"), ("whisper", "encoder_attn")):
        for path, role in roles(family).items():
            causal = introspection.CAUSAL if "decoder" in path else introspection.BIDIRECTIONAL
            assert role == (introspection.CROSS if cross in path else causal), path
    crossed = roles("gpt2", add_cross_attention=True)
    assert {role for path, role in crossed.items() if "crossatt" in path} == {introspection.CROSS}
    assert {role for path, role in crossed.items() if "crossatt" not in path} == {
        introspection.CAUSAL
    }

"""Models of parts drawn at random: mixers, positional encoding, stack, cross-attention, norm and
residual. What can be built keeps all promises; the rest is refused in words.

`make fuzz` draws more, see `fuzzing.py`.
"""

from hypothesis import HealthCheck, given, settings, strategies as st

import regard
from fuzzing import SLOW, examples
from regard.errors import Unsupported
from regard.models import EncoderConfig, ModelConfig, TokenInput, module_spec
from regard.models.stacks import STACKS
from regard.norm import NORMS
from regard.position.encodings import POSITIONAL_ENCODINGS
from regard.registry import get_recipe
from regard.residual import RESIDUALS
from regard.testing import check_model

COUNT = examples(300, 3000)
VOCAB = 4  # few words, so that most tokens have an equal
STACK_ARGUMENTS = {
    "universal": {"halting": True},
    "segments": {"segment_length": 5, "memory_length": 4},
    "compressive": {
        "segment_length": 4,
        "memory_length": 4,
        "compressed_length": 3,
        "compression_rate": 2,
    },
    "funnel": {"block_sizes": [1, 1]},
}
POSITIONS = st.sampled_from([name for name in POSITIONAL_ENCODINGS if not name.endswith("2d")])
CROSS = regard.list_recipes(can=["cross"])
NAMES = [name for name in regard.list_recipes() if name != "per_head"]  # its patterns are no JSON
RECIPES = {
    causal: [name for name in NAMES if causal in get_recipe(name).causal_options()]
    for causal in (False, True)
}


@st.composite
def configurations(draw):
    """Keyword arguments of a configuration, of which about half are refused."""

    def spec(names):
        name = draw(st.sampled_from(names))
        return module_spec(name, **get_recipe(name).example_kwargs)

    def layers(causal):
        stack = draw(st.none() | st.just("sequential") | st.sampled_from(list(STACKS)))
        count = 1 if stack in ("shared", "universal") else draw(st.integers(1, 2))
        return {
            "layers": draw(st.sampled_from([2, 2, 4] if count == 2 else [2, 1, 3])),
            "mixer": [spec(RECIPES[causal]) for _ in range(count)],
            "stack": stack and module_spec(stack, **STACK_ARGUMENTS.get(stack, {})),
        }

    kind = draw(st.sampled_from(["encoder", "decoder", "seq2seq"]))
    arguments = {
        "kind": kind,
        "input": TokenInput(vocab_size=VOCAB),
        "dim": 8,
        "heads": 2,
        "length": 32,
        **layers(kind != "encoder"),
        "position": module_spec(draw(st.sampled_from(["none", "learned"]) | POSITIONS)),
        "norm": module_spec(draw(st.just("layer") | st.sampled_from(list(NORMS)))),
        "residual": module_spec(draw(st.just("pre") | st.sampled_from(list(RESIDUALS)))),
        "ffn": draw(st.sampled_from(["mlp", "swiglu", None])),
    }
    if kind == "seq2seq":
        arguments["cross"] = spec(CROSS)
        arguments["encoder"] = EncoderConfig(**layers(False))
    return arguments


def test_combinations():
    """Fails if a model of drawn parts breaks a promise, or most of them cannot be built."""
    built, refused = set(), {}

    @settings(
        max_examples=COUNT,
        derandomize=not SLOW,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(configurations())
    def check(arguments):
        try:
            check_model(ModelConfig(**arguments))
        except (ValueError, Unsupported) as error:
            refused[repr(arguments)] = str(error)
            return
        built.add(repr(arguments))

    check()
    print(f"{len(built)} combinations built, {len(refused)} refused")
    assert len(built) > COUNT / 4
    assert all(refused.values()), "a refusal gives no reason"

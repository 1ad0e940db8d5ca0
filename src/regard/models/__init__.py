"""Models: embed, layers, head; their configuration, their files, and weights from elsewhere."""

from regard.models.build import build
from regard.models.config import (
    Classify,
    Config,
    Language,
    Masked,
    Match,
    Part,
    Patches,
    Pooled,
    Regress,
    Side,
    Tag,
    Tokens,
    Vectors,
    part,
)
from regard.models.families import bert, gpt, transformer, vit
from regard.models.huggingface import from_huggingface, translate
from regard.models.loss import IGNORE, choice_loss, next_token_loss, number_loss
from regard.models.masking import mask_out
from regard.models.model import Decoder, Encoder, Maps, Model, Pair, Seq2Seq, Step, Trunk
from regard.models.save import load, save
from regard.models.weights import Row, Unmatched, WeightMap, adopt, plan

__all__ = [
    "adopt", "bert", "build", "from_huggingface", "gpt", "load", "mask_out", "part", "plan", "save",
    "transformer", "translate", "vit",
    "IGNORE", "choice_loss", "next_token_loss", "number_loss",
    "Classify", "Config", "Language", "Masked", "Match", "Part", "Patches", "Pooled", "Regress", "Side", "Tag", "Tokens",
    "Vectors", "Decoder", "Encoder", "Maps", "Model", "Pair", "Seq2Seq", "Step", "Trunk",
    "Row", "Unmatched", "WeightMap",
]  # fmt: skip

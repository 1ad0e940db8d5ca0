"""Models: embed, layers, head; their configuration, their files, weights from elsewhere, and what they say next."""

from regard.models.beam import Beams, beam_search
from regard.models.build import build
from regard.models.choosing import Greedy, MinP, Repetition, Sample, Temperature, TopK, TopP
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
from regard.models.generation import Piece, Result, generate, stream_tokens
from regard.models.huggingface import from_huggingface, translate
from regard.models.loss import IGNORE, choice_loss, next_token_loss, number_loss
from regard.models.masking import mask_out
from regard.models.model import Decoder, Encoder, Maps, Model, Pair, Seq2Seq, Step, Trunk
from regard.models.save import load, save
from regard.models.stopping import Stop
from regard.models.weights import Misshapen, Row, Unmatched, WeightMap, adopt, plan

__all__ = [
    "adopt", "bert", "build", "from_huggingface", "gpt", "load", "mask_out", "part", "plan", "save",
    "transformer", "translate", "vit",
    "IGNORE", "choice_loss", "next_token_loss", "number_loss",
    "Classify", "Config", "Language", "Masked", "Match", "Part", "Patches", "Pooled", "Regress", "Side", "Tag", "Tokens",
    "Vectors", "Decoder", "Encoder", "Maps", "Model", "Pair", "Seq2Seq", "Step", "Trunk",
    "Misshapen", "Row", "Unmatched", "WeightMap",
    "beam_search", "generate", "stream_tokens",
    "Beams", "Greedy", "MinP", "Piece", "Repetition", "Result", "Sample", "Stop", "Temperature", "TopK", "TopP",
]  # fmt: skip

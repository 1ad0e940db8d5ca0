"""Models: configuration, building, heads, losses, generation, saving and loading."""

from regard.models.beam import BeamSearchConfig, beam_search
from regard.models.build import build
from regard.models.config import (
    EncoderConfig,
    FeatureInput,
    LMHeadConfig,
    MaskedLMHeadConfig,
    MatchingHeadConfig,
    ModelConfig,
    ModuleSpec,
    PatchInput,
    PoolingHeadConfig,
    RegressionHeadConfig,
    RNNConfig,
    SequenceClassificationHeadConfig,
    TokenClassificationHeadConfig,
    TokenInput,
    VectorInput,
    module_spec,
)
from regard.models.generation import GeneratedToken, GenerationOutput, generate, stream_tokens
from regard.models.losses import IGNORE_INDEX, cross_entropy_loss, mse_loss, next_token_loss
from regard.models.masking import mask_tokens
from regard.models.model import (
    Backbone,
    Decoder,
    DecodingStep,
    DualEncoder,
    Encoder,
    EncoderDecoder,
    Model,
    Seq2Seq,
    Seq2SeqAttention,
)
from regard.models.presets import bert, gpt, transformer, vit
from regard.models.recurrent import RNNSeq2Seq
from regard.models.sampling import (
    GreedySearch,
    MinPFilter,
    RepetitionPenalty,
    Sampling,
    Temperature,
    TopKFilter,
    TopPFilter,
)
from regard.models.serialization import load, save
from regard.models.stopping_criteria import StoppingCriteria

__all__ = [
    "bert",
    "build",
    "gpt",
    "load",
    "mask_tokens",
    "module_spec",
    "save",
    "transformer",
    "vit",
    "IGNORE_INDEX",
    "cross_entropy_loss",
    "next_token_loss",
    "mse_loss",
    "SequenceClassificationHeadConfig",
    "ModelConfig",
    "LMHeadConfig",
    "MaskedLMHeadConfig",
    "MatchingHeadConfig",
    "ModuleSpec",
    "PatchInput",
    "PoolingHeadConfig",
    "RegressionHeadConfig",
    "EncoderConfig",
    "EncoderDecoder",
    "RNNConfig",
    "RNNSeq2Seq",
    "TokenClassificationHeadConfig",
    "TokenInput",
    "FeatureInput",
    "VectorInput",
    "Decoder",
    "Encoder",
    "Seq2SeqAttention",
    "Model",
    "DualEncoder",
    "Seq2Seq",
    "DecodingStep",
    "Backbone",
    "beam_search",
    "generate",
    "stream_tokens",
    "BeamSearchConfig",
    "GreedySearch",
    "MinPFilter",
    "GeneratedToken",
    "RepetitionPenalty",
    "GenerationOutput",
    "Sampling",
    "StoppingCriteria",
    "Temperature",
    "TopKFilter",
    "TopPFilter",
]

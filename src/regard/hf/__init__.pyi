"""Public names of regard.hf; `__init__.py` imports each on first use."""

from .attention_spec import (
    attention_names as attention_names,
)
from .checkpoints import (
    convert_checkpoint as convert_checkpoint,
    convert_config as convert_config,
)
from .configuration import (
    RegardConfig as RegardConfig,
)
from .decoding import (
    decoding_step as decoding_step,
)
from .drift import (
    SwapReport as SwapReport,
)
from .families import (
    ADAPTERS as ADAPTERS,
    AttentionAdapter as AttentionAdapter,
    AttentionWeights as AttentionWeights,
    linear_weights as linear_weights,
)
from .few_shot import (
    ClassificationPrompts as ClassificationPrompts,
    FewShotScore as FewShotScore,
    evaluate_prompts as evaluate_prompts,
)
from .files import (
    load_swapped as load_swapped,
    load_transformers_model as load_transformers_model,
    save_swapped as save_swapped,
)
from .hub_model import (
    HubModel as HubModel,
)
from .modeling import (
    RegardForCausalLM as RegardForCausalLM,
    RegardForConditionalGeneration as RegardForConditionalGeneration,
    RegardForMaskedLM as RegardForMaskedLM,
    RegardForSequenceClassification as RegardForSequenceClassification,
    RegardForTokenClassification as RegardForTokenClassification,
    RegardModel as RegardModel,
    wrap_model as wrap_model,
)
from .patching import (
    register as register,
)
from .position_embeddings import (
    extend_positions as extend_positions,
)
from .recovery import (
    RecoveryResult as RecoveryResult,
    recover as recover,
)
from .stream_cache import (
    StreamCache as StreamCache,
)
from .swapping import (
    find_sites as find_sites,
    original_attention as original_attention,
    restore as restore,
    swap as swap,
)
from .table_prompts import (
    TablePrompts as TablePrompts,
    evaluate_tables as evaluate_tables,
)
from .weights import (
    WeightMap as WeightMap,
    WeightRule as WeightRule,
    load_weights as load_weights,
    match_weights as match_weights,
    rule as rule,
    split_qkv as split_qkv,
    transpose as transpose,
    weight_bias_rules as weight_bias_rules,
)

"""Public names of regard; `__init__.py` imports each on first use."""

from . import (
    hf as hf,
    models as models,
    stack as stack,
    state as state,
    testing as testing,
)
from .attentions import (
    CompressedAttention as CompressedAttention,
    EfficientAttention as EfficientAttention,
    LinearAttention as LinearAttention,
    PrototypeAttention as PrototypeAttention,
    RoutedAttention as RoutedAttention,
    SoftmaxAttention as SoftmaxAttention,
)
from .auxiliary import (
    AuxOutputs as AuxOutputs,
    collect_aux as collect_aux,
    record_aux as record_aux,
)
from .backends import (
    Backend as Backend,
    attend as attend,
    explain as explain,
    register_backend as register_backend,
)
from .block import (
    Block as Block,
    Layer as Layer,
)
from .errors import (
    Unsupported as Unsupported,
)
from .hf import (
    recover as recover,
    restore as restore,
    swap as swap,
)
from .inspection import (
    View as View,
    look as look,
)
from .mixer import (
    Attention as Attention,
    Can as Can,
    Mixer as Mixer,
    MultiHead as MultiHead,
    QueryMaskAttention as QueryMaskAttention,
    SharedQKAttention as SharedQKAttention,
)
from .mixers import (
    with_position as with_position,
)
from .pattern import (
    Axial as Axial,
    Band as Band,
    Blocks as Blocks,
    Blocks2D as Blocks2D,
    BlockTable as BlockTable,
    Causal as Causal,
    Chunks as Chunks,
    Full as Full,
    Global as Global,
    GlobalMask as GlobalMask,
    GlobalMaskKeys as GlobalMaskKeys,
    GlobalMaskQueries as GlobalMaskQueries,
    KeyPhase as KeyPhase,
    Keys as Keys,
    Near2D as Near2D,
    Neighbourhood as Neighbourhood,
    Nothing as Nothing,
    Pattern as Pattern,
    PerHead as PerHead,
    PerSegment as PerSegment,
    Queries as Queries,
    RandomBlocks as RandomBlocks,
    Restarted as Restarted,
    Segments as Segments,
    block_order as block_order,
)
from .prior import (
    ALiBi as ALiBi,
    Prior as Prior,
    Sinks as Sinks,
    SoftCap as SoftCap,
)
from .registry import (
    create as create,
    create_attention as create_attention,
    list_recipes as list_recipes,
    recipe as recipe,
)
from .train.inference import (
    TrainedRun as TrainedRun,
    load as load,
)

__version__: str

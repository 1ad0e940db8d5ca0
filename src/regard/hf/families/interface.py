"""Exceptions from the conventions that `regard.hf.introspection` relies on."""

from __future__ import annotations

# Lower-case parts of the names of cross-attention layers, of their classes and of the two modules
# around them. `_can_record_outputs["cross_attentions"]` declares them too, but only in about two
# thirds of the models.
CROSS_ATTENTION_NAMES = (
    "crossatt",
    "cross_att",
    "encoder_att",
    "encdecatt",
    "enc_dec_att",
    "coattention",
    "co_attention",
)

# Modules whose attention layers receive a causal mask although they have is_causal=False, or no
# such attribute.
CAUSAL_MODULES = frozenset(
    {
        "Aimv2TextModel",
        "CLIPTextModel",
        "CLIPSegTextModel",
        "DogeModel",
        "MetaClip2TextModel",
        "Owlv2TextTransformer",
        "OwlViTTextTransformer",
        "VideoPrismTextModel",
        "XCLIPTextModel",
    }
)

# Layers that call the interface but have no attribute `is_causal`. Add the class name of your own
# attention here.
INTERFACE_ATTENTION = {
    "AlignTextSelfAttention",
    "ClapTextSelfAttention",
    "DogeAttention",
    "LayoutLMSelfAttention",
    "Llama4VisionAttention",
    "MarkupLMSelfAttention",
    "MllamaTextCrossAttention",
    "MllamaVisionAttention",
    "SplinterSelfAttention",
}

# Layers that compute attention themselves in models whose other layers use the interface.
OWN_ATTENTION = {
    "Aimv2AttentionPoolingHead",
    "AriaCrossAttention",
    "BailingHybridDeltaAttention",
    "BigBirdPegasusBlockSparseAttention",
    "BigBirdPegasusEncoderAttention",
    "BigBirdPegasusSelfAttention",
    "BridgeTowerResidualAttention",
    "ClapAudioSelfAttention",
    "ConditionalDetrMHAttentionMap",
    "DFineMultiscaleDeformableAttention",
    "DeepseekOcr2SamVisionAttention",
    "DeformableDetrMultiscaleDeformableAttention",
    "Deimv2MultiscaleDeformableAttention",
    "DetrMHAttentionMap",
    "EdgeTamVideoMemoryAttentionMLP",
    "EsmFold2RowAttentionPooling",
    "EvollaSequenceAlignerCrossAttention",
    "EvollaSequenceCompressorAttention",
    "Gemma3nAudioAttention",
    "Gemma3nAudioConformerAttention",
    "Gemma4AudioAttention",
    "GitSelfAttention",
    "Glm5NextTextLinearAttention",
    "InformerProbSparseAttention",
    "KimiLinearDeltaAttention",
    "LongT5LocalAttention",
    "LongT5TransientGlobalAttention",
    "LwDetrMultiscaleDeformableAttention",
    "MaskFormerDetrMHAttentionMap",
    "MiniMaxLightningAttention",
    "PPDocLayoutV2MultiscaleDeformableAttention",
    "PPDocLayoutV2ReadingOrderSelfAttention",
    "PPDocLayoutV3MultiscaleDeformableAttention",
    "PPDocLayoutV4MultiscaleDeformableAttention",
    "PPFormulaNetVisionAttention",
    "PatchTSMixerGatedAttention",
    "PegasusXGlobalLocalAttention",
    "RTDetrMultiscaleDeformableAttention",
    "RTDetrV2MultiscaleDeformableAttention",
    "RfDetrMultiscaleDeformableAttention",
    "SamHQVisionAttention",
    "SamVisionAttention",
    "UnlimitedOcrSamVisionAttention",
}

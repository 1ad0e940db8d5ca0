"""Recurrent encoder-decoders: with attention (Bahdanau et al. 2015, arXiv 1409.0473), or with one
context vector for the whole source (Cho et al. 2014, arXiv 1406.1078)."""

from __future__ import annotations

from torch import Tensor, nn

from regard.cells import BahdanauDecoder, BiEncoder, DeepOutput, FixedContextDecoder
from regard.cells.bahdanau import DecoderRun, DecoderState
from regard.mixer import evaluation_mode
from regard.models.embeddings import InputEmbedding
from regard.models.model import EncoderDecoder, Seq2SeqAttention
from regard.numerics import zero_padding_tokens
from regard.state import JoinedState, check_batch_size, run_by_group


class RNNSeq2Seq(EncoderDecoder):
    """Bidirectional recurrent encoder, and a recurrent decoder with or without attention.

    The logits of a token are a maxout layer of the state before it, the token before it and the
    context: the annotations weighted by attention, or one vector for all tokens.

    Args:
        source: Embedding of the source tokens.
        target: Embedding of the target tokens.
        encoder: Returns an annotation for each source token.
        decoder: `BahdanauDecoder`, or `FixedContextDecoder` for no attention.
        output: Maps state, word and context to logits.
        dropout: Dropout of the annotations, and of what enters the output layer.
    """

    decoder: BahdanauDecoder | FixedContextDecoder

    def __init__(
        self,
        source: InputEmbedding,
        target: InputEmbedding,
        encoder: BiEncoder,
        decoder: BahdanauDecoder | FixedContextDecoder,
        output: DeepOutput,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.source, self.target, self.encoder = source, target, encoder
        self.decoder, self.output, self.dropout = decoder, output, nn.Dropout(dropout)

    def encode(self, source: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """See `EncoderDecoder`: the annotations (b, m, 2 d)."""
        words, mask = self.source(source, mask)
        annotations = self.dropout(self.encoder(words, mask=mask))
        return zero_padding_tokens(annotations, mask), mask

    def decode(
        self,
        target: Tensor,
        context: Tensor,
        *,
        context_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """See `EncoderDecoder`."""
        return self._run(target, None, context, context_mask, target_mask)[0]

    def stream(
        self,
        x: Tensor,
        state: DecoderState | JoinedState | None = None,
        *,
        context: Tensor,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, DecoderState]:
        """See `EncoderDecoder`."""
        if isinstance(state, JoinedState):

            def run(
                group: DecoderState | None, *inputs: Tensor | None
            ) -> tuple[Tensor, DecoderState]:
                tokens, annotations, mask = inputs
                assert tokens is not None
                assert annotations is not None
                return self.stream(tokens, group, context=annotations, context_mask=mask)

            return run_by_group(run, state, x, context, context_mask)
        if not isinstance(state, DecoderState | None):
            raise TypeError(
                f"state must be the DecoderState of the last chunk, not {type(state).__name__}"
            )
        check_batch_size(state, x.shape[0])
        logits, run_of_chunk = self._run(x, state, context, context_mask, None)
        return logits, run_of_chunk.state

    def attention_maps(
        self,
        source: Tensor,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Seq2SeqAttention:
        """See `EncoderDecoder`: one cross-attention map with one head; None for a fixed context."""
        with evaluation_mode(self):
            context, mask = self.encode(source, mask)
            weights = self._run(target, None, context, mask, target_mask)[1].weights
        return Seq2SeqAttention([], [], [None if weights is None else weights[:, None]])

    def _run(
        self,
        target: Tensor,
        state: DecoderState | None,
        annotations: Tensor,
        mask: Tensor | None,
        target_mask: Tensor | None,
    ) -> tuple[Tensor, DecoderRun]:
        """The logits of the target tokens, and the states that led to them."""
        words, _ = self.target(target, target_mask)
        if state is None:
            state = self.decoder.start(annotations, mask)
        run = self.decoder.run(words, state, annotations, mask, target_mask)
        read = (self.dropout(each) for each in (run.before, words, run.contexts))
        return self.output(*read), run

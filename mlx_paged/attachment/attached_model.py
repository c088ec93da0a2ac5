"""``attach``: a model of mlx-lm whose K/V are in paged blocks, with no change to its callers."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.attachment.attached_class import attached_class, is_attached
from mlx_paged.attachment.logits import unpack
from mlx_paged.attachment.prompt_cache import FollowingCache, PromptCache
from mlx_paged.attachment.sequences import CachedSequence, CachedSequences
from mlx_paged.attachment.steps import Run, StepOfCall
from mlx_paged.attachment.token_history import CallTokens
from mlx_paged.cache import KVCache
from mlx_paged.config import DEFAULT_BACKEND, DEFAULT_BLOCK_SIZE
from mlx_paged.errors import ArgumentError, UnsuitableModelError, one_line, shown
from mlx_paged.foreign_arguments import refuses_unknown_arguments
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm.loaded import config_of, is_called_as_mlx_lm
from mlx_paged.models.mlx_lm.module_calls import ModuleClasses
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.models.mlx_lm.trial import Trial
from mlx_paged.snapshots import export_prompt_cache

# The chunk size for recomputing a sequence, that of mlx-lm's prompts.
MAX_CHUNK = 2048


@dataclass(frozen=True)
class AttachStats:
    """The memory of an attached model now, and the counters of its prefix cache.

    Attributes:
        num_seqs: prompt caches that hold tokens.
        num_blocks: the budget.
        num_used_blocks: blocks in use by a sequence.
        num_cached_blocks: blocks in the prefix cache, in use or free.
        num_evictions: cached blocks that were reused for other tokens.
        nbytes_used: bytes of the blocks in use.
        nbytes_held: bytes allocated for K/V.
        num_tokens: new tokens in all calls so far.
        num_hit_tokens: those that were found in the prefix cache and not computed.
        num_recomputed_tokens: tokens computed again because their blocks had been evicted.
    """

    num_seqs: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_evictions: int
    nbytes_used: int
    nbytes_held: int
    num_tokens: int
    num_hit_tokens: int
    num_recomputed_tokens: int


class Attachment:
    """An attached model. ``close``, or the end of a ``with`` statement, detaches it.

    Attributes:
        model: the model that was passed to :func:`attach`, for mlx-lm's own functions.
    """

    def __init__(
        self,
        model: Module,
        packed: LanguageModel,
        cache: KVCache,
        stock_classes: ModuleClasses,
    ):
        self.model = model
        self._packed_model: LanguageModel | None = packed
        self._sequences = CachedSequences(cache)
        self._stock_class = type(model)
        self._stock_classes = stock_classes
        self._num_caches = len(make_prompt_cache(model))
        self._num_tokens = self._num_hit_tokens = self._num_recomputed_tokens = 0
        self._attached_class = attached_class(type(model), self)
        model.__class__ = self._attached_class

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Detach the model and free all K/V. The model's classes are restored, and so are mlx-lm's
        functions unless another model that runs packed needs them. Prompt caches made while it was
        attached can't be used any more. A second call does nothing.
        """
        if type(self.model) is self._attached_class:
            self._stock_classes.restore()
        with self._sequences.lock:
            self._sequences.close()
            self._packed_model = None

    @property
    def cache(self) -> KVCache:
        """The K/V of all sequences; raises ``RuntimeError`` if the model was detached."""
        return self._sequences.cache

    @property
    def _packed(self) -> LanguageModel:
        """Raises ``RuntimeError`` if the model was detached."""
        if self._packed_model is None:
            raise RuntimeError("[attach] the model was detached; attach it again")
        return self._packed_model

    def stats(self) -> AttachStats:
        """Current figures; raises ``RuntimeError`` if the model was detached."""
        with self._sequences.lock:
            self._sequences.free_released()
            held = self._sequences.held
            stats, blocks = held.stats(), held.manager.stats()
            return AttachStats(
                num_seqs=stats.num_seqs,
                num_blocks=stats.num_blocks,
                num_used_blocks=blocks.num_used_blocks,
                num_cached_blocks=blocks.num_cached_blocks,
                num_evictions=blocks.num_evictions,
                nbytes_used=stats.nbytes_used,
                nbytes_held=stats.nbytes_held,
                num_tokens=self._num_tokens,
                num_hit_tokens=self._num_hit_tokens,
                num_recomputed_tokens=self._num_recomputed_tokens,
            )

    def export_prompt_cache(
        self,
        path: str | Path,
        prompt_cache: Sequence[PromptCache | FollowingCache],
        *,
        model_name: str | None = None,
    ) -> int:
        """Write a prompt cache to a file in the format of mlx-lm's ``save_prompt_cache``, for
        ``load_prompt_cache``; returns its number of tokens.

        Args:
            prompt_cache: of this model, with one sequence.
            model_name: the folder or hub id that ``mlx_lm.generate`` loads.

        Raises:
            ArgumentError: the prompt cache is of another model, has no tokens or several sequences;
                tokens have left a window; or mlx-lm's caches can't hold its K/V.
            SnapshotError: the file can't be written; an older file is not changed.
        """
        prompt = self._checked(prompt_cache)
        with self._sequences.lock:
            self._sequences.free_released()
            if len(prompt.rows) != 1 or prompt.empty():
                raise ArgumentError(
                    f"[attach] prompt_cache has {len(prompt.rows)} sequences and up to "
                    f"{prompt.size()} tokens; only a single sequence with tokens can be exported",
                    "prompt_cache",
                )
            (sequence,) = prompt.rows
            if not self._sequences.has_blocks(sequence.state):
                self._compute_again(sequence, {sequence})
            return export_prompt_cache(
                path,
                self._packed,
                self._sequences.held,
                sequence.state.seq_id,
                model_name=model_name,
                token_ids=sequence.state.tokens.read(),
            )

    # What the class of the attached model calls

    def make_cache(self) -> list[PromptCache | FollowingCache]:
        """mlx-lm's ``model.make_cache``: one entry per layer; the first does everything."""
        primary = PromptCache(self._sequences)
        return [primary, *[FollowingCache(primary) for _ in range(self._num_caches - 1)]]

    def run(self, tokens: mx.array, caches: Sequence[PromptCache | FollowingCache]) -> mx.array:
        """One call of the model.

        Args:
            tokens: ``[batch, length]``, of any integer dtype.

        Returns:
            Logits ``[batch, length, vocab_size]``.

        Raises:
            ArgumentError: tokens of another shape or dtype, or caches of another model.
            CacheFullError: the tokens exceed the budget; nothing was changed.
        """
        prompt = self._checked(caches)
        if tokens.ndim != 2 or not mx.issubdtype(tokens.dtype, mx.integer):
            raise ArgumentError(
                "[attach] tokens must be integers of shape [batch, length], got "
                f"{list(tokens.shape)} of {tokens.dtype}",
                "inputs",
            )
        with self._sequences.lock:
            self._sequences.free_released()
            batch_size, length = tokens.shape
            runs = prompt.runs(batch_size, length)
            if not runs:
                prompt.advance(length)
                shape = batch_size, length, self._packed.args.vocab_size
                return mx.zeros(shape, self._packed.dtype)
            self._sequences.num_calls += 1
            kept = {run.sequence for run in runs}
            for run in runs:
                if run.sequence.num_tokens and not self._sequences.has_blocks(run.sequence.state):
                    self._compute_again(run.sequence, kept)
            logits = self._compute(tokens, runs, kept)
            prompt.advance(length)
            self._num_tokens += sum(run.num_tokens for run in runs)
            self._num_hit_tokens += sum(run.num_hit_tokens for run in runs)
            return unpack(logits, runs, (batch_size, length), self._recompute)

    def _compute(
        self, tokens: mx.array, runs: Sequence[Run], kept: Container[CachedSequence]
    ) -> mx.array:
        """Compute these runs of ``tokens``; returns logits ``[num_rows, vocab_size]``."""
        with StepOfCall(self._sequences, CallTokens(tokens), kept).open(runs) as step:
            logits = self._packed(_packed_tokens(tokens, runs), self.cache.layers, step.logit_rows)
            if self.cache.can_run_ahead:
                mx.async_eval(logits, self.cache.arrays)
            else:
                # A step that is built while this one runs would copy every slab it writes to.
                mx.eval(logits, self.cache.arrays)
        return logits

    def _compute_again(self, sequence: CachedSequence, kept: set[CachedSequence]) -> None:
        """Recompute the K/V of a sequence whose blocks were evicted."""
        tokens, again = sequence.state.tokens.read(), self._sequences.new()
        for begin in range(0, len(tokens), MAX_CHUNK):
            chunk = mx.array(tokens[begin : begin + MAX_CHUNK], dtype=mx.int32)[None]
            run = Run(again, 0, 0, chunk.shape[1])
            self._compute(chunk, [run], {*kept, again})
            self._num_recomputed_tokens += run.num_computed
        # The two exchange their ids: the old one has no blocks.
        old, new = sequence.state, again.state
        old.seq_id, new.seq_id = new.seq_id, old.seq_id
        old.block_hashes = new.block_hashes

    def _recompute(self, tokens: mx.array) -> mx.array:
        logits: mx.array = self._stock_class.__call__(self.model, tokens)
        return logits

    def _checked(self, caches: Sequence[PromptCache | FollowingCache]) -> PromptCache:
        primary = caches[0]
        if not isinstance(primary, PromptCache) or len(caches) != self._num_caches:
            raise ArgumentError(
                f"[attach] cache must be a whole prompt cache of {self._num_caches} entries, as "
                f"make_prompt_cache(model) makes it, got {len(caches)} of them",
                "cache",
            )
        if primary.sequences is not self._sequences:
            raise ArgumentError(
                "[attach] cache belongs to another model, or to one that was detached", "cache"
            )
        last = caches[-1]
        if isinstance(last, FollowingCache) and last.primary is not primary:
            for follower in caches[1:]:
                if isinstance(follower, FollowingCache):
                    follower.primary = primary
        return primary


@refuses_unknown_arguments("cache")
def attach(
    model: Module,
    *,
    kv_cache_bytes: str | int | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    kv_format: str | int | None = None,
    backend: str = DEFAULT_BACKEND,
) -> Attachment:
    """Have mlx-lm's own programs keep the K/V of this model in paged blocks with a prefix cache:
    ``generate``, ``stream_generate``, ``batch_generate``, ``BatchGenerator`` and everything else
    that calls ``model(tokens, cache=make_prompt_cache(model))``::

        model, tokenizer = mlx_lm.load("mlx-community/Llama-3.2-1B-Instruct-4bit")
        with mlx_paged.attach(model, kv_cache_bytes="4G"):
            print(mlx_lm.generate(model, tokenizer, prompt="..."))

    Args:
        model: as ``mlx_lm.load`` returns it.
        kv_cache_bytes, block_size, kv_format, backend: see :func:`make_kv_cache`.

    Raises:
        ArgumentError: the model is not one of mlx-lm, is attached already, or can't run packed; or
            an argument is invalid.
    """
    if isinstance(model, Module) and is_attached(model):
        raise ArgumentError("[attach] model is attached already; close its attachment", "model")
    if not is_called_as_mlx_lm(model):
        raise ArgumentError(
            f"[attach] model must be one that mlx_lm.load returns, got {shown(type(model))}; those "
            "of mlx_paged.load run on an engine",
            "model",
        )
    # To run packed, some of its modules get other classes.
    stock_classes = ModuleClasses(model.modules())
    try:
        packed = _packed(model)
        cache = make_kv_cache(
            packed,
            "paged",
            block_size=block_size,
            kv_cache_bytes=kv_cache_bytes,
            kv_format=kv_format,
            backend=backend,
        )
    except BaseException:
        stock_classes.restore()
        raise
    return Attachment(model, packed, cache, stock_classes)


def _packed(model: Module) -> LanguageModel:
    """The model on packed input, tested against mlx-lm's own caches."""
    config = config_of(model)
    try:
        packed = Trial(model, config).run(PackedModel)
    except UnsuitableModelError as error:
        raise ArgumentError(
            f"[attach] model {config['model_type']} can't run on packed input: {one_line(error)}; "
            "mlx_paged.load may run it one sequence at a time",
            "model",
        ) from error
    if packed.state_nbytes:
        raise ArgumentError(
            f"[attach] model {config['model_type']} keeps recurrent states, which prompt caches in "
            "blocks can't trim; mlx_paged.load runs it",
            "model",
        )
    return packed


def _packed_tokens(tokens: mx.array, runs: Sequence[Run]) -> mx.array:
    """The tokens that the step computes, run by run, ``[num_computed] int32``."""
    batch_size, length = tokens.shape
    flat = tokens.reshape(-1)
    if sum(run.num_computed for run in runs) < batch_size * length:
        columns = [
            run.row * length + column
            for run in runs
            for column in range(run.begin + run.num_hit_tokens, run.end)
        ]
        flat = flat[mx.array(columns, dtype=mx.int32)]
    return flat.astype(mx.int32)

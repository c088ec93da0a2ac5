"""One conversation: the tokens of a sequence beside its K/V, so that a new turn computes only what
is new.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import mlx.core as mx

from mlx_paged.argument_values import check_callable, check_integer, kind_of
from mlx_paged.cache import KVCache, SeqId
from mlx_paged.engine.model_runner import ModelRunner
from mlx_paged.engine.prompts import read_prompt
from mlx_paged.errors import CacheFullError, PromptTooLongError, prompt_beyond_context
from mlx_paged.foreign_arguments import refuses_unknown_arguments
from mlx_paged.models.context_length import context_limit

T = TypeVar("T")
PREFILL_STEP_SIZE = 512
_forks = itertools.count(1)


class Session:
    """A sequence of ``runner``'s cache and the tokens it holds. Several sessions may share one
    cache.

    Attributes:
        tokens: the token ids whose K/V the cache holds; the cache's length of the sequence is
            always theirs.
        max_model_len: the most tokens that a prompt and its answer have together; by default the
            context that the model was made for.

    Raises:
        ValueError: ``runner`` is no :class:`ModelRunner`, ``seq`` can't be hashed, or
            ``max_model_len`` is not within what the model was made for.
    """

    @refuses_unknown_arguments("cache")
    def __init__(
        self, runner: ModelRunner, seq: SeqId = "session", max_model_len: int | None = None
    ):
        if not isinstance(runner, ModelRunner):
            raise ValueError(f"[session] runner must be a ModelRunner, got {kind_of(runner)}")
        if not isinstance(seq, Hashable):
            raise ValueError(f"[session] seq must be hashable, such as a text, got {kind_of(seq)}")
        self.runner = runner
        self.seq = seq
        self.max_model_len = context_limit(runner.model.args, max_model_len)
        self.tokens: list[int] = []

    @property
    def cache(self) -> KVCache:
        return self.runner.cache

    def prefill(
        self,
        prompt: Sequence[int],
        head: Callable[[mx.array], T],
        prefill_step_size: int = PREFILL_STEP_SIZE,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[T, int]:
        """Make the session hold exactly ``prompt`` and return ``head`` of its last logits, and how
        many tokens it reused.

        What the prompt shares with the tokens held keeps its K/V; the rest is forgotten and
        computed, in chunks.

        Args:
            progress: called with the prompt tokens done so far and their total, reused ones
                included.

        Raises:
            ValueError: the prompt is empty or has a token that the model does not have, or the
                chunk size is not positive.
            PromptTooLongError: the prompt leaves no room for an answer within ``max_model_len``, or
                the budget can't hold it.
        """
        prompt = read_prompt(prompt, None, self.runner.vocab_size).token_ids
        prefill_step_size = check_integer("prefill", "prefill_step_size", prefill_step_size, 1)
        check_callable("prefill", "head", head, "a function of the logits")
        if progress is not None:
            check_callable("prefill", "progress", progress, "a function of two numbers, or None")
        self.check_context(len(prompt))
        self._check_fits(len(prompt))
        # The last token is computed even when all are held: its logits are needed.
        num_cached = min(common_prefix_len(self.tokens, prompt), len(prompt) - 1)
        self.trim(num_cached)
        while True:
            if progress is not None:
                progress(len(self.tokens), len(prompt))
            chunk = prompt[len(self.tokens) : len(self.tokens) + prefill_step_size]
            if len(self.tokens) + len(chunk) < len(prompt):
                self._extend(chunk, lambda logits: logits)
                continue
            output = self._extend(chunk, head)
            if progress is not None:
                progress(len(prompt), len(prompt))
            return output, num_cached

    def decode(self, token: int, head: Callable[[mx.array], T]) -> T:
        """Append one token and return ``head`` of its logits.

        Raises:
            CacheFullError: the budget, or the context, is used up.
            ValueError: the model does not have the token.
        """
        if len(self.tokens) >= self.max_model_len:
            raise CacheFullError(
                f"[context] the session holds {len(self.tokens)} tokens, and max_model_len is {self.max_model_len}; "
                "trim it, or raise max_model_len"
            )
        return self._extend([token], head)

    def trim(self, length: int) -> None:
        """Forget all but the first ``length`` tokens; raises ``ValueError`` for a negative length."""
        length = check_integer("session", "length", length, 0)
        if length < len(self.tokens):
            self.cache.trim(self.seq, length)
            del self.tokens[length:]

    def fork(self) -> Session:
        """A second session with the same tokens, which shares their K/V until one of the two
        writes.

        Raises:
            CacheFullError: a basic cache counts the copy that the first write will make, and it
                doesn't fit.
        """
        branch = Session(self.runner, f"{self.seq}.{next(_forks)}", self.max_model_len)
        if self.tokens:
            self.cache.fork(self.seq, branch.seq)
            branch.tokens = list(self.tokens)
        return branch

    def close(self) -> None:
        """Give the session's K/V back; it is empty then and may be used again."""
        if self.seq in self.cache.seqs:
            self.cache.free(self.seq)
        self.tokens = []

    def _extend(self, new_tokens: Sequence[int], head: Callable[[mx.array], T]) -> T:
        output = self.runner.run({self.seq: new_tokens}, head)
        self.tokens.extend(new_tokens)
        return output

    def check_context(self, num_tokens: int) -> None:
        """Raise ``PromptTooLongError`` for a prompt that leaves no room for an answer within
        ``max_model_len``.
        """
        if num_tokens >= self.max_model_len:
            raise prompt_beyond_context(num_tokens, self.max_model_len)

    def _check_fits(self, num_tokens: int) -> None:
        limit = self.cache.max_seq_len(self.seq)
        if num_tokens <= limit:
            return
        block_size = self.cache.config.block_size
        sum_ = f"{-(-num_tokens // block_size)} blocks of {block_size}, the budget holds {limit // block_size}"
        raise PromptTooLongError(
            f"[{self.cache.kind} cache] a prompt of {num_tokens} tokens needs {sum_}; raise --kv-cache-bytes "
            f"(now {self.cache.config.nbytes} bytes) or shorten the prompt"
        )


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading elements ``a`` and ``b`` share."""
    length = min(len(a), len(b))
    for i in range(length):
        if a[i] != b[i]:
            return i
    return length

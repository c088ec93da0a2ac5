"""``SamplingState``: a request's state in the sampler between two tokens."""

from __future__ import annotations

import math
from array import array
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from mlx_paged.engine.grammar import GrammarState
from mlx_paged.engine.request import Completion
from mlx_paged.engine.thinking_budget import ThinkingBudget
from mlx_paged.engine.token_mask import TokenMask, needs_mask
from mlx_paged.sampling_declarations import SAMPLING_PARAMS
from mlx_paged.sampling_params import SamplingParams

# Penalties and temperatures are at most this, and top_p at least its inverse, so that all products
# are finite in float32: a scale of 0 would turn filtered tokens into NaN.
HUGE = 1e30
# Without these settings, a draw depends only on its row of logits and its position.
_CROSS_ROW_DEFAULTS = [
    (name, getattr(SamplingParams(), name))
    for name, param in SAMPLING_PARAMS.items()
    if not param.per_row
]
COLDEST = 1e-6  # the least temperature: log-probabilities over a lower one overflow float32


class Filters(NamedTuple):
    """The filters that a group of requests shares, which is sampled in one call."""

    has_top_p: bool
    has_min_p: bool
    has_xtc: bool
    top_k: int  # 0 is off


class SamplingState:
    """A request's state in the sampler between two tokens.

    Tokens are only ever appended to a request, so each is read once, and no step iterates over the
    context.

    Attributes:
        group: requests of a group are sampled in one call; ``None`` is greedy.
        filters: 1 / temperature, top_p, log(min_p).
        token_ids: the distinct tokens of the request.
        counts: how often the answer contains each of them.
        mask: the tokens that can't be sampled; ``None`` if there are none.
        grammar: the state of the answer in its grammar; ``None`` if it has none.
        thinking_budget: the state of its reasoning; ``None`` if that has no limit.
        draws_rows_together: whether a token may be sampled before the preceding ones are known.
    """

    def __init__(self, completion: Completion, vocab_size: int):
        params = completion.request.params
        self.num_logprobs = params.logprobs
        self.group: Filters | None = None
        self.filters = 0.0, 0.0, 0.0
        self._xtc_probability, self._xtc_threshold = params.xtc_probability, params.xtc_threshold
        self.xtc_special_tokens = [int(token) for token in params.xtc_special_tokens]
        if not params.is_greedy:
            top_k = int(params.top_k) if 0 < params.top_k < vocab_size else 0
            has_xtc = params.xtc_probability > 0
            self.group = Filters(params.top_p < 1, params.min_p > 0, has_xtc, top_k)
            log_min_p = math.log(params.min_p) if params.min_p > 0 else 0.0
            self.filters = (
                1 / min(max(float(params.temperature), COLDEST), HUGE),
                max(params.top_p, 1 / HUGE),
                log_min_p,
            )
        self.bias: tuple[np.ndarray, np.ndarray] | None = None  # token ids, biases
        if params.logit_bias:
            with np.errstate(over="ignore"):
                biases = np.array(list(params.logit_bias.values()), np.float64).astype(np.float32)
            self.bias = np.array(list(params.logit_bias), np.int32), biases
        self.mask = TokenMask(completion, vocab_size) if needs_mask(completion) else None
        compiled = completion.request.token_rules.grammar
        self.grammar = None if compiled is None else GrammarState(compiled)
        limit = completion.request.token_rules.reasoning
        self.thinking_budget = None if limit is None else ThinkingBudget(limit)
        self.may_leave_nothing = bool(
            params.logit_bias or params.logits_processors or self.mask is not None
        )
        self.penalties: tuple[float, float, float] | None = None
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        if penalties != (1, 0, 0):
            factor = min(max(params.repetition_penalty, 1 / HUGE), HUGE)
            frequency, presence = (min(max(penalty, -HUGE), HUGE) for penalty in penalties[1:])
            self.penalties = factor, frequency, presence
        self.is_plain = (
            params.sampler is None
            and self.group is None
            and self.penalties is None
            and self.num_logprobs is None
            and self.grammar is None
            and self.thinking_budget is None
            and not self.may_leave_nothing
        )
        self.draws_rows_together = all(
            getattr(params, name) == default for name, default in _CROSS_ROW_DEFAULTS
        )
        # Only the seed has a variable width, so the bytes of all triples are distinct.
        seed, index = int(completion.request.seed), completion.index
        seed_bytes = seed.to_bytes(seed.bit_length() // 8 + 1, "little", signed=True)
        self.key = blake2b(seed_bytes + index.to_bytes(8, "little"), digest_size=8)
        # Only the repetition penalty depends on the prompt.
        self.num_read = 0 if params.repetition_penalty != 1 else completion.num_prompt_tokens
        self.token_ids = array("i")
        self.counts = array("i")
        self.index_of: dict[int, int] = {}

    def read_new_tokens(self, completion: Completion) -> None:
        for position in range(self.num_read, completion.num_tokens):
            token = completion.token_ids[position]
            index = self.index_of.setdefault(token, len(self.token_ids))
            if index == len(self.token_ids):
                self.token_ids.append(token)
                self.counts.append(0)
            self.counts[index] += position >= completion.num_prompt_tokens
        self.num_read = completion.num_tokens

    def xtc_threshold(self, position: int) -> float:
        """The threshold of XTC at a position of the answer; infinite if the random decision there
        is not to apply it.
        """
        # mlx-lm decides on the device. These bits are as random, and need no operation there.
        key = self.key.copy()
        key.update(position.to_bytes(8, "little") + b"xtc")
        coin = int.from_bytes(key.digest(), "little") / 2**64
        return float(self._xtc_threshold) if coin < self._xtc_probability else math.inf

    def draw_key(self, position: int) -> bytes:
        """8 bytes that depend only on the request's seed, its index and the position in its
        answer.
        """
        key = self.key.copy()
        key.update(position.to_bytes(8, "little"))
        return key.digest()

"""``SamplingState``: what the sampler keeps of a request between two tokens."""

from __future__ import annotations

import math
from array import array
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from mlx_paged.engine.grammar import GrammarState
from mlx_paged.engine.thinking_budget import ThinkingBudget
from mlx_paged.engine.token_mask import TokenMask, needs_mask
from mlx_paged.request import ModuleState, Request
from mlx_paged.sampling_declarations import SAMPLING_PARAMS
from mlx_paged.sampling_params import SamplingParams

# The limit of penalties and temperatures, and its inverse that of top_p, so that no product leaves
# float32: a scale of 0 would turn tokens that a filter removed into NaN.
HUGE = 1e30
# Without these settings, a row's draw depends on nothing but its logits and its position.
_CROSS_ROW_DEFAULTS = [
    (name, getattr(SamplingParams(), name))
    for name, param in SAMPLING_PARAMS.items()
    if not param.per_row
]
COLDEST = 1e-6  # temperatures end here: a log-probability over a lower one leaves float32


class Filters(NamedTuple):
    """What the filters of a group of requests have in common: those that are drawn in one call."""

    has_top_p: bool
    has_min_p: bool
    has_xtc: bool
    top_k: int  # 0 is off


class SamplingState(ModuleState):
    """What the sampler keeps of a request between two tokens.

    Its different tokens stand in ``token_ids`` once each, with how often the answer has them. A
    request's tokens only grow, so each is read once, and no step goes through the context.

    Attributes:
        group: the requests of a group are drawn in one call; None is greedy.
        filters: 1 / temperature, top_p, log(min_p).
        mask: the tokens that can't be drawn, if there are such.
        grammar: where the answer is in its grammar, if it has one.
        thinking_budget: where it is in its reasoning, if that has a limit.
        draws_rows_together: whether a token may be drawn before those in front of it are known.
    """

    def __init__(self, request: Request, vocab_size: int):
        params = request.params
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
        self.mask = TokenMask(request, vocab_size) if needs_mask(request) else None
        compiled = request.token_rules.grammar
        self.grammar = None if compiled is None else GrammarState(compiled)
        limit = request.token_rules.reasoning
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
        # Only the seed has a variable width, so no two triples have the same bytes.
        seed, index = int(request.seed), request.index
        seed_bytes = seed.to_bytes(seed.bit_length() // 8 + 1, "little", signed=True)
        self.key = blake2b(seed_bytes + index.to_bytes(8, "little"), digest_size=8)
        # Only the repetition penalty looks at the prompt.
        self.num_read = 0 if params.repetition_penalty != 1 else request.num_prompt_tokens
        self.token_ids = array("i")
        self.counts = array("i")
        self.index_of: dict[int, int] = {}

    def read_new_tokens(self, request: Request) -> None:
        for position in range(self.num_read, request.num_tokens):
            token = request.token_ids[position]
            index = self.index_of.setdefault(token, len(self.token_ids))
            if index == len(self.token_ids):
                self.token_ids.append(token)
                self.counts.append(0)
            self.counts[index] += position >= request.num_prompt_tokens
        self.num_read = request.num_tokens

    def xtc_threshold(self, position: int) -> float:
        """The threshold of XTC for the token at a position of the answer, infinite where the coin
        of that position leaves XTC out.
        """
        # mlx-lm flips this coin on the device; its bits are as good, and cost no operation.
        key = self.key.copy()
        key.update(position.to_bytes(8, "little") + b"xtc")
        coin = int.from_bytes(key.digest(), "little") / 2**64
        return float(self._xtc_threshold) if coin < self._xtc_probability else math.inf

    def draw_key(self, position: int) -> bytes:
        """8 bytes that depend on the request's seed, its index and the position in its answer, and
        on nothing else.
        """
        key = self.key.copy()
        key.update(position.to_bytes(8, "little"))
        return key.digest()

"""``DraftModel``: drafts by a small model with the same vocabulary; and how an engine speculates,
by the cost of its steps on this device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters

from mlx_paged.cache import KVCache
from mlx_paged.core import KVCacheManager
from mlx_paged.engine.request import PENDING_TOKEN, Completion
from mlx_paged.engine.sampling.sampler import draw_drafts
from mlx_paged.engine.scheduling.batch import Batch, Scheduled
from mlx_paged.engine.speculation.speculation import (
    ACCEPTANCE_RATE,
    NO_COST,
    NO_SPECULATION,
    PROMPT_LOOKUP,
    WAITING_SHARE,
    Drafter,
    Speculation,
    StepCost,
)
from mlx_paged.errors import ArgumentError
from mlx_paged.models.kv_cache import OPERATIONS_PER_BYTE
from mlx_paged.models.language_model import LanguageModel, model_type_of
from mlx_paged.models.mlx_lm import check_model
from mlx_paged.models.mlx_lm.draft_head import Head
from mlx_paged.ops import AttentionMetadata, device
from mlx_paged.options.argument_values import kind_of

# The acceptance is unknown before the first drafts, and a user of a draft model expects it to be
# high. The estimate returns to this value over time, so that a request whose drafts did not pay off
# tries again later.
FIRST_MODEL_ACCEPTANCE = 0.8
FORGETTING_RATE = 1 / 256
# The most tokens that lack K/V of the model when it makes drafts. They are computed in the first
# pass, which delays the step.
MAX_MISSING_TOKENS = 512
# Overhead of a layer's operations on a CPU, per step and per row, in weights that are multiplied in
# the same time. Measured on 2 x86 cores with the BLAS of MLX's wheel, which multiplies a weight
# once for each row: the benchmark `speculation` has the fit.
CPU_WEIGHTS_PER_LAYER = 3e6
CPU_WEIGHTS_PER_LAYER_AND_ROW = 0.9e6


class DraftModel(Drafter):
    """Makes drafts by a model whose K/V are in the same blocks as the target's, in more layers of
    the same cache (speculative decoding, Leviathan et al. 2023).

    So prefix hits, forks, copies, swapping and trimming apply to both. The model computes prompts
    together with the target. It computes answers only when it makes drafts: up to
    ``MAX_MISSING_TOKENS`` tokens in the first pass, then one token per pass. Blocks from the prefix
    cache are assumed to contain its K/V; if they don't, drafts are worse, and the output is the
    same.

    Each draft is sampled with the same key and settings as the target's token will be, so that both
    tend to choose the same token if their distributions are similar.

    Args:
        model: with the same vocabulary as the target.
        cache: includes the layers of ``model``, after those of the target.
        manager: of the block tables of the cache's sequences.
    """

    def __init__(self, model: LanguageModel, cache: KVCache, manager: KVCacheManager):
        self.model = model
        self.cache = cache
        self._manager = manager
        self._layers = slice(len(cache.layers) - len(model.layer_specs), None)

    # As a drafter

    def acceptance(self, completion: Completion) -> float:
        state = self._state_of(completion, completion.num_computed_tokens)
        state.forget(completion.num_tokens)
        num_missing = completion.num_tokens - min(state.num_computed, completion.num_tokens)
        return state.acceptance if num_missing <= MAX_MISSING_TOKENS else 0.0

    def propose(self, completion: Completion, num_drafts: int) -> list[int]:
        """Placeholders for drafts, which :meth:`run` makes when the step is launched."""
        return [PENDING_TOKEN] * num_drafts

    def drafts_of(self, part: Scheduled) -> list[int]:
        state = self._state_of(part.completion, part.start)
        return [cast(list[int], tokens.tolist())[entry] for tokens, entry in state.drafts]

    def note(self, completion: Completion, num_drafts: int, num_accepted: int) -> None:
        state = self._state_of(completion, completion.num_computed_tokens)
        state.num_computed = min(state.num_computed, completion.num_computed_tokens)
        state.num_seen = completion.num_tokens
        for _ in range(num_accepted):
            state.acceptance += (1 - state.acceptance) * ACCEPTANCE_RATE
        # Drafts after the end of an answer were not verified.
        if num_accepted < num_drafts and not completion.is_finished:
            state.acceptance -= state.acceptance * ACCEPTANCE_RATE

    # In a step

    def run(self, batch: Batch) -> None:
        """Launch the computation of the prompts and drafts of a step, without waiting for them."""
        runs, drafted = [], []
        for part in batch.scheduled:
            state = self._state_of(part.completion, part.start)
            # K/V after it were lost to a preemption or a rollback.
            begin = state.num_computed = min(state.num_computed, part.start)
            num_drafts = len(part.draft_token_ids)
            end = part.start + part.num_new_tokens - num_drafts
            state.drafts = []
            if num_drafts:
                drafted.append((part.completion, state, num_drafts))
            if num_drafts or (end - begin > 1 and begin == part.start):
                runs.append(DraftRun(part.completion, begin, end, int(num_drafts > 0)))
        if runs:
            made = self._compute(runs, known_tokens(runs), None, batch.shares_new_blocks)
            self._draw(drafted, *made)

    def _draw(
        self,
        drafted: Sequence[tuple[Completion, DraftState, int]],
        logits: mx.array,
        rows: mx.array | None,
    ) -> None:
        """Draw the drafts of requests, each with its number of drafts, one pass after the other.

        Args:
            logits, rows: what :meth:`_compute` has made of the tokens before them.
        """
        number = 0
        while drafted:
            tokens = draw_drafts(logits, [completion for completion, _, _ in drafted], number)
            mx.async_eval(tokens)
            number += 1
            for entry, (_, state, _) in enumerate(drafted):
                state.drafts.append((tokens, entry))
            entries = [entry for entry, (_, _, most) in enumerate(drafted) if most > number]
            if not entries:
                return
            if len(entries) < len(drafted):
                chosen = mx.array(entries)
                tokens, rows = tokens[chosen], None if rows is None else rows[chosen]
            drafted = [drafted[entry] for entry in entries]
            ends = [(completion, completion.num_tokens + number) for completion, _, _ in drafted]
            runs = [DraftRun(completion, end - 1, end, 1) for completion, end in ends]
            logits, rows = self._compute(runs, tokens, rows)

    def put_drafts(self, batch: Batch, tokens: mx.array) -> mx.array:
        """``[num_tokens]``, the tokens of a step with the drafts in place of the placeholders."""
        places: list[int] = []
        drafts: list[mx.array] = []
        end = 0
        for part in batch.scheduled:
            end += part.num_new_tokens
            made = self._state_of(part.completion, part.start).drafts
            places += range(end - len(made), end)
            drafts += [array[entry : entry + 1] for array, entry in made]
        if places:
            tokens[mx.array(places)] = mx.concatenate(drafts)
        return tokens

    def _compute(
        self,
        runs: Sequence[DraftRun],
        tokens: mx.array,
        rows: mx.array | None,
        shares_new_blocks: bool = False,
    ) -> tuple[mx.array, mx.array | None]:
        """Launch a pass over the tokens of runs, ``[num_tokens]``.

        Args:
            rows: hidden rows, which only a head reads.

        Returns:
            Logits ``[num_drafted, vocab_size]`` of the runs that request them, and a head's rows.
        """
        for run in runs:
            self._state_of(run.completion, run.begin).num_computed = run.end
        with self._open_pass(runs, shares_new_blocks) as step:
            layers = self.cache.layers[self._layers]
            logits = self.model(tokens, layers, step.logit_rows)
            self._launch(logits)
        return logits, None

    def _open_pass(
        self, runs: Sequence[DraftRun], shares_new_blocks: bool, reads_only: bool = False
    ) -> AbstractContextManager[AttentionMetadata]:
        groups = self._manager.groups
        return self.cache.open_step(
            [groups[run.completion.seq_id] for run in runs],
            [run.end - run.begin for run in runs],
            [run.num_logit_rows for run in runs],
            shares_new_blocks,
            layers=self._layers,
            context_lens=[run.end for run in runs],
            reads_only=reads_only,
        )

    def _launch(self, *results: mx.array) -> None:
        if self.cache.can_run_ahead:
            mx.async_eval(results, self.cache.arrays)
        else:
            # Slabs that are still being read would be copied by each write of the next pass.
            mx.eval(results, self.cache.arrays)

    def _state_of(self, completion: Completion, num_computed: int) -> DraftState:
        state = completion.draft_state
        if not isinstance(state, DraftState):
            state = DraftState(num_computed=num_computed, num_seen=completion.num_tokens)
            completion.draft_state = state
        return state


class DraftRun(NamedTuple):
    """The tokens ``begin : end`` of a request in a pass."""

    completion: Completion
    begin: int
    end: int
    num_logit_rows: int


def known_tokens(runs: Sequence[DraftRun]) -> mx.array:
    """``[num_tokens] int32``, the tokens of runs, all of which are known."""
    token_ids = [run.completion.token_ids[run.begin : run.end] for run in runs]
    return mx.array(list(itertools.chain.from_iterable(token_ids)), dtype=mx.int32)


@dataclass(slots=True)
class DraftState:
    """The state of a request's drafts.

    Attributes:
        num_computed: tokens with K/V of the draft model, or from the prefix cache.
        num_seen: tokens of the request when its acceptance was last updated.
        drafts: of the newest step: an array of tokens and an index into it for each.
    """

    num_computed: int
    num_seen: int
    acceptance: float = FIRST_MODEL_ACCEPTANCE
    drafts: list[tuple[mx.array, int]] = field(default_factory=list)

    def forget(self, num_tokens: int) -> None:
        for _ in range(min(num_tokens - self.num_seen, 1000)):
            self.acceptance += (FIRST_MODEL_ACCEPTANCE - self.acceptance) * FORGETTING_RATE
        self.num_seen = num_tokens


def speculation_of(
    num_draft_tokens: int, model: LanguageModel, drafter: DraftModel | None, run_ahead: bool
) -> Speculation:
    """How an engine speculates.

    Args:
        drafter: a draft model; ``None`` for prompt look-up.

    Raises:
        ArgumentError: there is a draft model, and ``num_draft_tokens`` is 0.
    """
    if num_draft_tokens == 0:
        if drafter is not None:
            raise ArgumentError(
                "[engine] num_draft_tokens must be at least 1 with a draft model, got 0; leave "
                "draft_model out for none",
                "num_draft_tokens",
            )
        return NO_SPECULATION
    return Speculation(
        drafter or PROMPT_LOOKUP,
        int(num_draft_tokens),
        cost_of(model),
        NO_COST if drafter is None else cost_of(drafter.model),
        WAITING_SHARE if run_ahead else 0.0,
        repeats_runs=model.state_nbytes > 0,
    )


def check_draft_model(draft_model: object, model: LanguageModel, kv: str) -> LanguageModel | None:
    """Check that ``draft_model``, if there is one, can make drafts for ``model``.

    Raises:
        ArgumentError: it is not a model, its vocabulary differs, it has recurrent layers, or the
            cache is not a paged one.
    """
    if draft_model is None:
        return None
    if not isinstance(draft_model, Module):
        raise ArgumentError(
            f"[engine] draft_model must be one that mlx_paged.load or mlx_lm.load returns, got "
            f"{kind_of(draft_model)}",
            "draft_model",
        )
    draft_model, problem = check_model(draft_model), None
    if draft_model.args.vocab_size != model.args.vocab_size:
        problem = (
            f"has a vocabulary of {draft_model.args.vocab_size} tokens, the model one of "
            f"{model.args.vocab_size}; they must be the same"
        )
    elif draft_model.state_nbytes:
        problem = (
            f"can't be a {model_type_of(draft_model)}: its recurrent state can't be rolled back "
            "when drafts are rejected; use a model of attention layers only, or leave draft_model "
            "out: then drafts are looked up in a request's own tokens"
        )
    elif isinstance(draft_model, Head) and not draft_model.is_of(model):
        problem = "is a head of another model; load it for this one"
    elif isinstance(draft_model, Head) and not model.gives_hidden_rows:
        problem = (
            f"can't be a head of this {model_type_of(model)}, {model.description}: it gives no "
            "hidden rows; leave draft_model out"
        )
    elif kv == "basic":
        problem = (
            "needs kv='paged'; with kv='basic' drafts are looked up in a request's own tokens: "
            "leave draft_model out"
        )
    if problem is not None:
        raise ArgumentError(f"[engine] draft_model {problem}", "draft_model")
    return draft_model


def cost_of(model: LanguageModel) -> StepCost:
    """The cost of a step of a model on the default device."""
    num_parameters = num_parameters_of(model)
    if isinstance(model, Head):
        num_parameters += model.num_output_parameters
    if device.is_cpu():
        # Weights are multiplied once per row, in addition to the overhead of the operations.
        per_row = num_parameters + CPU_WEIGHTS_PER_LAYER_AND_ROW * model.num_layers
        return StepCost(CPU_WEIGHTS_PER_LAYER * model.num_layers, per_row)
    nbytes = sum(array.nbytes for array in dict(tree_flatten(model.parameters())).values())
    return cost_on_gpu(num_parameters, nbytes)


def cost_on_gpu(num_parameters: int, nbytes: int) -> StepCost:
    """The cost of a step that reads weights of ``nbytes`` once and multiplies them once per row. An
    estimate, not measured on a Mac.
    """
    return StepCost(nbytes * OPERATIONS_PER_BYTE / 2, num_parameters)


def num_parameters_of(model: Module) -> int:
    """The number of a model's parameters, counting packed ones individually."""
    return int(get_total_parameters(model))

"""``DraftModel``: drafts by a small model with the same vocabulary; and how an engine speculates,
by the cost of its steps on this device.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_paged.cache import KVCache
from mlx_paged.core import KVCacheManager
from mlx_paged.engine.request import PENDING_TOKEN, Completion
from mlx_paged.engine.sampling.sampler import draw_drafts
from mlx_paged.engine.scheduling.batch import Batch, Scheduled
from mlx_paged.engine.speculation.draft_record import DraftRecord
from mlx_paged.engine.speculation.speculation import (
    NO_COST,
    NO_SPECULATION,
    PROMPT_LOOKUP,
    WAITING_SHARE,
    Drafter,
    Speculation,
)
from mlx_paged.engine.speculation.step_costs import CPU_MIN_GAIN, cost_of
from mlx_paged.errors import ArgumentError
from mlx_paged.models.language_model import LanguageModel, model_type_of
from mlx_paged.models.mlx_lm import check_model
from mlx_paged.models.mlx_lm.draft_head import Head
from mlx_paged.ops import AttentionMetadata, StateRow, StepState, device
from mlx_paged.options.argument_values import kind_of

# The most tokens that lack K/V of the model when it makes drafts. They are computed in the first
# pass, which delays the step.
MAX_MISSING_TOKENS = 512


class DraftModel(Drafter):
    """Makes drafts by a model whose K/V are in the same blocks as the target's, in more layers of
    the same cache (speculative decoding, Leviathan et al. 2023).

    So prefix hits, forks, copies, swapping and trimming apply to both. The model computes prompts
    together with the target. It computes answers only when it makes drafts: up to
    ``MAX_MISSING_TOKENS`` tokens in the first pass, then one token per pass. Blocks from the prefix
    cache are assumed to contain its K/V; if they don't, drafts are worse, and the output is the
    same.

    A recurrent model drafts for another one. Its states are immutable, so those of drafts are
    dropped, and each round continues after known tokens. Beside each checkpoint of the target is
    its own state there, if it has computed the tokens; elsewhere it begins with an empty one.

    Each draft is sampled with the same key and settings as the target's token will be, so that both
    tend to choose the same token if their distributions are similar.

    Args:
        model: with the same vocabulary as the target.
        cache: includes the layers of ``model``, after those of the target.
        manager: of the block tables of the cache's sequences.

    Attributes:
        takes_normed: whether :meth:`follow` takes hidden rows after the target's last norm;
            ``None`` if it takes none.
    """

    takes_normed: bool | None = None

    def __init__(self, model: LanguageModel, cache: KVCache, manager: KVCacheManager):
        self.model = model
        self._is_recurrent = model.state_nbytes > 0
        self.cache = cache
        self._manager = manager
        self._layers = slice(len(cache.layers) - len(model.layer_specs), None)

    # As a drafter

    # A user of a draft model expects most drafts to be accepted.
    first_acceptance = 0.8

    def acceptances(self, completion: Completion, record: DraftRecord) -> Sequence[float]:
        record.forget_old(completion.num_tokens)
        state = self._state_of(completion, completion.num_computed_tokens)
        num_missing = completion.num_tokens - min(state.num_computed, completion.num_tokens)
        return record.acceptances if num_missing <= MAX_MISSING_TOKENS else ()

    def propose(self, completion: Completion, num_drafts: int) -> list[int]:
        """Placeholders for drafts, which :meth:`run` makes when the step is launched."""
        return [PENDING_TOKEN] * num_drafts

    def drafts_of(self, part: Scheduled) -> Sequence[int]:
        made = self._state_of(part.completion, part.start).read_drafts()
        return made or part.draft_token_ids

    def note(self, completion: Completion, num_drafts: int, num_accepted: int) -> None:
        state = self._state_of(completion, completion.num_computed_tokens)
        state.num_computed = min(state.num_computed, completion.num_computed_tokens)
        # Others were known without the model.
        if state.drafts and completion.draft_record is not None:
            completion.draft_record.observe_drafts(num_drafts, num_accepted)
        super().note(completion, num_drafts, num_accepted)

    # In a step

    def run(self, batch: Batch, states: Sequence[StepState] | None) -> None:
        """Launch the computation of the prompts and drafts of a step, without waiting for them.

        Args:
            states: of the target's recurrent layers.
        """
        runs, drafted = [], []
        for number, part in enumerate(batch.scheduled):
            state = self._state_of(part.completion, part.start)
            # K/V after it were lost to a preemption or a rollback.
            state.num_computed = min(state.num_computed, part.start)
            cuts: list[int] = []
            if self._is_recurrent and states is not None:
                state.fall_back(part.start, states[number].before)
                first = part.start - state.num_computed
                cuts = [first + cut for cut in states[number].cuts]
            begin = state.num_computed
            end = part.start + part.num_new_tokens - len(part.draft_token_ids)
            num_drafts = part.draft_token_ids.count(PENDING_TOKEN)
            state.drafts = []
            if num_drafts:
                drafted.append((part.completion, state, num_drafts))
            if num_drafts or (end - begin > 1 and begin == part.start):
                runs.append(DraftRun(part.completion, begin, end, int(num_drafts > 0), cuts))
        if runs:
            made = self._compute(runs, known_tokens(runs), None, batch.shares_new_blocks)
            if self._is_recurrent:
                kept = [
                    self._state_of(run.completion, run.begin).keep_state(run.end) for run in runs
                ]
                mx.async_eval([row.stack.leaves for row in kept])
            self._draw(drafted, *made)

    def follow(
        self,
        batch: Batch,
        tokens: mx.array,
        hidden: mx.array | None,
        states: Sequence[StepState] | None,
    ) -> None:
        """Called when the model's part of a step is launched.

        Args:
            tokens: ``[num_tokens]``, of the step.
            hidden: ``[num_tokens, hidden_size]``, for a head.
            states: of the target's recurrent layers. Checkpoints get those of the draft model.
        """
        if not self._is_recurrent or states is None:
            return
        for part, made in zip(batch.scheduled, states, strict=True):
            state = self._state_of(part.completion, part.start)
            for cut, row in zip(made.cuts, made.at_cuts, strict=True):
                row.of_draft_model = state.at_cuts.get(part.start + cut)
            state.at_cuts = {}

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
            completions, states, _ = zip(*drafted, strict=True)
            readers = [state.read_drafts for state in states]
            tokens = draw_drafts(logits, completions, number, readers)
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
        states = [self._state_of(run.completion, run.begin) for run in runs]
        made = None
        if self._is_recurrent:
            pairs = zip(states, runs, strict=True)
            made = [StepState(state.newest, run.cuts) for state, run in pairs]
        with self._open_pass(runs, shares_new_blocks, made) as step:
            layers = self.cache.layers[self._layers]
            logits = self.model(tokens, layers, step.logit_rows)
            self._launch(logits)
        for number, (state, run) in enumerate(zip(states, runs, strict=True)):
            state.num_computed = run.end
            if made is not None:
                state.newest = made[number].after
                places = [run.begin + cut for cut in run.cuts]
                state.at_cuts.update(zip(places, made[number].at_cuts, strict=True))
        return logits, None

    def _open_pass(
        self,
        runs: Sequence[DraftRun],
        shares_new_blocks: bool,
        states: list[StepState] | None = None,
        reads_only: bool = False,
    ) -> AbstractContextManager[AttentionMetadata]:
        groups = self._manager.groups
        return self.cache.open_step(
            [groups[run.completion.seq_id] for run in runs],
            [run.end - run.begin for run in runs],
            [run.num_logit_rows for run in runs],
            shares_new_blocks,
            layers=self._layers,
            context_lens=[run.end for run in runs],
            states=states,
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
            state = DraftState(num_computed)
            first = completion.request.completions[0].draft_state
            if isinstance(first, DraftState):  # It was forked from the first completion.
                state.states = list(first.states)
            completion.draft_state = state
        return state


class DraftRun(NamedTuple):
    """The tokens ``begin : end`` of a request in a pass."""

    completion: Completion
    begin: int
    end: int
    num_logit_rows: int
    cuts: Sequence[int] = ()  # after how many of them a recurrent model leaves a state


def known_tokens(runs: Sequence[DraftRun]) -> mx.array:
    """``[num_tokens] int32``, the tokens of runs, all of which are known."""
    token_ids = [run.completion.token_ids[run.begin : run.end] for run in runs]
    return mx.array(list(itertools.chain.from_iterable(token_ids)), dtype=mx.int32)


@dataclass(slots=True)
class DraftState:
    """The state of a request's drafts.

    Attributes:
        num_computed: tokens with K/V of the draft model, or from the prefix cache.
        drafts: of the newest step: an array of tokens and an index into it for each.
        states: of a recurrent model, each with the number of its tokens: before and after its
            newest run of known tokens. The target may fall back to the first.
        newest: its state after the newest pass, which may include drafts.
        at_cuts: its states at the checkpoints of the step, by the number of their tokens.
    """

    num_computed: int
    drafts: list[tuple[mx.array, int]] = field(default_factory=list)
    states: list[tuple[int, StateRow | None]] = field(default_factory=list)
    newest: StateRow | None = None
    at_cuts: dict[int, StateRow] = field(default_factory=dict)

    def fall_back(self, start: int, before: StateRow | None) -> None:
        """Go back to the newest state before a step of the target.

        Args:
            start: the first token that the step computes.
            before: the target's state there.
        """
        self.states = [each for each in self.states if each[0] <= start]
        if not self.states:  # Of another request, or lost.
            self.states = [(start, None if before is None else before.of_draft_model)]
        self.num_computed, self.newest = self.states[-1]
        self.at_cuts = {}

    def keep_state(self, num_tokens: int) -> StateRow:
        """Keep the state after a run of known tokens, in a stack of its own."""
        assert self.newest is not None
        row = self.newest.alone()
        self.states = [self.states[-1], (num_tokens, row)]
        return row

    def read_drafts(self) -> list[int]:
        """The drafts of the newest step, once they are computed."""
        return [cast(list[int], tokens.tolist())[entry] for tokens, entry in self.drafts]


def speculation_of(
    num_draft_tokens: int,
    model: LanguageModel,
    drafter: DraftModel | None,
    run_ahead: bool,
    reads_grammars: bool,
    by_rows: Collection[int] = (),
) -> Speculation:
    """How an engine speculates.

    Args:
        drafter: a draft model; ``None`` for prompt look-up.
        reads_grammars: of :class:`Speculation`.
        by_rows: of :func:`row_costs`.

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
        cost_of(model, by_rows=by_rows),
        NO_COST if drafter is None else cost_of(drafter.model, by_rows=by_rows),
        WAITING_SHARE if run_ahead else 0.0,
        CPU_MIN_GAIN if device.is_cpu() else 1.0,
        repeats_runs=model.state_nbytes > 0,
        reads_grammars=reads_grammars,
    )


def check_draft_model(draft_model: object, model: LanguageModel, kv: str) -> LanguageModel | None:
    """Check that ``draft_model``, if there is one, can make drafts for ``model``.

    Raises:
        ArgumentError: it is not a model, its vocabulary differs, only it has recurrent layers, or
            the cache is not a paged one.
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
    elif draft_model.state_nbytes and not model.state_nbytes:
        problem = (
            f"can't be a {model_type_of(draft_model)}, which is recurrent, for a "
            f"{model_type_of(model)}, which is not: its states are kept beside those of the "
            "model; use a model of attention layers only, or leave draft_model out: then drafts "
            "are looked up in a request's own tokens"
        )
    elif isinstance(draft_model, Head) and not draft_model.is_of(model):
        problem = "is a head of another model; load it for this one"
    elif isinstance(draft_model, Head) and not model.hidden_row_size:
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

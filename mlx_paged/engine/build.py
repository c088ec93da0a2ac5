"""Builds an engine from its parts, each of which is made from those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache as once

from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.block_store import Fingerprint
from mlx_paged.cache import ContiguousKVCache, KVCache, PagedKVCache
from mlx_paged.core import KVCacheManager, SequenceStates
from mlx_paged.core.tier import GuardedTier, Tier
from mlx_paged.distributed import Ranks, join_ranks, smallest_budget
from mlx_paged.engine.input_processor import as_tokenizer
from mlx_paged.engine.model_runner import ModelRunner
from mlx_paged.engine.options import (
    DiskTierOptions,
    OwnOptions,
    checked_options,
    split_options,
    tier_of,
)
from mlx_paged.engine.reports import Latencies, Reports
from mlx_paged.engine.scheduling.prefix_cache import SwapSpace
from mlx_paged.engine.scheduling.request_queues import num_seqs
from mlx_paged.engine.scheduling.scheduler import Scheduler
from mlx_paged.engine.speculation.draft_model import (
    DraftModel,
    check_draft_model,
    speculation_of,
)
from mlx_paged.engine.speculation.head_drafter import AssistantDrafter, HeadDrafter
from mlx_paged.engine.speculation.speculation import StepCost
from mlx_paged.engine.speculation.step_costs import num_parameters_of
from mlx_paged.engine.steps import Steps
from mlx_paged.engine.storing.snapshots import Snapshots
from mlx_paged.engine.storing.tier_cache import TierCache
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.models.activations import activation_nbytes, default_activation_nbytes
from mlx_paged.models.adapters import Adapters
from mlx_paged.models.context_length import context_length, context_limit
from mlx_paged.models.deterministic import deterministic_matmul
from mlx_paged.models.identity import (
    ModelIdentity,
    WeightCatalogue,
    fingerprint_of,
    model_identity,
    take_files,
)
from mlx_paged.models.kv_cache import (
    kv_budget,
    make_engine_cache,
    make_states,
    num_state_copies,
    num_swap_blocks,
    warn_unless_it_fits,
    weight_nbytes,
)
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.matmul import Linears, Matmul
from mlx_paged.models.matmul_choice import as_entries, chosen_rows, from_entries
from mlx_paged.models.mlx_lm import check_model
from mlx_paged.models.mlx_lm.draft_head import Head
from mlx_paged.ops import device
from mlx_paged.options.config import DEFAULT_KV, DEFAULT_MATMUL, MAX_RUN_TOKENS, SchedulerConfig
from mlx_paged.options.engine_options import EngineOptions


@dataclass(frozen=True, eq=False, repr=False)
class EngineParts:
    """The parts of an engine, in the order in which they are made."""

    tokenizer: TokenizerWrapper | None
    max_model_len: int | None
    ranks: Ranks
    cache: KVCache
    manager: KVCacheManager
    disk_tier: TierCache | None
    swap_space: SwapSpace
    runner: ModelRunner
    scheduler: Scheduler
    snapshots: Snapshots
    latencies: Latencies
    reports: Reports
    steps: Steps
    adapters: Adapters
    run_ahead: bool
    nbytes_activations: int  # peak of a step, an estimate


def build(
    model: Module,
    tokenizer: TokenizerWrapper | None,
    draft_model: Module | None,
    options: EngineOptions,
    own: OwnOptions,
) -> EngineParts:
    """Make the parts of an engine.

    Args:
        options: without those that may differ between ranks.
        own: these.

    Raises:
        ArgumentError: options are out of their ranges, or conflict.
        RanksError: the ranks don't match.
    """
    kv, window = options.get("kv", DEFAULT_KV), options.get("window")
    checked = check_model(model)
    max_model_len = context_limit(checked.args, options.get("max_model_len"), window)
    draft = check_draft_model(draft_model, checked, kv)
    with_kv = [each for each in (checked, draft) if each is not None and each.layer_specs]
    models = [(each, take_files(each)) for each in with_kv]
    # What K/V belong to is the model alone, and what runs is the one that has the adapters.
    adapters = Adapters(checked, own.adapters or {}, own.max_adapters, own.max_adapter_rank)
    model = checked = adapters.model
    all_models = [each for each in (checked, draft) if each is not None]
    cache_options, config = split_options(options, max_model_len, draft is not None)
    make_tier = tier_of(options, config, checked)
    tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)

    compared = {**options, "draft_model": draft, "max_model_len": max_model_len}
    ranks = join_ranks(checked, tokenizer, {"swap_bytes": None, **compared})
    if ranks.size > 1:
        given = cache_options.get("kv_cache_bytes")
        cache_options["kv_cache_bytes"] = smallest_budget(ranks, given, checked)
    matmul = _matmul_of(all_models, options.get("matmul", DEFAULT_MATMUL), config, ranks)

    budget = kv_budget(cache_options.get("kv_cache_bytes"), model, draft_model)
    # Whether the cache can run ahead is not known yet.
    num_copies = num_state_copies(checked, config, own.run_ahead is not False)
    cache = make_engine_cache(model, kv, draft_model, cache_options, num_copies)
    deterministic = config.deterministic
    if deterministic:
        _let_tokens_attend_alone(cache)
    states = None
    if num_copies:
        states = make_states(checked, cache, config, budget, num_copies, draft)
    whole_run = config.max_num_batched_tokens if deterministic else 1
    manager = KVCacheManager(cache.pool, cache.config.retentions, states, whole_run)
    run_ahead = cache.can_run_ahead if own.run_ahead is None else own.run_ahead

    # Reads all weights, so at most once, and only if it is needed.
    catalogue = None
    if isinstance(make_tier, DiskTierOptions):
        catalogue = WeightCatalogue(make_tier.folder)
    identities: Callable[[], Sequence[ModelIdentity]] = once(
        lambda: [model_identity(each, catalogue, files) for each, files in models]
    )
    num_parameters = num_parameters_of(model)
    disk_tier = None
    if make_tier is not None:
        disk_tier = _open_tier(
            make_tier, cache, identities, num_parameters, states, matmul.computed_by
        )
    swap_space = SwapSpace(
        num_swap_blocks(options.get("swap_bytes"), cache, num_parameters),
        -(-cache.config.state_nbytes // cache.config.nbytes_per_block),
    )

    drafter: DraftModel | None = None
    if isinstance(draft, Head):
        assert isinstance(cache, PagedKVCache), "checked with the draft model"
        kind = HeadDrafter if draft.layer_specs else AssistantDrafter
        drafter = kind(draft, cache, manager)
    elif draft is not None:
        drafter = DraftModel(draft, cache, manager)
    runner = ModelRunner(model, cache, manager, swap_space, drafter, matmul, deterministic)
    reads_grammars, by_rows = ranks.size == 1, matmul.usual_rows
    speculation = speculation_of(
        config.num_draft_tokens, checked, drafter, run_ahead, reads_grammars, by_rows
    )
    if ranks.size > 1:
        # Their chips may differ, their plans must not.
        rows, costs = ranks.all_gather([speculation.step.rows, speculation.step.costs])[0]
        speculation = replace(speculation, step=StepCost(tuple(rows), tuple(costs)))
        backend = type(cache.backend).__name__
        ranks.compare({"the kind of backend": backend, "run_ahead": str(run_ahead)})
        gather = ranks.all_gather
        cache.all_can = lambda can: all(gather(can))
        # The first replay of a trace is compared with a decode built in Python. If that fails on
        # one rank only, its sums would differ slightly from those of the others.
        runner.compiled_decode = None

    eos_token_ids: Iterable[int] = () if tokenizer is None else tokenizer.eos_token_ids
    scheduler = Scheduler(
        manager,
        cache,
        config,
        frozenset(eos_token_ids),
        swap_space,
        speculation,
        disk_tier,
        None if window is not None else context_length(checked.args),
        cache if isinstance(cache, ContiguousKVCache) else None,
    )
    if cache.shared_budget is not None:
        cache.shared_budget.count_seqs = lambda: num_seqs(scheduler.running)
    is_default = options.get("kv_cache_bytes") is None
    activations = default_activation_nbytes(checked) if is_default else None
    weights = weight_nbytes(model, draft_model)
    warn_unless_it_fits(weights, cache, manager, max_model_len, activations)

    latencies = Latencies(max_model_len)
    reports = Reports(latencies)
    budgets = own.make_budgets(scheduler.limits)
    steps = Steps(runner, scheduler, reports, latencies, run_ahead, budgets, ranks, disk_tier)
    finds_prefixes = config.enable_prefix_caching
    snapshots = Snapshots(
        model,
        identities,
        cache,
        manager,
        finds_prefixes,
        ranks,
        matmul.computed_by,
        deterministic,
    )
    largest = config.max_num_batched_tokens
    context = largest if max_model_len is None else min(largest, max_model_len)
    nbytes_activations = max(
        activation_nbytes(each, largest, config.max_num_seqs, context) for each in all_models
    )
    return EngineParts(
        tokenizer,
        max_model_len,
        ranks,
        cache,
        manager,
        disk_tier,
        swap_space,
        runner,
        scheduler,
        snapshots,
        latencies,
        reports,
        steps,
        adapters,
        run_ahead,
        nbytes_activations,
    )


def _matmul_of(
    models: Sequence[LanguageModel], option: str, config: SchedulerConfig, ranks: Ranks
) -> Matmul:
    """What multiplies; on all ranks as rank 0 chooses, since a choice may be measured.

    Raises:
        ArgumentError: an unknown option, or a deterministic engine can't promise its bits.
    """
    if config.deterministic:
        return _deterministic_matmul(models[0], config, ranks)
    option, linears = checked_options("engine", {"matmul": option})["matmul"], Linears.of(models)
    chosen = chosen_rows(option if ranks.is_leader else "mlx", linears)
    if ranks.size > 1:
        chosen = from_entries(ranks.all_gather(as_entries(chosen))[0])
    return Matmul(linears, chosen)


def _deterministic_matmul(model: LanguageModel, config: SchedulerConfig, ranks: Ranks) -> Matmul:
    """What a deterministic engine multiplies with. Stored K/V belong to its lengths of chunks and
    of steps.

    Raises:
        ArgumentError: the bits of a row of the model depend on the others.
    """
    if ranks.size > 1:
        raise ArgumentError(
            "[engine] deterministic can't be combined with several ranks: each multiplies by MLX's "
            "sharded layers, in an order that depends on the number of rows",
            "deterministic",
        )
    chunk, num_rows = config.max_num_batched_tokens, config.max_num_mixed_tokens
    return deterministic_matmul(model, num_rows, f"deterministic, {chunk} and {num_rows} rows")


def _let_tokens_attend_alone(cache: KVCache) -> None:
    """Let each token of a short query run attend as in a step of its own.

    Raises:
        ArgumentError: plain MLX attends on a GPU.
    """
    if cache.backend is not None and cache.backend.name == "reference" and not device.is_cpu():
        raise ArgumentError(
            "[engine] deterministic needs the Metal backend on a GPU: plain MLX attends in an "
            "order that depends on the number of rows",
            "backend",
        )
    cache.max_single_run = MAX_RUN_TOKENS


def _open_tier(
    make_tier: Callable[[Fingerprint], Tier],
    cache: KVCache,
    identities: Callable[[], Sequence[ModelIdentity]],
    num_parameters: int,
    states: SequenceStates | None,
    matmul: str,
) -> TierCache:
    """Open the tier of blocks and states.

    Raises:
        ArgumentError: the folder can't be used, or its limit is too small for a block or a state.
    """
    assert isinstance(cache, PagedKVCache), "checked with the options"
    if isinstance(make_tier, DiskTierOptions):
        make_tier.check_holds("block", cache.config.nbytes_per_block)
        make_tier.check_holds("recurrent state", cache.config.state_nbytes)
    tier = make_tier(fingerprint_of(cache, identities(), matmul))
    if not isinstance(make_tier, DiskTierOptions):
        if not isinstance(tier, Tier):
            raise ArgumentError(
                f"[engine] tier must be a function that returns a Tier, it returned {shown(tier)}",
                "tier",
            )
        tier = GuardedTier(tier)
    return TierCache(cache, tier, num_parameters, None if states is None else states.checkpoints)

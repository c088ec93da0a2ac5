"""The keyword arguments of :class:`Engine` by name and type, for functions that pass them on."""

from __future__ import annotations

from typing import TypedDict, cast

from mlx.nn.layers.base import Module

from mlx_paged.config import DEFAULT_NUM_DRAFT_TOKENS, SchedulerConfig
from mlx_paged.foreign_arguments import argument_names


class SchedulerOptions(TypedDict, total=False):
    """Fields of :class:`SchedulerConfig` that a user may set."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int
    enable_prefix_caching: bool
    watermark: float
    priority_steps: int
    num_draft_tokens: int


class FurtherOptions(SchedulerOptions, total=False):
    """What :class:`Engine` takes besides the arguments in its signature."""

    draft_model: Module | None


FURTHER_OPTIONS = argument_names(SchedulerConfig) | {"draft_model"}


def scheduler_config(options: FurtherOptions, max_model_len: int) -> SchedulerConfig:
    """The scheduler's part of the options. A draft model makes drafts by default."""
    given = cast(SchedulerOptions, {k: v for k, v in options.items() if k != "draft_model"})
    if options.get("draft_model") is not None:
        given.setdefault("num_draft_tokens", DEFAULT_NUM_DRAFT_TOKENS)
    return SchedulerConfig(max_model_len=max_model_len, **given)


class LoadedEngineOptions(SchedulerOptions, total=False):
    """The keyword arguments of :class:`Engine` that name no model."""

    kv: str
    block_size: int
    kv_cache_bytes: str | int | None
    backend: str
    swap_bytes: str | int | None
    seed: int | None
    max_model_len: int | None
    run_ahead: bool | None


class EngineOptions(LoadedEngineOptions, total=False):
    """The keyword arguments of :class:`Engine`."""

    draft_model: Module | None


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of :meth:`Engine.add_request`."""

    priority: int
    cache_salt: str | None

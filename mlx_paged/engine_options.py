"""The options of an engine, each declared once. Imports no MLX.

``LLM``, ``AsyncEngine``, ``Engine``, ``make_kv_cache``, ``generate`` and ``batch_generate`` take
them, or the part of them that their ``TypedDict`` has. A new option is an entry here; its use is in
the engine. Annotations are evaluated in this module, so that what is declared can be read.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

from mlx_paged import flag_values
from mlx_paged.config import (
    BLOCK_SIZES,
    DEFAULT_BACKEND,
    DEFAULT_BLOCK_SIZE,
    DEFAULT_CACHE_DIR_SIZE,
    DEFAULT_KV,
    DEFAULT_NUM_DRAFT_TOKENS,
    DEFAULT_NUM_SINK_TOKENS,
    KV_CACHES,
    MAX_DRAFT_TOKENS,
    SchedulerConfig,
)
from mlx_paged.declarations import Argument, Flag, declared

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

# What the server takes by default, so that /v1/cache has something to say: some 20 MB of memory.
DEFAULT_SERVER_HISTORY_TOKENS = 2**20


@dataclass(frozen=True)
class Option(Argument):
    """An option of an engine.

    Args:
        default: what an engine takes where it is not given, as a value or in words.
    """

    default: object = "none"


class DraftModelOption(TypedDict, total=False):
    """The model among the options; :class:`LLM` loads it by its name."""

    draft_model: Annotated[
        "Module | None",
        Option(
            "a small model of the same vocabulary that makes the drafts. Its K/V count in the "
            "budget.",
            elsewhere="speculative_model assistant_model",
            default="none: drafts are looked up in the request's own tokens",
        ),
    ]


class LoadedCacheOptions(TypedDict, total=False):
    """The keyword arguments of :func:`make_kv_cache` that are no models."""

    block_size: Annotated[
        int,
        Option(
            "tokens per K/V block: 8, 16, 32 or 64.",
            Flag(int, choices=BLOCK_SIZES, default=DEFAULT_BLOCK_SIZE),
            default=DEFAULT_BLOCK_SIZE,
        ),
    ]
    kv_cache_bytes: Annotated[
        str | int | None,
        Option(
            "the K/V budget: bytes (65536, 512M, 2G) or blocks (256blocks). A limit, no "
            "allocation.",
            Flag(flag_values.budget, metavar="N"),
            elsewhere="gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override",
            notation=", such as '2G' or '256blocks'",
            default="80% of what Metal recommends (half of the memory elsewhere), less the weights",
        ),
    ]
    kv_format: Annotated[
        str | int | None,
        Option(
            "the bits that K and V are quantised to as they are written: 8, 4, or K:8,V:4; a "
            "paged cache only. Numbers share a scale and a bias in groups of 64, of 32 where that "
            "does not divide a row. The model writes 64 tokens then, and a warning says if its "
            "predictions suffer.",
            Flag(flag_values.kv_bits, name="--kv-bits", metavar="N"),
            elsewhere="kv_bits kv_cache_dtype type_k type_v",
            notation=": 8, 4 or 'K:8,V:4'",
            default="as the model computes them",
        ),
    ]
    backend: Annotated[
        str,
        Option(
            "operations on the paged cache: auto, reference or metal. A basic cache attends with "
            "MLX's own SDPA whatever it is.",
            Flag(str, choices=("auto", "reference", "metal"), default=DEFAULT_BACKEND),
            default=DEFAULT_BACKEND,
        ),
    ]
    window: Annotated[
        int | None,
        Option(
            "keep the last tokens of each sequence, this many, and its first ones, so that it goes "
            "on without end in bounded memory; paged only. There is then no context limit but "
            "max_model_len.",
            Flag(flag_values.positive, metavar="N"),
            elsewhere="max_kv_size sliding_window attention_window",
            notation=", the tokens that are kept",
            default="all tokens",
        ),
    ]
    num_sink_tokens: Annotated[
        int | None,
        Option(
            "how many of the first tokens stay beside a window.",
            Flag(flag_values.whole, metavar="M"),
            elsewhere="keep num_attention_sinks attention_sink_size n_keep",
            default=DEFAULT_NUM_SINK_TOKENS,
        ),
    ]


class CacheOptions(LoadedCacheOptions, DraftModelOption, total=False):
    """The keyword arguments of :func:`make_kv_cache`."""


class CacheDirOptions(TypedDict, total=False):
    """The arguments of :meth:`DiskTierOptions.read`; a paged cache of one rank can have them."""

    cache_dir: Annotated[
        str | Path | None,
        Option(
            "a folder in which full blocks of K/V are kept, so that prompts with the same "
            "beginning find them after a restart, and in other processes (docs/disk-tier.md).",
            Flag(str, metavar="FOLDER"),
            elsewhere="kv_transfer_config hicache_storage_backend slot_save_path",
            notation=", a folder for K/V on disk; that of models is the Hugging Face cache, "
            "HF_HOME",
        ),
    ]
    cache_dir_size: Annotated[
        str | int | None,
        Option(
            "the most bytes that the folder takes, such as 512M or 20G.",
            Flag(flag_values.num_bytes, metavar="N"),
            default=DEFAULT_CACHE_DIR_SIZE,
        ),
    ]
    cache_dir_ttl: Annotated[
        str | float | None,
        Option(
            "how long a block that is not used stays there: seconds, or 90s, 30m, 12h, 7d, 2w.",
            Flag(flag_values.duration, metavar="T"),
            default="until the space is needed",
        ),
    ]


class LoadedOneShotOptions(LoadedCacheOptions, CacheDirOptions, total=False):
    """The options of :class:`OneShotOptions` that are no models."""

    kv: Annotated[
        str,
        Option(
            "the K/V cache: paged, or basic for contiguous K/V per sequence.",
            Flag(str, choices=KV_CACHES, default=DEFAULT_KV),
            default=DEFAULT_KV,
        ),
    ]
    max_model_len: Annotated[
        int | None,
        Option(
            "the most tokens that a prompt and its answer have together; a longer prompt is "
            "refused, an answer that reaches the limit ends with length.",
            Flag(flag_values.positive, metavar="N"),
            elsewhere="max_seq_len max_seq_length max_length n_ctx max_context_len context_length "
            "context_window",
            notation=" for tokens, or kv_cache_bytes for memory",
            default="the context that the model was made for, which is also the most",
        ),
    ]
    num_draft_tokens: Annotated[
        int | None,
        Option(
            f"the most drafts per step that a request verifies, 0 to {MAX_DRAFT_TOKENS}. The "
            "tokens are the same with any number (docs/engine.md, Speculation).",
            Flag(flag_values.drafts, metavar="K"),
            elsewhere="num_speculative_tokens prompt_lookup_num_tokens",
            default=f"{DEFAULT_NUM_DRAFT_TOKENS} with a draft model, else 0",
        ),
    ]
    wired_limit: Annotated[
        str | int | None,
        Option(
            "how much of MLX's memory stays wired, so that macOS does not page it out, until "
            "the engine's close or end: bytes such as 20G, or recommended for what Metal "
            "recommends. macOS's kernel may panic with it (docs/engine.md, Wired memory). Without "
            "Metal it does nothing, and a warning says so.",
            Flag(flag_values.wired_limit, metavar="N"),
        ),
    ]


class OneShotOptions(LoadedOneShotOptions, DraftModelOption, total=False):
    """The keyword arguments of :class:`Engine` for an engine that answers one call."""


class LoadedEngineOptions(LoadedOneShotOptions, total=False):
    """The options of an engine that are no models."""

    max_num_seqs: Annotated[
        int,
        Option(
            "sequences that run at once; the others wait, first come, first served.",
            Flag(
                flag_values.positive,
                metavar="N",
                default=SchedulerConfig.max_num_seqs,
                programs=("server",),
            ),
            elsewhere="max_batch_size completion_batch_size n_parallel",
            default=SchedulerConfig.max_num_seqs,
        ),
    ]
    max_num_batched_tokens: Annotated[
        int,
        Option(
            "new tokens of a step, over all sequences, while no answer runs: prompts and chunks of "
            "them.",
            Flag(
                flag_values.positive,
                also=("--prefill-step-size",),
                metavar="N",
                default=SchedulerConfig.max_num_batched_tokens,
                help="prompt tokens computed at a time",
                programs=("server",),
            ),
            default=SchedulerConfig.max_num_batched_tokens,
        ),
    ]
    max_num_mixed_tokens: Annotated[
        int,
        Option(
            "new tokens of a step beside running answers, which wait for it. A larger number "
            "computes prompts a little faster.",
            Flag(
                flag_values.positive,
                metavar="N",
                default=SchedulerConfig.max_num_mixed_tokens,
                programs=("server",),
            ),
            default=SchedulerConfig.max_num_mixed_tokens,
        ),
    ]
    watermark: Annotated[
        float,
        Option(
            "the share of the blocks that must stay free when a request is admitted beside others, "
            "so that these can continue for a while before one is preempted; 0 to 1, below 1.",
            Flag(flag_values.below_1, default=SchedulerConfig.watermark, programs=("server",)),
            default=SchedulerConfig.watermark,
        ),
    ]
    priority_steps: Annotated[
        int,
        Option(
            "a request whose priority is higher by 1 waits as if it had arrived this many steps "
            "later, so none is overtaken for ever. A priority interrupts no running request.",
            Flag(
                flag_values.positive,
                metavar="N",
                default=SchedulerConfig.priority_steps,
                programs=("server",),
            ),
            default=SchedulerConfig.priority_steps,
        ),
    ]
    enable_prefix_caching: Annotated[
        bool,
        Option(
            "whether requests with equal beginnings share their K/V; cache_salt of a request keeps "
            "it apart from others.",
            Flag(
                None,
                name="--no-enable-prefix-caching",
                default=SchedulerConfig.enable_prefix_caching,
                help="do not share the K/V of equal beginnings",
                programs=("server",),
            ),
            elsewhere="enable_prefix_cache",
            default=SchedulerConfig.enable_prefix_caching,
        ),
    ]
    num_history_tokens: Annotated[
        int,
        Option(
            "token ids of past requests that are remembered, so that each prompt can be told why "
            "no more of it was cached; some 10 bytes per token. 0 remembers none.",
            Flag(
                flag_values.whole,
                metavar="N",
                default=DEFAULT_SERVER_HISTORY_TOKENS,
                programs=("server",),
            ),
            default=SchedulerConfig.num_history_tokens,
        ),
    ]
    swap_bytes: Annotated[
        str | int | None,
        Option(
            "host memory for the K/V of preempted requests, on top of the budget, in its notation; "
            "0 never swaps, and computes them again.",
            Flag(flag_values.budget_or_0, metavar="N", programs=("server",)),
            elsewhere="swap_space cpu_offload_gb kv_offloading_size",
            notation=", such as '4G'",
            default="an eighth of the budget, if copying a token's K/V is cheaper than computing "
            "them",
        ),
    ]
    seed: Annotated[
        int | None,
        Option(
            "the seed of the seeds of requests that have none.",
            Flag(flag_values.whole, programs=("server",)),
            elsewhere="random_seed",
            default="fresh ones",
        ),
    ]
    run_ahead: Annotated[
        bool | None,
        Option(
            "whether a step is launched before the tokens of the one before are read, so that the "
            "device does not wait for Python. The tokens are the same.",
            Flag(None, programs=("server",)),
            elsewhere="async_scheduling",
            default="where the cache allows it without copies: on Metal, with paged K/V",
        ),
    ]


class EngineOptions(LoadedEngineOptions, DraftModelOption, total=False):
    """The keyword arguments of :class:`Engine` and :class:`AsyncEngine`."""


ENGINE_OPTIONS = declared(Option, EngineOptions.__annotations__)

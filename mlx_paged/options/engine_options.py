"""The options of an engine, and those that programs load a model with, each declared once. Does not
import MLX.

``LLM``, ``AsyncEngine``, ``Engine``, ``make_kv_cache``, ``generate`` and ``batch_generate`` take
the options of one of these ``TypedDict``s, and all but ``make_kv_cache`` a ``draft_model``. A new
option is declared here, and used in the engine. Annotations are evaluated in this module, so that
the declarations can be read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

from mlx_paged.options import config
from mlx_paged.options.argument_values import (
    ANY_TEXT,
    AT_LEAST_0,
    AT_LEAST_1,
    BOOL,
    Flag,
    Option,
    declared,
    matching,
    number,
    one_of,
    or_none,
    switch,
    whole,
)

if TYPE_CHECKING:
    from mlx_paged.block_store import Fingerprint
    from mlx_paged.core.tier import Tier

# The server's default, for the explanations of /v1/cache: some 20 MB of memory.
DEFAULT_SERVER_HISTORY_TOKENS = 2**20

EXAMPLE_MODEL = "mlx-community/Qwen3-0.6B-4bit"

_SERVER = Flag(("server",))


class CacheOptions(TypedDict, total=False):
    """The keyword arguments of :func:`make_kv_cache`."""

    block_size: Annotated[
        int,
        Option(
            "tokens per K/V block: 8, 16, 32 or 64.",
            one_of(*config.BLOCK_SIZES),
            default=config.DEFAULT_BLOCK_SIZE,
        ),
    ]
    kv_cache_bytes: Annotated[
        str | int | None,
        Option(
            "the K/V budget: bytes (65536, 512M, 2G) or blocks (256blocks). A limit, not an "
            "allocation.",
            config.BUDGET,
            default_text="80% of what the weights leave of Metal's recommendation (elsewhere half, "
            "of the memory)",
        ),
    ]
    preallocate: Annotated[
        bool,
        Option(
            "allocate the whole budget at once, so that the cache never grows, which copies slabs; "
            "paged only.",
            BOOL,
            default=False,
        ),
    ]
    kv_format: Annotated[
        str | int | None,
        Option(
            "quantise K and V to this many bits as they are written: "
            f"{config.KV_BITS_LISTED}, or K:8,V:4; paged only. Groups of 64 numbers share a scale "
            "and a bias, or groups of 32 where 64 does not divide a row. 8 bits cost next to no "
            "accuracy; with 4, some models lose much (docs/guide/memory.md, What fewer bits cost).",
            config.KV_FORMAT,
            Flag(name="--kv-bits"),
            default_text="as the model computes them",
        ),
    ]
    backend: Annotated[
        str,
        Option(
            "implementation of the paged cache's operations: auto, reference or metal. A basic "
            "cache always uses MLX's own SDPA.",
            one_of("auto", "reference", "metal"),
            default=config.DEFAULT_BACKEND,
        ),
    ]
    window: Annotated[
        int | None,
        Option(
            "keep this many of the last tokens of each sequence, and its first ones, so that it "
            "can continue without end in bounded memory; paged only. The only context limit is "
            "then max_model_len.",
            config.WINDOW,
            default_text="all tokens",
        ),
    ]
    num_sink_tokens: Annotated[
        int | None,
        Option(
            "how many of the first tokens are kept in addition to a window.",
            config.NUM_SINK_TOKENS,
            default_text=f"`{config.DEFAULT_NUM_SINK_TOKENS}`",
        ),
    ]


class OneShotOptions(CacheOptions, total=False):
    """The keyword arguments of :class:`Engine` for an engine that answers one call."""

    kv: Annotated[
        str,
        Option(
            "the K/V cache: paged, or basic for contiguous K/V per sequence.",
            one_of(*config.KV_CACHES),
            default=config.DEFAULT_KV,
        ),
    ]
    cache_dir: Annotated[
        str | Path | None,
        Option(
            "a folder for full blocks of K/V, so that prompts with a common prefix reuse them "
            "after a restart, and in other processes (docs/guide/restarts.md).",
            matching("a folder", lambda folder: True, metavar="FOLDER"),
        ),
    ]
    cache_dir_size: Annotated[
        str | int | None,
        Option(
            "the size limit of the folder, such as 512M or 20G.",
            config.NBYTES,
            default_text=f"`{config.DEFAULT_CACHE_DIR_SIZE}`",
        ),
    ]
    cache_dir_ttl: Annotated[
        str | float | None,
        Option(
            "how long an unused block is kept: seconds, or 90s, 30m, 12h, 7d, 2w.",
            config.DURATION,
            default_text="until the space is needed",
        ),
    ]
    cache_dir_writes: Annotated[
        str | int | None,
        Option(
            "the most bytes that are written to the folder in 24 hours, such as 50G/day, to spare "
            "an SSD. When half of them are written, blocks are stored at their second use only, "
            "and at the limit not at all.",
            config.NBYTES_A_DAY,
            default_text="no limit",
        ),
    ]
    tier: Annotated[
        "Callable[[Fingerprint], Tier] | None",
        Option(
            "a function that returns your own Tier for full blocks of K/V, instead of a folder; "
            "its argument says what their bytes depend on (docs/guide/restarts.md).",
            matching("a function that returns a Tier", callable),
            flag=None,
            default_text="none",
        ),
    ]
    max_model_len: Annotated[
        int | None,
        Option(
            "the most tokens of a prompt and its answer together; a longer prompt is refused, and "
            "an answer that reaches the limit ends with finish reason length.",
            or_none(AT_LEAST_1),
            default_text="the model's context length, which is also the maximum",
        ),
    ]
    num_draft_tokens: Annotated[
        int | None,
        Option(
            "the most draft tokens that a request verifies per step, 0 to "
            f"{config.MAX_DRAFT_TOKENS}. The output is the same with any number "
            "(docs/internals/engine.md, Speculation).",
            whole(0, config.MAX_DRAFT_TOKENS),
            default_text=f"{config.DEFAULT_NUM_DRAFT_TOKENS} with a draft model, else 0",
        ),
    ]
    matmul: Annotated[
        str,
        Option(
            "what multiplies the weights of linear layers in steps of up to 16 rows, such as "
            "several answers or a token with its drafts: mlx, or rows for a kernel that reads each "
            "weight once (for 2 to 16 rows), or auto for the faster of the two, by shape and "
            "number of rows, measured once on each machine. Without Metal auto is mlx, and rows is "
            "plain MLX of the same bits, which is slow (docs/internals/kernels.md, Matmuls of a "
            "few rows).",
            one_of(*config.MATMULS),
            default=config.DEFAULT_MATMUL,
        ),
    ]
    wired_limit: Annotated[
        str | int | None,
        Option(
            "how much of MLX's memory stays wired until the engine is closed, so that macOS does "
            "not page it out: bytes such as 20G, or recommended for what Metal recommends. It can "
            "cause kernel panics (docs/internals/engine.md, Wired memory). Without Metal it has no "
            "effect, and a warning says so.",
            config.WIRED_LIMIT,
        ),
    ]


class EngineOptions(OneShotOptions, total=False):
    """The keyword arguments of :class:`Engine`, :class:`AsyncEngine` and :class:`LLM`."""

    max_num_seqs: Annotated[
        int,
        Option(
            "the most sequences that run at once; others wait, first come, first served, in "
            "fair shares of their users.",
            AT_LEAST_1,
            _SERVER,
            default=config.SchedulerConfig.max_num_seqs,
        ),
    ]
    max_num_batched_tokens: Annotated[
        int | None,
        Option(
            "the most new tokens of a step, over all sequences, while no answer is being "
            "generated: prompts and chunks of them. If it is given, prefill_step_seconds defaults "
            "to 0.",
            or_none(AT_LEAST_1),
            Flag(
                ("server",), also=("--prefill-step-size",), help="prompt tokens computed at a time"
            ),
            default_text=f"`{config.SchedulerConfig.max_num_batched_tokens}`",
        ),
    ]
    max_num_mixed_tokens: Annotated[
        int | None,
        Option(
            "the most new tokens of a step while answers are being generated, which wait for it. A "
            "larger number computes prompts a little faster. If it is given, mixed_step_seconds "
            "defaults to 0.",
            or_none(AT_LEAST_1),
            _SERVER,
            default_text=f"`{config.SchedulerConfig.max_num_mixed_tokens}`",
        ),
    ]
    prefill_step_seconds: Annotated[
        float | None,
        Option(
            "the target duration of a step while no answer is being generated: it has as many "
            "prompt tokens, up to max_num_batched_tokens, as earlier steps computed in this time. "
            "0 always allows max_num_batched_tokens, so that runs repeat bit for bit "
            "(docs/internals/engine.md, Budgets of steps).",
            or_none(config.STEP_SECONDS),
            default_text=f"{config.DEFAULT_PREFILL_STEP_SECONDS:g} in AsyncEngine, the server and "
            "the chat, else 0",
        ),
    ]
    mixed_step_seconds: Annotated[
        float | None,
        Option(
            "the same while answers are being generated, which wait for the step, with "
            "max_num_mixed_tokens. A shorter time computes prompts more slowly.",
            or_none(config.STEP_SECONDS),
            _SERVER,
            default_text=f"{config.DEFAULT_MIXED_STEP_SECONDS:g} in AsyncEngine and the server, "
            "else 0",
        ),
    ]
    token_budgets: Annotated[
        Sequence[tuple[int, int, int]] | None,
        Option(
            "the token budgets that another engine has chosen by the clock, from its attribute "
            "token_budgets. The same requests, added at the same steps, then run in the same "
            "steps.",
            or_none(config.TOKEN_BUDGETS),
            flag=None,
        ),
    ]
    watermark: Annotated[
        float,
        Option(
            "the share of the blocks that must stay free when a request is admitted beside others, "
            "so that these can continue for a while before one is preempted; 0 to 1, below 1.",
            number(0, 1 - 2**-53, "within 0..1, below 1"),
            _SERVER,
            default=config.SchedulerConfig.watermark,
        ),
    ]
    priority_steps: Annotated[
        int,
        Option(
            "a request whose priority is higher by 1 waits as if it had arrived this many steps "
            "later, so no request starves. A request with a lower priority than others that come "
            "after it in this order preempts the last of them if it needs their blocks.",
            AT_LEAST_1,
            _SERVER,
            default=config.SchedulerConfig.priority_steps,
        ),
    ]
    enable_prefix_caching: Annotated[
        bool,
        Option(
            "share the K/V of common prefixes between requests; a request's cache_salt separates "
            "it from others.",
            BOOL,
            Flag(
                ("server",),
                name="--no-enable-prefix-caching",
                help="do not share the K/V of common prefixes",
            ),
            default=config.SchedulerConfig.enable_prefix_caching,
        ),
    ]
    num_history_tokens: Annotated[
        int,
        Option(
            "how many token ids of past requests are kept, to explain why no more of a prompt was "
            "cached; some 10 bytes per token. 0 keeps none.",
            AT_LEAST_0,
            Flag(("server",), default=DEFAULT_SERVER_HISTORY_TOKENS),
            default=config.SchedulerConfig.num_history_tokens,
        ),
    ]
    swap_bytes: Annotated[
        str | int | None,
        Option(
            "host memory for the K/V of preempted requests, in addition to the budget and in its "
            "notation; with 0 they are recomputed.",
            matching(
                config.BUDGET.what,
                lambda text: text.strip() == "0" or config.BUDGET.read(text) is not None,
                metavar="N",
            ),
            _SERVER,
            default_text="an eighth of the budget, if copying a token's K/V is cheaper than "
            "computing it",
        ),
    ]
    deterministic: Annotated[
        bool,
        Option(
            "give each request the same tokens and log-probabilities, bit for bit, whatever else "
            "runs, with drafts and prefix hits or without them. For dense attention models on a "
            "paged cache; prompts are computed in chunks that no other request shares "
            "(docs/guide/library.md, The same bits).",
            BOOL,
            Flag(),
            default=config.SchedulerConfig.deterministic,
        ),
    ]
    seed: Annotated[
        int | None,
        Option(
            "the seed for requests that have no seed of their own.",
            or_none(whole(), "a whole number"),
            Flag(("server",), domain=AT_LEAST_0),
            default_text="random",
        ),
    ]
    adapters: Annotated[
        Mapping[str, str | Path] | None,
        Option(
            "LoRA adapters that requests choose by name, each with its folder, as mlx-lm or PEFT "
            "writes it. Requests with different adapters and without one run in the same steps "
            "(docs/guide/adapters.md).",
            or_none(config.ADAPTERS),
            Flag(
                ("server",),
                name="--adapter",
                domain=config.ADAPTER,
                default=(),
                help="a LoRA adapter that requests choose as their model, with its folder; may be "
                "given several times",
            ),
            default_text="none",
        ),
    ]
    max_adapters: Annotated[
        int | None,
        Option(
            "the most adapters that are loaded at once, for which memory is set aside. Another one "
            "takes the place of the least recently used one, which is loaded again when a request "
            "asks for it; 0 allows none.",
            or_none(AT_LEAST_0),
            _SERVER,
            default_text="the number of adapters",
        ),
    ]
    max_adapter_rank: Annotated[
        int | None,
        Option(
            "the largest rank of an adapter. All take as much memory and time as one of this rank.",
            or_none(AT_LEAST_1),
            _SERVER,
            default_text=f"`{config.DEFAULT_ADAPTER_RANK}`, or the next power of two of the "
            "largest rank of the adapters",
        ),
    ]
    run_ahead: Annotated[
        bool | None,
        Option(
            "launch a step before the tokens of the previous one are read, so that the device does "
            "not wait for Python. The tokens are the same.",
            or_none(BOOL, "True, False or None"),
            _SERVER,
            default_text="where the cache allows it without copies: on Metal, with paged K/V",
        ),
    ]


ENGINE_OPTIONS: dict[str, Option] = declared(EngineOptions) | {
    "draft_model": Option(
        "a small model with the same vocabulary, or a head of the model, that generates the drafts "
        "(docs/internals/engine.md, Speculation). Its K/V count toward the budget.",
        matching("a model", lambda model: True),
        flag=None,
        default_text="none: drafts are looked up in the request's own tokens",
    )
}

# What the programs load a model with, in addition to the options of an engine.
LAUNCH_OPTIONS: dict[str, Option] = {
    "model": Option(
        f"local folder, GGUF file or Hugging Face repo, e.g. {EXAMPLE_MODEL}",
        ANY_TEXT,
        default_text="the bundled demo model",
    ),
    "tokenizer": Option(
        "folder or Hugging Face repo with the tokenizer",
        replace(ANY_TEXT, metavar="FOLDER"),
        default_text="the model's own",
    ),
    "dtype": Option(
        "dtype of a GGUF file's scales, activations and K/V",
        one_of("float32", "float16", "bfloat16"),
        default_text="that of its matrices, or float32 if they are quantised, so that nothing is "
        "lost",
    ),
    "adapter_path": Option(
        "folder with LoRA or DoRA adapters for the model, as mlx-lm trains them", ANY_TEXT
    ),
    "draft_model": Option(
        "folder or Hugging Face repo of a small model with the same tokenizer, or of a head of the "
        "model, which generates drafts; auto for the head in the model's own folder",
        ANY_TEXT,
        default_text="none: drafts are looked up in the conversation",
    ),
    "no_generation_config": switch(
        "ignore the model's generation_config.json: greedy, unless flags say otherwise"
    ),
    "force": switch("load the model even if it is larger than this machine's memory"),
    "skip_check": switch(
        "run the model even if the check at load finds that its logits differ from mlx-lm's"
    ),
    "no_thinking": switch("answer without reasoning, if the model's chat template supports it"),
}

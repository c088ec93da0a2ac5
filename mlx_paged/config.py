"""Budget and scheduler settings, and the defaults of a cache. Imports no MLX."""

from __future__ import annotations

import numbers
import re
from dataclasses import dataclass

from mlx_paged.argument_values import as_integer, check_integer, check_positive
from mlx_paged.errors import ArgumentError, shown

BLOCK_SIZES = (8, 16, 32, 64)
KV_CACHES = ("basic", "paged")
KV_BITS = (8, 4)

# The defaults of whatever makes a cache.
DEFAULT_BLOCK_SIZE = 16
DEFAULT_KV = "paged"
DEFAULT_BACKEND = "auto"
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_MAX_NUM_MIXED_TOKENS = 512
DEFAULT_NUM_SINK_TOKENS = 4
DEFAULT_CACHE_DIR_SIZE = "20G"
MAX_WINDOW = 2**31
# The query run of a request with drafts: kernels attend to runs of up to 8 tokens.
MAX_DRAFT_TOKENS = 7
DEFAULT_NUM_DRAFT_TOKENS = 3  # of a draft model, as in mlx-lm

_KV_BITS = re.compile(r"\s*k\s*:?\s*(\d+)\s*,?\s*v\s*:?\s*(\d+)\s*", re.IGNORECASE)
KV_BITS_NOTATION = "8, 4 or one for each, such as K:8,V:4"

_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(blocks?|[kmgt]?i?b?)\s*", re.IGNORECASE)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MAX_BUDGET = 2**63
BUDGET_NOTATION = "bytes (65536, 512M, 2G) or whole blocks (256blocks), within 1..2**63"
NBYTES_NOTATION = "bytes (65536, 512M, 2G), within 1..2**63"

RECOMMENDED = "recommended"
WIRED_LIMIT_NOTATION = f"{RECOMMENDED!r} or {NBYTES_NOTATION}"

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw]?)\s*", re.IGNORECASE)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MAX_SECONDS = 100 * 365.25 * 86_400
DURATION_NOTATION = "seconds (90, 90s), minutes, hours, days or weeks (30m, 12h, 7d, 2w)"


@dataclass(frozen=True)
class KVBudget:
    """How much K/V may be held: a number of bytes or of blocks; exactly one of them is given."""

    nbytes: int | None = None
    num_blocks: int | None = None

    @classmethod
    def parse(cls, text: str | int, argument: str = "kv_cache_bytes") -> KVBudget:
        """``"512M"``, ``"2G"``, ``"1.5GiB"``, ``"65536"`` (bytes; K, M, G are powers of 1024) or
        ``"256blocks"``.

        Args:
            argument: the name of the argument that has the budget, for the error.

        Raises:
            ArgumentError: the text is none of these, not positive, or too large.
        """
        budget = _read_budget(text)
        if budget is None:
            raise ArgumentError(
                f"[kv cache] {argument} must be {BUDGET_NOTATION}, got {shown(text)}", argument
            )
        return budget


def _read_budget(text: object) -> KVBudget | None:
    is_integer = isinstance(text, numbers.Integral) and not isinstance(text, bool)
    match = _BUDGET.fullmatch(str(text)) if is_integer or isinstance(text, str) else None
    if match is None:
        return None
    unit = match[2].lower()
    is_blocks = unit.startswith("block")
    count = float(match[1]) * (1 if is_blocks else _UNITS[unit.rstrip("ib")])
    if not 1 <= count < _MAX_BUDGET or (is_blocks and not count.is_integer()):
        return None
    return KVBudget(num_blocks=int(count)) if is_blocks else KVBudget(nbytes=int(count))


def parse_nbytes(text: str | int, argument: str) -> int:
    """A number of bytes in the notation of budgets: ``"512M"``, ``"2G"``, ``65536``.

    Args:
        argument: the name of the argument that has it, for the error.

    Raises:
        ArgumentError: the text is no such number, or says blocks.
    """
    budget = _read_budget(text)
    if budget is None or budget.nbytes is None:
        raise ArgumentError(
            f"[engine] {argument} must be {NBYTES_NOTATION}, got {shown(text)}", argument
        )
    return budget.nbytes


def parse_wired_limit(given: str | int) -> str | int:
    """A number of bytes in the notation of budgets, or ``"recommended"``.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(given, str) and given == RECOMMENDED:
        return given
    try:
        return parse_nbytes(given, "wired_limit")
    except ArgumentError as error:
        raise ArgumentError(
            f"[engine] wired_limit must be {WIRED_LIMIT_NOTATION}, got {shown(given)}",
            "wired_limit",
        ) from error


def parse_duration(given: str | float, argument: str) -> float:
    """Seconds, from ``"90s"``, ``"30m"``, ``"12h"``, ``"7d"``, ``"2w"`` or a number of seconds.

    Args:
        argument: the name of the argument that has it, for the error.

    Raises:
        ArgumentError: it is none of these, not positive, or more than 100 years.
    """
    seconds = 0.0
    if isinstance(given, str) and (match := _DURATION.fullmatch(given)) is not None:
        seconds = float(match[1]) * _SECONDS[match[2].lower()]
    elif isinstance(given, numbers.Real) and not isinstance(given, bool):
        seconds = float(given)
    if not 0 < seconds <= _MAX_SECONDS:
        raise ArgumentError(
            f"[engine] {argument} must be {DURATION_NOTATION}, above 0, got {shown(given)}",
            argument,
        )
    return seconds


@dataclass(frozen=True)
class KVBits:
    """The bits of each number of K and of V in a cache that is quantised."""

    key: int
    value: int

    def __str__(self) -> str:
        """``8 bits``, or as :meth:`parse` reads it."""
        bits = f"{self.key} bits"
        return bits if self.key == self.value else f"K:{self.key},V:{self.value}"

    @classmethod
    def parse(cls, given: str | int | None, argument: str = "kv_format") -> KVBits | None:
        """``8``, ``"4"`` or ``"K:8,V:4"``; ``None`` is ``None``: K/V in the model's dtype.

        Args:
            argument: the name of the argument that has it, for the error.

        Raises:
            ArgumentError: it is none of these, or there are no such bits.
        """
        if given is None:
            return None
        number = as_integer(given)
        text = given.strip() if isinstance(given, str) else str(number)
        match = _KV_BITS.fullmatch(text)
        bits = match.groups() if match else (text, text)
        if all(one in map(str, KV_BITS) for one in bits):
            return cls(int(bits[0]), int(bits[1]))
        raise ArgumentError(
            f"[kv cache] {argument} must be {KV_BITS_NOTATION}, got {shown(given)}", argument
        )


@dataclass(frozen=True)
class StreamingWindow:
    """Keep the first ``num_sink_tokens`` and the last ``window`` tokens of each sequence, so that
    it may go on without end in bounded memory (StreamingLLM, Xiao et al. 2023).

    Both are rounded up to whole blocks, and tokens leave several blocks at a time.

    Raises:
        ArgumentError: a number out of its range, named.
    """

    window: int
    num_sink_tokens: int = DEFAULT_NUM_SINK_TOKENS

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("num_sink_tokens", 0)):
            value = as_integer(getattr(self, name))
            if value is None or not least <= value < MAX_WINDOW:
                raise ArgumentError(
                    f"[kv cache] {name} must be a whole number, at least {least}, "
                    f"got {shown(getattr(self, name))}",
                    name,
                )
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class SchedulerConfig:
    """How many requests run at once, and how much a step may hold. The names are vLLM's.

    Args:
        max_model_len: the most tokens that a prompt and its answer may have together; ``None``
            leaves the budget as the only limit.
        Others: the options of an engine of the same names, which ``engine_options.py`` declares.

    Raises:
        ValueError: for a value out of its range; the message names the argument.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    max_num_mixed_tokens: int = DEFAULT_MAX_NUM_MIXED_TOKENS
    watermark: float = 0.05
    priority_steps: int = 1000
    enable_prefix_caching: bool = True
    max_model_len: int | None = None
    num_draft_tokens: int = 0
    num_history_tokens: int = 0

    def __post_init__(self) -> None:
        token_budgets = "max_num_batched_tokens", "max_num_mixed_tokens"
        for name in ("max_num_seqs", *token_budgets, "priority_steps"):
            check_positive("scheduler", name, getattr(self, name))
        if self.max_model_len is not None:
            check_positive("scheduler", "max_model_len", self.max_model_len)
        check_integer("scheduler", "num_history_tokens", self.num_history_tokens, 0)
        num_drafts = self.num_draft_tokens
        if check_integer("scheduler", "num_draft_tokens", num_drafts, 0) > MAX_DRAFT_TOKENS:
            raise ArgumentError(
                f"[scheduler] num_draft_tokens must be within 0..{MAX_DRAFT_TOKENS}, got "
                f"{shown(num_drafts)}: attention has kernels for runs of {MAX_DRAFT_TOKENS + 1} "
                "tokens",
                "num_draft_tokens",
            )
        if not isinstance(self.watermark, int | float) or not 0 <= self.watermark < 1:
            raise ValueError(
                f"[scheduler] watermark must be within 0..1, below 1, got {shown(self.watermark)}"
            )
        if not isinstance(self.enable_prefix_caching, bool):
            raise ValueError(
                f"[scheduler] enable_prefix_caching must be True or False, "
                f"got {shown(self.enable_prefix_caching)}"
            )
        for name in token_budgets:
            if getattr(self, name) < self.max_num_seqs:
                raise ArgumentError(
                    f"[scheduler] {name} {getattr(self, name)} must be at least max_num_seqs "
                    f"{self.max_num_seqs}: a step holds a token of each running sequence",
                    name,
                )

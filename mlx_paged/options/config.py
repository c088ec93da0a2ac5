"""Budget and scheduler settings, and the defaults of a cache. Does not import MLX."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_paged.errors import ArgumentError
from mlx_paged.options.argument_values import Domain, as_integer, number, whole

BLOCK_SIZES = (8, 16, 32, 64)
KV_CACHES = ("basic", "paged")
MATMULS = ("auto", "mlx", "rows")
KV_BITS = (8, 4)
KV_BITS_LISTED = ", ".join(map(str, KV_BITS))  # in help and errors

# The defaults of caches and engines.
DEFAULT_BLOCK_SIZE = 16
DEFAULT_KV = "paged"
DEFAULT_BACKEND = "auto"
DEFAULT_MATMUL = "auto"
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
# Target durations of steps in engines that step by themselves: without and with running answers.
DEFAULT_PREFILL_STEP_SECONDS = 1.0
DEFAULT_MIXED_STEP_SECONDS = 0.2
DEFAULT_NUM_SINK_TOKENS = 4
DEFAULT_CACHE_DIR_SIZE = "20G"
MAX_WINDOW = 2**31
# The query run of a request with drafts: kernels attend to runs of up to 8 tokens.
MAX_DRAFT_TOKENS = 7
DEFAULT_NUM_DRAFT_TOKENS = 3  # of a draft model, as in mlx-lm
DEFAULT_ADAPTER_RANK = 16  # as in vLLM
# The steps of a deterministic engine (docs/internals/engine.md, Deterministic steps). A prompt is
# computed in chunks that begin at multiples of this many tokens, a multiple of any block size; ...
CHUNK_TOKENS = 256
# ... any other step has at most this many rows, ...
MAX_STEP_ROWS = 64
# ... and at most this many tokens of a sequence, each of which attends as in a step of its own.
MAX_RUN_TOKENS = 1 + MAX_DRAFT_TOKENS

_KV_BITS = re.compile(r"\s*k\s*:?\s*(\d+)\s*,?\s*v\s*:?\s*(\d+)\s*", re.IGNORECASE)
_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(blocks?|[kmgt]?i?b?)\s*", re.IGNORECASE)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MAX_BUDGET = 2**63
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw]?)\s*", re.IGNORECASE)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
# As Go writes them, and so Ollama's clients.
_GO_DURATION = re.compile(r"(?:\d+(?:\.\d*)?(?:ns|us|µs|ms|[smhdw]))+", re.IGNORECASE)
_GO_SECONDS = {**_SECONDS, "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3}
_MAX_SECONDS = 100 * 365.25 * 86_400
RECOMMENDED = "recommended"


@dataclass(frozen=True)
class KVBudget:
    """The K/V budget, as a number of bytes or of blocks."""

    nbytes: int | None = None
    num_blocks: int | None = None

    @classmethod
    def parse(cls, text: str | int, argument: str = "kv_cache_bytes") -> KVBudget:
        """``"512M"``, ``"2G"``, ``"1.5GiB"``, ``"65536"`` (bytes; K, M, G are powers of 1024) or
        ``"256blocks"``.

        Args:
            argument: the name of the argument, for the error.

        Raises:
            ArgumentError: the text has another form, or the number is out of range.
        """
        return BUDGET.check("kv cache", argument, text)


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


def _read_adapters(value: object) -> dict[str, str | Path] | None:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list) or not all(map(_is_adapter, pairs)):
        return None
    found = dict(pairs)
    return found if len(found) == len(pairs) else None


def _is_adapter(pair: object) -> bool:
    # A router passes flags on as JSON.
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(pair):
        return False
    name, folder = pair
    return isinstance(name, str) and isinstance(folder, str | Path)


def _read_nbytes(text: object) -> int | None:
    budget = _read_budget(text)
    return None if budget is None else budget.nbytes


def _read_nbytes_a_day(text: object) -> int | None:
    if type(text) is int:
        return _read_nbytes(text)
    nbytes, slash, unit = str(text).partition("/") if isinstance(text, str) else ("", "", "")
    is_valid = slash and unit.strip().lower() == "day"
    return _read_nbytes(nbytes) if is_valid else None


def _read_wired_limit(given: object) -> str | int | None:
    return given if isinstance(given, str) and given == RECOMMENDED else _read_nbytes(given)


def _read_duration(given: object) -> float | None:
    seconds = 0.0
    if isinstance(given, str) and (match := _DURATION.fullmatch(given)) is not None:
        seconds = float(match[1]) * _SECONDS[match[2].lower()]
    elif isinstance(given, numbers.Real) and not isinstance(given, bool):
        seconds = float(given)
    return seconds if 0 < seconds <= _MAX_SECONDS else None


def _read_keep_alive(given: object) -> float | None:
    text = str(given).strip().lower()
    if isinstance(given, bool) or not isinstance(given, (int, float, str)):
        return None
    is_negative, text = text.startswith("-"), text.removeprefix("-")
    if _GO_DURATION.fullmatch(text):
        parts = re.findall(r"([\d.]+)([a-zµ]+)", text)
        seconds = sum(float(number) * _GO_SECONDS[unit] for number, unit in parts)
    elif re.fullmatch(r"\d+(?:\.\d*)?", text):
        seconds = float(text)
    else:
        return None
    return math.inf if is_negative or seconds > _MAX_SECONDS else seconds


@dataclass(frozen=True)
class KVBits:
    """The bits of each number of K and of V in a quantised cache."""

    key: int
    value: int

    def __str__(self) -> str:
        """``8 bits``, or the form ``K:8,V:4`` if they differ."""
        bits = f"{self.key} bits"
        return bits if self.key == self.value else f"K:{self.key},V:{self.value}"

    @classmethod
    def parse(cls, given: str | int | None) -> KVBits | None:
        """``8``, ``"4"`` or ``"K:8,V:4"``; ``None`` is ``None``: K/V in the model's dtype.

        Raises:
            ArgumentError: it has another form, or the number of bits is not supported.
        """
        return None if given is None else KV_FORMAT.check("kv cache", "kv_format", given)


def _read_kv_bits(given: object) -> KVBits | None:
    text = given.strip() if isinstance(given, str) else str(as_integer(given))
    match = _KV_BITS.fullmatch(text)
    bits = match.groups() if match else (text, text)
    if all(one in map(str, KV_BITS) for one in bits):
        return KVBits(int(bits[0]), int(bits[1]))
    return None


def _read_token_budgets(given: object) -> list[tuple[int, int, int]] | None:
    try:
        rows = [tuple(map(as_integer, row)) for row in given]  # type: ignore[attr-defined]
    except TypeError:
        return None
    found: list[tuple[int, int, int]] = []
    for step, prefill, mixed in (row if len(row) == 3 else (None,) * 3 for row in rows):
        if step is None or prefill is None or mixed is None or step < 0 or min(prefill, mixed) < 1:
            return None
        found.append((step, prefill, mixed))
    return found


# Domains of budgets and durations.
ADAPTERS: Domain[Any] = Domain("a dict of different names with a folder each", _read_adapters)
ADAPTER = Domain(
    "a name and a folder, NAME=FOLDER",
    lambda pair: pair if _is_adapter(pair) else None,
    lambda text: tuple(text.split("=", 1)),
    metavar="NAME=FOLDER",
)
BUDGET = Domain(
    "bytes (65536, 512M, 2G) or whole blocks (256blocks), within 1..2**63",
    _read_budget,
    metavar="N",
)
NBYTES = Domain("bytes (65536, 512M, 2G), within 1..2**63", _read_nbytes, _read_nbytes, metavar="N")
NBYTES_A_DAY = Domain(
    "bytes per day (50G/day, 512M/day), within 1..2**63",
    _read_nbytes_a_day,
    _read_nbytes_a_day,
    metavar="N/day",
)
WIRED_LIMIT = Domain(
    f"{RECOMMENDED!r} or {NBYTES.what}", _read_wired_limit, _read_wired_limit, metavar="N"
)
DURATION = Domain(
    "seconds (90, 90s), minutes, hours, days or weeks (30m, 12h, 7d, 2w), above 0",
    _read_duration,
    _read_duration,
    metavar="T",
)
KEEP_ALIVE = Domain(
    "0, seconds (300, 300s), a duration (90s, 5m, 1h30m), or -1 for no end",
    _read_keep_alive,
    metavar="T",
)
KV_FORMAT = Domain(f"{KV_BITS_LISTED} or one for each, such as K:8,V:4", _read_kv_bits, metavar="N")
STEP_SECONDS = number(0, 3600, "seconds within 0..3600")
TOKEN_BUDGETS = Domain(
    "a list of triples of whole numbers: a step, at least 0, and two budgets, at least 1",
    _read_token_budgets,
)
WINDOW = whole(1, MAX_WINDOW - 1, "a whole number, at least 1")
NUM_SINK_TOKENS = whole(0, MAX_WINDOW - 1, "a whole number, at least 0")


@dataclass(frozen=True)
class StreamingWindow:
    """Keep the first ``num_sink_tokens`` and the last ``window`` tokens of each sequence, so that
    it can continue without end in bounded memory (StreamingLLM, Xiao et al. 2023).

    Both are rounded up to whole blocks, and several blocks are dropped at a time.

    Raises:
        ArgumentError: a number is out of range.
    """

    window: int
    num_sink_tokens: int = DEFAULT_NUM_SINK_TOKENS

    def __post_init__(self) -> None:
        for name, domain in (("window", WINDOW), ("num_sink_tokens", NUM_SINK_TOKENS)):
            object.__setattr__(self, name, domain.check("kv cache", name, getattr(self, name)))


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits of the scheduler: of requests that run at once, and of tokens in a step. The names
    are vLLM's.

    Args:
        max_model_len: the most tokens of a prompt and its answer together; with ``None`` the budget
            is the only limit.
        Others: the engine options of the same names, as the scheduler takes them. What they mean
            and which values they have is declared in ``engine_options.py``, whose defaults these
            are: type checkers can't derive attributes from the keywords that an engine takes.

    Raises:
        ArgumentError: a step can't hold a token of each sequence.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    max_num_mixed_tokens: int = 512
    watermark: float = 0.05
    priority_steps: int = 1000
    enable_prefix_caching: bool = True
    max_model_len: int | None = None
    num_draft_tokens: int = 0
    num_history_tokens: int = 0
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_mixed_tokens"):
            if getattr(self, name) < self.max_num_seqs:
                raise ArgumentError(
                    f"[scheduler] {name} {getattr(self, name)} must be at least max_num_seqs "
                    f"{self.max_num_seqs}: a step holds a token of each running sequence",
                    name,
                )

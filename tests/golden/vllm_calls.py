"""Recorded calls of vLLM's KV cache manager with their outcomes: the golden traces of
`tests/golden/vllm_traces/`, to be replayed.

    for path in TRACES:
        trace = load_trace(path)
        for call in trace.calls:
            match call:
                case AllocateSlots(): ...

A trace is a JSON file with the fields of `Trace`, one call to a line, where `op` names the class of
the call. Fields that have their default are left out. `python tests/golden/make_vllm_traces.py`
writes the files; that needs vLLM, reading them does not.

A request is its tokens: the prompt (`AddRequest`), then the sampled ones (`AppendTokens`). The
driver counts `num_computed_tokens`, which is 0 at first and after every `FreeRequest`; an
`AllocateSlots` that is not refused adds `num_new_computed_tokens + num_new_tokens`. For a request
without blocks, `GetComputedBlocks` is called and then at once `AllocateSlots`, with the hit as
`num_new_computed_tokens`; a running request has no hit. A lookup takes nothing, and an allocation
need not follow it.

Since ids of blocks differ between implementations, a block's content has a name: see
`content_name`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

TRACE_DIR = Path(__file__).parent / "vllm_traces"
TRACES = sorted(TRACE_DIR.glob("*.json"))


def content_name(
    token_ids: Sequence[int], lora: str | None = None, cache_salt: str | None = None
) -> str:
    """The name of a block's content, 10 hex digits: the first of SHA-256 over the JSON of
    `[lora, cache_salt, token_ids]` without spaces.

    Args:
        token_ids: all tokens from the first of the sequence to the last of the block.
    """
    text = json.dumps([lora, cache_salt, list(token_ids)], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def content_names(
    token_ids: Sequence[int],
    block_size: int,
    lora: str | None = None,
    cache_salt: str | None = None,
) -> list[str]:
    """The names of all full blocks of a sequence, `[len(token_ids) // block_size]`."""
    ends = range(block_size, len(token_ids) + 1, block_size)
    return [content_name(token_ids[:end], lora, cache_salt) for end in ends]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call, and the pool after it."""

    op: ClassVar[str]
    request: str = ""
    """Id of the request; "" for `ResetPrefixCache`."""
    free: int
    """Free blocks after the call, cached ones included: `num_blocks - 1`, all but the null block,
    when nothing is held.
    """
    usage: float
    """Held blocks over `num_blocks - 1`, as vLLM reports it, rounded to 6 digits."""
    cached: int
    """Different contents in the prefix index. Two blocks of the same content count once."""


@dataclass(frozen=True, kw_only=True)
class AddRequest(Call):
    """A request arrives; its contents are named with `lora` and `cache_salt`. The manager is not
    called.
    """

    op: ClassVar[str] = "add"
    token_ids: list[int]
    """The prompt."""
    lora: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, kw_only=True)
class GetComputedBlocks(Call):
    """`get_computed_blocks(request)`."""

    op: ClassVar[str] = "get"
    hit: int
    """Tokens found: a multiple of the block size, at most the request's tokens less one."""


@dataclass(frozen=True, kw_only=True)
class AllocateSlots(Call):
    """`allocate_slots(request, num_new_tokens, num_new_computed_tokens, new_computed_blocks)`."""

    op: ClassVar[str] = "allocate"
    num_new_tokens: int
    num_new_computed_tokens: int = 0
    """The hit of the `GetComputedBlocks` just before."""
    full_sequence_must_fit: bool = False
    """vLLM's admission gate: refuse also if the blocks of all the request's tokens do not fit."""
    refused: bool = False
    """vLLM returned None, and nothing has changed."""
    blocks: int = 0
    """Blocks that the request holds after the call."""
    evicted: list[str] = dataclasses.field(default_factory=list)
    """Contents that blocks gave up for this call, in order, one entry for each block. A content
    that a second block holds, too, can still be found.
    """
    stored: list[str] = dataclasses.field(default_factory=list)
    """Contents that entered the index with this call, in order: those of the blocks that are full
    once these tokens are computed.
    """


@dataclass(frozen=True, kw_only=True)
class AppendTokens(Call):
    """Sampled tokens are added to the request. The manager is not called."""

    op: ClassVar[str] = "append"
    token_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class FreeRequest(Call):
    """`free(request)`. A request that holds nothing may be freed."""

    op: ClassVar[str] = "free"
    reason: str
    """"finished" and "aborted": the request is gone. "preempted": it waits with all its tokens,
    none of them computed. The manager makes no difference between them.
    """


@dataclass(frozen=True, kw_only=True)
class ResetPrefixCache(Call):
    """`reset_prefix_cache()`."""

    op: ClassVar[str] = "reset"
    done: bool
    """False, and nothing has changed, while any block is held."""


CALLS: dict[str, type[Call]] = {
    cls.op: cls
    for cls in (
        AddRequest,
        GetComputedBlocks,
        AllocateSlots,
        AppendTokens,
        FreeRequest,
        ResetPrefixCache,
    )
}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One scenario, which begins with an empty pool.

    At its end everything is freed, and one request as large as the pool evicts everything cached,
    which shows the whole order of the free queue.
    """

    name: str
    vllm: str
    """Version of the vLLM that was recorded."""
    about: str
    num_blocks: int
    """The null block included."""
    block_size: int
    calls: list[Call]


def load_trace(path: Path) -> Trace:
    """Read one file. Raises KeyError or TypeError for a call or field that this module does not
    know.
    """
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    calls = [CALLS[call.pop("op")](**call) for call in fields.pop("calls")]
    return Trace(name=path.stem, calls=calls, **fields)

"""Formats a :class:`PrefixReport` as a sentence and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.request import REASONS, PrefixReport, Reason

# Tokens to show of each text, from the position on where a prompt differs from the cached one.
NUM_TEXT_TOKENS = 48

# The rest of a sentence, by the reason.
_EXPLANATIONS: dict[Reason, str] = {
    "hit": "all whole blocks",
    "new": REASONS["new"],
    "continued": "it goes on where {other} ended, at token {position}",
    "changed": "it left {other} at token {position}: {change}",
    "no_state": "from token {position} on its K/V are there, and the recurrent state was not kept; "
    "a larger --kv-cache-bytes keeps more",
    "pending": "from token {position} on, {other} is being computed",
    "evicted": "from token {position} on, what {other} computed was evicted; a larger "
    "--kv-cache-bytes keeps more",
}
_CHANGES = {
    "inserted": "{found} inserted",
    "removed": "{expected} removed",
    "replaced": "{expected} replaced by {found}",
    "reordered": "{found} in another order",
}


def explanation(report: PrefixReport) -> str:
    """Why no more of a prompt was cached, in a sentence that contains none of its text."""
    cached = f"{report.num_cached_tokens:,} of {_tokens(report.num_prompt_tokens)} cached"
    why = _EXPLANATIONS[report.reason]
    if report.num_read_tokens:
        cached += f", {report.num_read_tokens:,} of them on disk"
        why = "the rest is not there" if report.reason == "new" else why
    return f"{cached}: " + why.format(
        other=report.other_request_id, position=f"{report.position:,}", change=_change(report)
    )


def _change(report: PrefixReport) -> str:
    change = report.change()
    if change is None:
        return ""
    expected, found = change.num_expected, change.num_found
    is_open = max(expected, found) >= max(len(report.expected), len(report.found))
    if is_open and change.kind == "replaced":
        return "all that follows is different"
    return _CHANGES[change.kind].format(expected=_tokens(expected), found=_tokens(found))


def _tokens(number: int) -> str:
    return f"{number:,} token{'' if number == 1 else 's'}"


def report_body(report: PrefixReport, tokenizer: TokenizerWrapper | None = None) -> dict[str, Any]:
    """A report as JSON; with a tokenizer, it includes the texts around the change."""
    change = report.change()
    body: dict[str, Any] = {
        "request_id": report.request_id,
        "prompt_tokens": report.num_prompt_tokens,
        "cached_tokens": report.num_cached_tokens,
        "read_tokens": report.num_read_tokens,
        "reason": report.reason,
        "position": report.position,
        "compared_with": report.other_request_id,
        "change": None if change is None else change._asdict(),
        "explanation": explanation(report),
    }
    if tokenizer is not None:
        body["text"] = report_texts(report, tokenizer)
    return body


def report_texts(report: PrefixReport, tokenizer: TokenizerWrapper) -> dict[str, str]:
    """The texts around the position where a prompt differs from the cached one."""
    return {
        "before": _text(tokenizer, report.before),
        "cached": _text(tokenizer, report.expected[:NUM_TEXT_TOKENS]),
        "prompt": _text(tokenizer, report.found[:NUM_TEXT_TOKENS]),
    }


def _text(tokenizer: TokenizerWrapper, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(token_ids)) if token_ids else ""
    return text

"""What errors look like: the values that messages show, and what a request fails with. Imports no
MLX.
"""

from __future__ import annotations

import contextlib
import traceback

MAX_SHOWN = 80


def shown(value: object) -> str:
    """A value as an error message shows it: on one line, at most ``MAX_SHOWN`` characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a {type(value).__name__} that has no repr"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


# A reader's own loop, task or program would take these for its own end.
_ENDS_OF_SOMETHING_ELSE = (StopIteration, StopAsyncIteration)


class RequestError(RuntimeError):
    """What failed a request was no error that its reader may be handed; it is the ``__cause__``."""


def request_error(error: BaseException) -> Exception:
    """The error that a request's reader gets for what its own code raised.

    ``SystemExit``, ``CancelledError``, ``GeneratorExit`` and the like would end the reader's
    program, task or loop when they are raised there, so they come as a :class:`RequestError`."""
    if isinstance(error, Exception) and not isinstance(error, _ENDS_OF_SOMETHING_ELSE):
        return error
    wrapped = RequestError(
        f"[engine] the request's own code raised {type(error).__name__}: {shown(error)}"
    )
    wrapped.__cause__ = error
    return wrapped


def forget_frames(error: BaseException, where: str | None = None) -> None:
    """Drop the traceback of an error and of each that led to it; ``where`` keeps it as a note that
    begins so.

    As frames it would keep what their variables hold as long as somebody keeps the error: logits,
    graphs that hold whole slabs, the engine itself."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if link.__traceback__ is not None:
            lines = traceback.format_tb(link.__traceback__) if where is not None else []
            link.__traceback__ = None
            with contextlib.suppress(
                Exception
            ):  # an error of the user's own making may refuse notes
                if lines:
                    link.add_note(f"{where}:\n{''.join(lines)}")
        link = link.__cause__ or link.__context__


class CacheFullError(RuntimeError):
    """The budget can't hold what a step would add; nothing was changed. The message says what is
    needed, what there is, and what to do.
    """


class PromptTooLongError(CacheFullError):
    """The budget or the context can't hold a prompt; nothing was changed."""


def prompt_too_long(num_tokens: int, block_size: int, num_blocks: int) -> PromptTooLongError:
    """The error of a prompt that the budget of ``num_blocks`` can't hold."""
    return PromptTooLongError(
        f"[paged cache] a prompt of {num_tokens} tokens needs {-(-num_tokens // block_size)} "
        f"blocks of {block_size}, the budget holds {num_blocks}; raise --kv-cache-bytes or shorten "
        "the prompt"
    )


def prompt_beyond_context(num_tokens: int, max_model_len: int) -> PromptTooLongError:
    """The error of a prompt that leaves no room for an answer within ``max_model_len``."""
    return PromptTooLongError(
        f"[context] a prompt of {num_tokens} tokens leaves no room for an answer: prompt and "
        f"answer have at most {max_model_len} tokens together; shorten the prompt or raise "
        "max_model_len"
    )

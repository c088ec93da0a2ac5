"""Errors: how their messages show values and quote other errors, and what a failed request's reader
gets. Imports no MLX.
"""

from __future__ import annotations

import contextlib
import traceback

MAX_SHOWN = 80  # characters of a value in a message
MAX_QUOTED = 300  # characters of another error's text in a message
# What moves a terminal's cursor, sets its title or breaks a line, as Python writes it.
_CONTROLS = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
_CONTROLS_IN_LINES = {code: text for code, text in _CONTROLS.items() if chr(code) not in "\n\t"}


class ArgumentError(ValueError):
    """A value that an argument can't have.

    Attributes:
        argument: the argument's name, as the message has it. A program that calls it by another
            name, such as ``--kv-cache-bytes``, can put that in its place.
    """

    def __init__(self, message: str, argument: str | None = None):
        super().__init__(message)
        self.argument = argument


def shown(value: object) -> str:
    """A value as an error message shows it: on one line, at most ``MAX_SHOWN`` characters."""
    try:
        return one_line(repr(value), MAX_SHOWN)
    except Exception:
        # A value of any type may come in as an argument, and its __repr__ may raise anything.
        return f"a {type(value).__name__} that has no repr"


def one_line(value: object, limit: int = MAX_QUOTED) -> str:
    """The text of an error, or of any other value, on one line of at most ``limit`` characters,
    without anything that a terminal would obey.
    """
    text = " ".join(str(value).split()).translate(_CONTROLS)
    if isinstance(value, KeyError):
        text = f"{text} is missing"
    elif not text and isinstance(value, BaseException):
        text = type(value).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def without_room(text: str) -> str:
    """The text of an error without the part of the package that it comes from: without ``[chat]``
    in front.
    """
    return text.partition("] ")[2] if text.startswith("[") and "] " in text else text


def harmless(text: str) -> str:
    """Lines as a terminal may be shown them: of control characters, only line ends and tabs are
    obeyed, and others are seen.
    """
    return text.translate(_CONTROLS_IN_LINES)


def reason(error: BaseException) -> str:
    """The type and the text of an error that code of others raised, on one line."""
    return f"{type(error).__name__}: {one_line(error)}"


def type_and_place(error: BaseException) -> str:
    """The type of an error and the line that raised it, such as ``ValueError at
    engine/steps.py:120``, for those who may not see its message: it may quote what a user wrote.
    """
    frames = frames_of(error)
    if not frames:
        return type(error).__name__
    *_, folder, file = "", *frames[-1].filename.split("/")
    return f"{type(error).__name__} at {f'{folder}/{file}'.lstrip('/')}:{frames[-1].lineno}"


def words_for_all(error: BaseException) -> str:
    """What may be said of an error to others than those who caused it: the words of this package's
    own errors, which quote nothing, and else :func:`type_and_place`.
    """
    is_ours = type(error).__module__.partition(".")[0] == __name__.partition(".")[0]
    # This package's ValueErrors show the value.
    if is_ours and not isinstance(error, ValueError):
        return without_room(one_line(error))
    return type_and_place(error)


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Where an error came through, the innermost last; also when its frames were forgotten."""
    return [*traceback.extract_tb(error.__traceback__), *getattr(error, _FRAMES, ())]


def system_reason(error: Exception) -> str:
    """Why the system refused something, without the file's name, which the message has already."""
    return getattr(error, "strerror", None) or one_line(error)


# A reader's own loop, task or program would take these for its own end.
_ENDS_OF_SOMETHING_ELSE = (StopIteration, StopAsyncIteration)


class RequestError(RuntimeError):
    """A request was failed by something that its reader can't be handed; see ``__cause__``."""


_FRAMES = "_mlx_paged_frames"  # an attribute of errors whose frames were forgotten


def request_error(error: BaseException) -> Exception:
    """The error that a request's reader gets for what the request's own code raised.

    ``SystemExit``, ``CancelledError``, ``GeneratorExit`` and the like would end the reader's
    program, task or loop when they are raised there, so they come as a :class:`RequestError`.
    """
    if isinstance(error, Exception) and not isinstance(error, _ENDS_OF_SOMETHING_ELSE):
        return error
    wrapped = RequestError(f"[engine] the request's own code raised {type_and_place(error)}")
    wrapped.__cause__ = error
    return wrapped


def forget_frames(error: BaseException, where: str | None = None) -> None:
    """Drop the traceback of an error and of each error that led to it; :func:`frames_of` still
    knows its lines.

    For as long as there is a reference to the error, its frames would keep what their variables
    hold: logits, graphs that hold whole slabs, the engine itself.

    Args:
        where: the beginning of a note that keeps the traceback as text; ``None`` keeps nothing.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if link.__traceback__ is not None:
            frames = frames_of(link)
            lines = traceback.format_tb(link.__traceback__) if where is not None else []
            link.__traceback__ = None
            # An error of the user's own making may refuse attributes and notes.
            with contextlib.suppress(Exception):
                setattr(link, _FRAMES, frames)
                if lines:
                    link.add_note(f"{where}:\n{''.join(lines)}")
        link = link.__cause__ or link.__context__


class CacheFullError(RuntimeError):
    """The budget can't hold what a step would add, and nothing was changed.

    Attributes:
        argument: the argument that the message advises to raise.
    """

    def __init__(self, message: str, argument: str = "kv_cache_bytes"):
        super().__init__(message)
        self.argument = argument


class PromptTooLongError(CacheFullError):
    """The budget or the context can't hold a prompt, and nothing was changed."""


def prompt_too_long(
    num_tokens: int, num_needed: int, block_size: int, num_blocks: int
) -> PromptTooLongError:
    return PromptTooLongError(
        f"[kv cache] a prompt of {num_tokens} tokens needs {num_needed} blocks of {block_size}, "
        f"the budget holds {num_blocks}; raise kv_cache_bytes or shorten the prompt"
    )


def prompt_beyond_context(
    num_tokens: int | str, max_model_len: int, context_length: int | None
) -> PromptTooLongError:
    """The error of a prompt that is as long as ``max_model_len`` or longer.

    Args:
        num_tokens: of the prompt; a text such as ``"more than 5120"`` where they were not all
            counted.
        context_length: the most that ``max_model_len`` may be; ``None``: anything.
    """
    way_out = "shorten the prompt or raise max_model_len"
    if context_length is not None:
        way_out += f", which may be {context_length}"
        if max_model_len >= context_length:
            way_out = "the model was made for no more; shorten the prompt"
    return PromptTooLongError(
        f"[context] a prompt of {num_tokens} tokens leaves no room for an answer: prompt and "
        f"answer have at most {max_model_len} tokens together; {way_out}",
        "max_model_len",
    )


class UnsuitableModelError(ValueError):
    """A model of mlx-lm can't run in the way that was tried; the message is the reason, as a part
    of a sentence.
    """

"""Errors, and how their messages show values and quote other errors. Does not import MLX."""

from __future__ import annotations

import contextlib
import traceback

# The exit status of a process whose engine was in the middle of a step that did not end.
STUCK_STATUS = 70
MAX_SHOWN = 80  # characters of a value in a message
MAX_QUOTED = 300  # characters of another error's text in a message
# Control characters and line separators; and those that reverse the order of what follows, which
# answers in some languages contain.
CONTROLS = (*range(32), *range(127, 160), 0x2028, 0x2029)
REVERSING = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
# Escaped as Python does.
_ESCAPED = {code: repr(chr(code))[1:-1] for code in (*CONTROLS, *REVERSING)}
_ESCAPED_IN_LINES = {code: _ESCAPED[code] for code in CONTROLS if chr(code) not in "\n\t"}


# What to write instead of public names that the previous version had. The next version drops them.
REMOVED = {
    **dict.fromkeys(
        ("attach", "attachment"),
        "give the model to mlx_paged.generate, stream_generate or batch_generate, which have "
        "mlx-lm's signatures (docs/guide/library.md)",
    ),
    **dict.fromkeys(
        ("Engine.hold_prompt_cache", "Engine.pin_prompt_cache"),
        "give the tokens too, import_prompt_cache(path, token_ids), or use a file of "
        "export_prompt_cache or save_snapshot, which has them (docs/guide/snapshots.md)",
    ),
}


class ArgumentError(ValueError):
    """An invalid value of an argument.

    Attributes:
        argument: the argument's name as in the message, in which a program can replace it by its
            flag, such as ``--kv-cache-bytes``.
    """

    def __init__(self, message: str, argument: str | None = None):
        super().__init__(message)
        self.argument = argument


def shown(value: object) -> str:
    """A value as an error message shows it: on one line, at most ``MAX_SHOWN`` characters."""
    try:
        return one_line(repr(value), MAX_SHOWN)
    except Exception:
        # __repr__ of an unknown type may raise anything.
        return f"a {type(value).__name__} that has no repr"


def one_line(value: object, limit: int = MAX_QUOTED) -> str:
    """The text of an error, or of any other value, on one line of at most ``limit`` characters,
    with control characters escaped.
    """
    text = " ".join(str(value).split()).translate(_ESCAPED)
    text = text.encode(errors="backslashreplace").decode()  # halves of characters, as in JSON
    if isinstance(value, KeyError):
        text = f"{text} is missing"
    elif not text and isinstance(value, BaseException):
        text = type(value).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def without_room(text: str) -> str:
    """The text of an error without the part of the package in front, such as ``[chat]``."""
    return text.partition("] ")[2] if text.startswith("[") and "] " in text else text


def harmless(text: str) -> str:
    """Lines that are safe to print on a terminal: control characters are escaped, except line ends
    and tabs.
    """
    return text.translate(_ESCAPED_IN_LINES)


def reason(error: BaseException) -> str:
    """The type and the text of an error of other code, on one line."""
    return f"{type(error).__name__}: {one_line(error)}"


def type_and_place(error: BaseException) -> str:
    """The type of an error and the line that raised it, such as ``ValueError at
    engine/steps.py:120``, for readers who may not see its message, which may quote a user's text.
    """
    frames = frames_of(error)
    if not frames:
        return type(error).__name__
    *_, folder, file = "", *frames[-1].filename.split("/")
    return f"{type(error).__name__} at {f'{folder}/{file}'.lstrip('/')}:{frames[-1].lineno}"


def words_for_all(error: BaseException) -> str:
    """A description of an error for other users than the one who caused it: the text of this
    package's own errors, which quote nothing, or else :func:`type_and_place`.
    """
    is_ours = type(error).__module__.partition(".")[0] == __name__.partition(".")[0]
    # This package's ValueErrors show the value.
    if is_ours and not isinstance(error, ValueError):
        return without_room(one_line(error))
    return type_and_place(error)


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an error's traceback, the innermost last, even after :func:`forget_frames`."""
    return [*traceback.extract_tb(error.__traceback__), *getattr(error, _FRAMES, ())]


def system_reason(error: Exception) -> str:
    """The reason of an ``OSError``, without the file's name, which the message has already."""
    return getattr(error, "strerror", None) or one_line(error)


# In a reader's generator, these would end its own loop.
_ENDS_OF_SOMETHING_ELSE = (StopIteration, StopAsyncIteration)


class RequestError(RuntimeError):
    """A request failed with an exception that can't be raised in its reader; see ``__cause__``."""


_FRAMES = "_mlx_paged_frames"  # an attribute of errors whose frames were forgotten


def request_error(error: BaseException) -> Exception:
    """The error to raise in a request's reader for an exception of the request's own code.

    ``SystemExit``, ``CancelledError``, ``GeneratorExit`` and the like would end the reader's
    program, task or loop, so they are wrapped in a :class:`RequestError`.
    """
    if isinstance(error, Exception) and not isinstance(error, _ENDS_OF_SOMETHING_ELSE):
        return error
    wrapped = RequestError(f"[engine] the request's own code raised {type_and_place(error)}")
    wrapped.__cause__ = error
    return wrapped


def forget_frames(error: BaseException, where: str | None = None) -> None:
    """Drop the tracebacks of an error and of its causes; :func:`frames_of` still returns their
    lines.

    As long as the error is referenced, its frames would keep their variables alive: logits, graphs
    with whole slabs, the engine itself.

    Args:
        where: the beginning of a note that keeps the traceback as text; ``None``: no note.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if link.__traceback__ is not None:
            frames = frames_of(link)
            lines = traceback.format_tb(link.__traceback__) if where is not None else []
            link.__traceback__ = None
            # A user's exception class may refuse attributes and notes.
            with contextlib.suppress(Exception):
                setattr(link, _FRAMES, frames)
                if lines:
                    link.add_note(f"{where}:\n{''.join(lines)}")
        link = link.__cause__ or link.__context__


class AdapterError(ArgumentError):
    """There is no such adapter, or it can't be loaded; the message is one line."""

    def __init__(self, what: str, argument: str = "adapter"):
        super().__init__(f"[adapters] {what}", argument)


class AdaptersInUseError(AdapterError):
    """There is no room for another adapter until a request for one of the loaded ones ends."""


class EngineStoppedError(RuntimeError):
    """The engine was shut down, or stopped by a failure, which is then the ``__cause__``."""


class StructuredOutputError(ValueError):
    """An answer can't be continued within its grammar."""


class ChatTemplateError(ValueError):
    """A message has a wrong form, or the template fails or rejects the messages.

    Attributes:
        argument: what can't be written, ``"messages"`` or ``"tools"``.
    """

    def __init__(self, message: str, argument: str = "messages"):
        super().__init__(message)
        self.argument = argument


class CacheFullError(RuntimeError):
    """What a step would add exceeds the budget; nothing was changed.

    Attributes:
        argument: the argument that the message suggests to raise.
    """

    def __init__(self, message: str, argument: str = "kv_cache_bytes"):
        super().__init__(message)
        self.argument = argument


class PromptTooLongError(CacheFullError):
    """A prompt exceeds the budget or the context limit; nothing was changed."""


def prompt_too_long(
    num_tokens: int, num_needed: int, block_size: int, num_blocks: int
) -> PromptTooLongError:
    return PromptTooLongError(
        f"[kv cache] a prompt of {num_tokens} tokens needs {num_needed} blocks of {block_size}, "
        f"the budget holds {num_blocks}; raise kv_cache_bytes or shorten the prompt"
    )


def prompt_beyond_context(
    num_tokens: int | str,
    max_model_len: int,
    context_length: int | None,
    has_answer: bool = True,
) -> PromptTooLongError:
    """The error for a prompt that is as long as ``max_model_len`` or longer.

    Args:
        num_tokens: of the prompt; a text such as ``"more than 5120"`` if they were not all counted.
        context_length: the maximum of ``max_model_len``, if there is one.
        has_answer: whether tokens are generated after it.
    """
    way_out = "shorten the prompt or raise max_model_len"
    if context_length is not None:
        way_out += f", which may be {context_length}"
        if max_model_len >= context_length:
            way_out = "the model was made for no more; shorten the prompt"
    words = (
        f"leaves no room for an answer: prompt and answer have at most {max_model_len} tokens "
        "together"
    )
    if not has_answer:
        words = f"is too long: it may have at most {max_model_len}"
    return PromptTooLongError(
        f"[context] a prompt of {num_tokens} tokens {words}; {way_out}", "max_model_len"
    )


class UnsuitableModelError(ValueError):
    """A model of mlx-lm can't run in the way that was tried; the message is the reason."""


class FailedCheckError(UnsuitableModelError):
    """A model of mlx-lm runs here, but its logits differ from mlx-lm's by more than rounding, or
    mlx-lm's own depend on where a prompt is cut.
    """

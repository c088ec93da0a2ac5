"""The files of a chat: saved conversations, their K/V beside them, and the history of its prompt.

A conversation is JSON, its messages as chat templates take them:

    {"format": "mlx_paged.chat", "version": 1, "messages": [{"role": "user", "content": "hi"}]}

``"kv_file"`` may name a file with its K/V, in the same folder. A bare list of messages can be read,
too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_paged.errors import one_line, system_reason
from mlx_paged.replaced_file import replaced_file

if TYPE_CHECKING:
    from mlx_paged.chat.conversation import Conversation

FORMAT = "mlx_paged.chat"
VERSION = 1
KV_SUFFIX = ".safetensors"


class TranscriptError(ValueError):
    """The file can't be read or written, or is not a conversation; the message is one line."""


class Transcript(NamedTuple):
    """What was read of a file.

    Attributes:
        messages: what is in their place, for the caller to check.
        kv_file: with the K/V, if it names one.
    """

    file: Path
    messages: list[Any]
    kv_file: Path | None


def save_messages(
    path: str | Path, messages: Sequence[Mapping[str, Any]], kv_file: str | None = None
) -> Path:
    """Write the file, aside first and then in its place, so that it is never half there.

    Only another saved conversation is overwritten.

    Args:
        kv_file: name of the file with the K/V, in the same folder.

    Raises:
        TranscriptError: there is another file, or the system refuses.
    """
    file = _expand(str(path))
    try:
        if file.exists() and not is_transcript(file):
            raise TranscriptError(
                f"{file} exists and is not a saved conversation; choose another name"
            )
        file = file.resolve()
        content: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        content |= {} if kv_file is None else {"kv_file": kv_file}
        content["messages"] = list(messages)
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        with replaced_file(file) as stream:
            stream.write(text.encode("utf-8", errors="replace"))
    except (OSError, RuntimeError) as error:  # RuntimeError: a circle of links
        raise TranscriptError(f"{file} can't be written: {system_reason(error)}") from error
    return file


def save_kv(conversation: Conversation, file: Path) -> str:
    """Write the K/V of a conversation that was saved to ``file`` beside it, have it name them, and
    return what was saved in words.

    Raises:
        ValueError: there are none that could be saved, or they can't be written.
    """
    kv_file = file.with_name(file.name + KV_SUFFIX)
    num_tokens = conversation.save_kv(kv_file)
    save_messages(file, conversation.messages, kv_file.name)
    nbytes = kv_file.stat().st_size
    return f"K/V of {num_tokens:,} tokens in {kv_file.name}, {nbytes / 1e6:.1f} MB"


def load_messages(path: str) -> Transcript:
    """Read a file.

    Raises:
        TranscriptError: it can't be read, or is not a conversation.
    """
    file = _expand(path)
    try:
        if file.exists() and not file.is_file():
            raise TranscriptError(f"{file} is not a file")
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TranscriptError(f"{file} can't be read: {system_reason(error)}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, TranscriptError):
            raise
        raise TranscriptError(f"{file} is not a conversation: {one_line(error)}") from error
    kv_file = None
    if isinstance(content, dict):
        if content.get("version", VERSION) != VERSION:
            raise TranscriptError(
                f"{file} is of version {content['version']!r}, and only {VERSION} can be read"
            )
        name = content.get("kv_file")
        # In the folder of the conversation, whatever the file says.
        if isinstance(name, str) and "\0" not in name and Path(name).name:
            kv_file = file.resolve().with_name(Path(name).name)
        content = content.get("messages")
    if not isinstance(content, list):
        raise TranscriptError(f"{file} is not a conversation: it has no list of messages")
    return Transcript(file, content, kv_file)


def is_transcript(file: Path) -> bool:
    """Whether the file is one that :func:`save_messages` wrote."""
    if not file.is_file():
        return False
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def history_path(environ: Mapping[str, str]) -> Path | None:
    """The file of the prompt's history, made if it is not there, which only its user may read.

    ``None`` where there is no place for it: no home, or one that can't be written to.
    """
    # The XDG specification says to ignore a path that is not absolute.
    state = environ.get("XDG_STATE_HOME", "")
    try:
        folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
        folder = folder / "mlx_paged"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = folder / "chat_history"
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError):
        return None
    return file


def _expand(path: str) -> Path:
    try:
        if "\0" in path:
            raise TranscriptError(f"{path!r} is not a name of a file")
        return Path(path).expanduser()
    except RuntimeError as error:
        raise TranscriptError(f"{path} can't be found: {error}") from error

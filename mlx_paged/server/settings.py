"""``ServerSettings``: the server's settings, each declared with its flag, and the API keys, read
from flags and files. Imports no MLX.
"""

from __future__ import annotations

import logging
import math
import os
import re
import stat
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any
from urllib.parse import urlsplit

from mlx_paged.errors import ArgumentError, shown, system_reason
from mlx_paged.options.argument_values import (
    ANY_TEXT,
    AT_LEAST_0,
    BOOL,
    Domain,
    Flag,
    Option,
    declared,
    matching,
    one_of,
    whole,
)
from mlx_paged.options.config import NBYTES
from mlx_paged.options.sampling_params import TASK, Task

logger = logging.getLogger("mlx_paged.server")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_KEY = re.compile(r"[!-~]{1,512}")  # printable ASCII without spaces, as headers can contain it
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9a-fA-F:.]+\]")
_INNER_EQUALS = re.compile(r"[^=]=+[^=]")
_MAX_FILE = 2**20  # bytes


@dataclass(frozen=True)
class ApiKey:
    """An API key and its user.

    Args:
        name: used in logs.
        key: the secret.
        is_named: whether the operator chose the name.
        models: the models that the key is for; ``None`` for all.
        is_admin: whether the key may load and unload models.
    """

    name: str
    key: str
    is_named: bool = True
    models: frozenset[str] | None = None
    is_admin: bool = False

    @property
    def user(self) -> tuple[str, str]:
        """Identifies the user. Keys with the same given name belong to one user. Each unnamed key
        is a separate user, identified by the key itself: its generated name depends on the order
        of the keys, which may differ at the next start.
        """
        return ("name", self.name) if self.is_named else ("key", self.key)

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r})"  # no secret in a traceback or a log


def _read_host_name(text: object) -> str | None:
    return text.lower() if isinstance(text, str) and _HOST.fullmatch(text) else None


def _read_origin(text: object) -> str | None:
    """``*``, or a scheme and a host, with an optional port."""
    if not isinstance(text, str):
        return None
    try:
        parts = urlsplit(text)
    except ValueError:
        return None
    is_origin = bool(parts.scheme and parts.netloc) and text.isprintable() and "@" not in text
    is_origin = is_origin and text == f"{parts.scheme}://{parts.netloc}"
    return text.lower() if is_origin or text == "*" else None


_HOST_NAME = Domain(
    "a name or an address without a port", _read_host_name, _read_host_name, metavar="NAME"
)
_ORIGIN = Domain(
    "* or an origin without a path, such as http://localhost:3000",
    _read_origin,
    _read_origin,
    metavar="ORIGIN",
)
_SECONDS = matching(
    "a number, at least 0", lambda value: 0 <= value < math.inf, parse=float, metavar="S"
)
_SECONDS_OR_NEVER = matching(
    "a number, at least 0",
    lambda value: value >= 0,
    parse=lambda text: float(text) or math.inf,
    metavar="S",
)
_LOG_LEVEL = replace(one_of("debug", "info", "warning", "error"), parse=str.lower)


def _setting(
    help: str, domain: Domain[Any] = BOOL, name: str = "", default_text: str = ""
) -> Option:
    """The declaration of a setting and its flag, as of an engine option.

    Args:
        domain: the domain of the value, or of each value of a tuple.
        name: the flag, if it isn't derived from the field's name.
    """
    return Option(help, domain, Flag(("server",), name), default_text=default_text)


@dataclass(frozen=True)
class ServerSettings:
    """The server's settings. Each field is declared with its flag.

    Args:
        api_keys: the accepted keys, from flags and a file; if empty, no key is needed.
        Others: see their help.
    """

    host: Annotated[str, _setting("address to listen on", ANY_TEXT)] = "127.0.0.1"
    port: Annotated[int, _setting("port to listen on, 0 for a free one", whole(0, 65535))] = 8000
    api_keys: tuple[ApiKey, ...] = ()
    allow_unauthenticated: Annotated[
        bool, _setting("listen without a key on an address that other machines can reach")
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        _setting(
            "a name to accept in the Host header, in addition to addresses and localhost; may be "
            "given several times",
            _HOST_NAME,
            "--allowed-host",
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        _setting(
            "a web origin whose pages may use the server, such as http://localhost:3000, or * for "
            "all; may be given several times",
            _ORIGIN,
            "--cors-origin",
        ),
    ] = ()
    share_cache: Annotated[
        bool,
        _setting("share cached K/V between users with different keys"),
    ] = False
    allow_cache_texts: Annotated[
        bool,
        _setting("let /v1/cache?text=true show excerpts of prompts to the users who sent them"),
    ] = False
    task: Annotated[
        Task | None,
        _setting(
            "what a model is for whose files don't say so: embed for embeddings by any decoder, "
            "score for a Qwen3-Reranker under another name",
            TASK,
        ),
    ] = None
    max_queue_len: Annotated[
        int, _setting("sequences that may wait; further requests are answered with 503", AT_LEAST_0)
    ] = 256
    max_body_bytes: Annotated[
        int,
        _setting("largest request body in bytes (65536, 512K, 16M)", NBYTES, default_text="16M"),
    ] = 16 * 2**20
    drain_seconds: Annotated[
        float, _setting("how long running answers may continue after SIGTERM", _SECONDS)
    ] = 30.0
    step_timeout: Annotated[
        float,
        _setting(
            "seconds after which a step of the engine counts as hanging and /health answers 503; 0 "
            "for never",
            _SECONDS_OR_NEVER,
        ),
    ] = 120.0
    adapters_dir: Annotated[
        str | None,
        _setting(
            "folder below which an administrator may load LoRA adapters while the server runs "
            "(/v1/load_lora_adapter); --max-adapters is then 8 by default, or the number of "
            "adapters if there are more",
            replace(ANY_TEXT, metavar="FOLDER"),
            default_text="none",
        ),
    ] = None
    no_idle_prefill: Annotated[
        bool,
        _setting(
            "while the server is idle, do not precompute finished conversations as the chat "
            "template will write them, without reasoning"
        ),
    ] = False
    keep_reasoning: Annotated[
        bool,
        _setting(
            "have the chat template keep the reasoning of all earlier answers, if it supports "
            "that, so that no history is recomputed for a new question"
        ),
    ] = False
    log_prompts: Annotated[bool, _setting("log the texts of prompts")] = False
    log_cache: Annotated[
        bool, _setting("log for each prompt where its cache hit ended, and why")
    ] = False
    log_level: Annotated[str, _setting("the lowest level to log on stderr", _LOG_LEVEL)] = "info"


def num_users(keys: Iterable[ApiKey]) -> int:
    """The number of users that the keys belong to."""
    return len({key.user for key in keys})


SERVER_SETTINGS: dict[str, Option] = {
    name: replace(option, default=getattr(ServerSettings, name))
    for name, option in declared(ServerSettings).items()
}


def read_api_keys(
    texts: Sequence[str], file: str | None = None, models: Collection[str] = ()
) -> tuple[ApiKey, ...]:
    """The keys given by ``--api-key`` and by the lines of ``--api-key-file``.

    Each is ``KEY``, or ``NAME KEY`` with a space in between. Keys can't contain spaces, so no part
    of a key is ever taken for a name and logged. Unnamed keys are called ``key#1``, ``key#2`` and
    so on by their position; given names can't contain ``#``. After a named key, ``admin`` and
    ``models=NAME,NAME`` may follow.

    Args:
        models: the names of the models that keys can be bound to.

    Raises:
        ArgumentError: a key is invalid, given twice or bound to an unknown model, or the file can't
            be read, has no key or is accessible to others. No message contains a key.
    """
    given = [("api_key", text) for text in texts]
    given += [("api_key_file", line) for line in _read_lines(file)] if file is not None else []
    keys: list[ApiKey] = []
    for index, (argument, text) in enumerate(given, start=1):
        words = text.split()
        is_named = len(words) > 1
        name, key, *rights = words if is_named else (f"key#{index}", text.strip())
        bound = [each.removeprefix("models=") for each in rights if each.startswith("models=")]
        allowed = frozenset(bound[0].split(",")) if bound else None
        unknown = sorted((allowed or frozenset()) - {*models})
        if is_named and not _NAME.fullmatch(name):
            what = f"the name of key {index} must be 1 to 64 letters, digits, or any of . _ @ -"
        elif not _KEY.fullmatch(key) or len(bound) + rights.count("admin") < len(rights):
            what = (
                f"key {index} must be 1 to 512 ASCII characters without spaces; NAME KEY gives it "
                "a name, and admin or models=NAME,NAME may follow"
            )
        elif len(bound) > 1 or rights.count("admin") > 1:
            what = f"key {index} has the same right twice"
        elif unknown and not models:
            what = f"key {index} is bound to models, of which this server has only one"
        elif unknown:
            names = ", ".join(map(shown, models))
            what = f"key {index} is bound to {shown(unknown[0])}; this server has {names}"
        elif any(key == other.key for other in keys):
            what = f"key {index} is given twice"
        else:
            keys.append(ApiKey(name, key, is_named, allowed, "admin" in rights))
            continue
        raise ArgumentError(f"[server] {argument}: {what}", argument)
    return tuple(keys)


def first_key(file: str) -> str:
    """The first key of a key file, for a client.

    Raises:
        ArgumentError: as of :func:`read_api_keys`.
    """
    words = _read_lines(file)[0].split()
    return words[min(1, len(words) - 1)]


def in_words(keys: Sequence[ApiKey]) -> str:
    """The number of keys, and of their users if that is smaller, in words."""
    num_keys, users = len(keys), num_users(keys)
    of_users = f" of {users} user{'s' * (users > 1)}" if users < num_keys else ""
    return f"{num_keys} key{'s' * (num_keys > 1)}{of_users}"


class KeyFile:
    """The keys of ``--api-key`` and of a file that is reread while the server runs.

    If the file can't be used, because it is missing, has no key or is accessible to others, the
    keys stay the same and an error is logged.

    Args:
        texts, file, models: as for :func:`read_api_keys`.
        keys: the current keys.
    """

    def __init__(
        self,
        texts: Sequence[str],
        file: str,
        keys: tuple[ApiKey, ...],
        models: Collection[str] = (),
    ):
        self.keys = keys
        self._models = models
        self._texts = texts
        self._file = file
        self._read = self._seen = _state_of(file)

    def reread_if_changed(self) -> None:
        """Reread the file if it has changed, but not since the previous call of this method."""
        now = _state_of(self._file)
        is_settled, self._seen = now == self._seen, now
        if is_settled and now != self._read:
            self.reread()

    def reread(self) -> None:
        self._read = _state_of(self._file)
        try:
            self.keys = read_api_keys(self._texts, self._file, self._models)
        except ArgumentError as error:
            what = str(error).removeprefix("[server] ")
            logger.error("the API keys were not changed: %s", what)
        else:
            logger.info("the API keys were reread: %s", in_words(self.keys))


def _state_of(file: str) -> tuple[int, ...] | None:
    """A value that changes when the file does; ``None`` if there is no file."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    # Timestamps are coarse, and two changes within milliseconds may have the same ones.
    times = found.st_mtime_ns, found.st_ctime_ns
    return found.st_dev, found.st_ino, found.st_mode, found.st_size, *times


def seems_named_by_equals(key: ApiKey) -> bool:
    """Whether an unnamed key looks like ``NAME=KEY``, which does not give it a name."""
    return not key.is_named and _INNER_EQUALS.search(key.key) is not None


def _read_lines(file: str) -> list[str]:
    """The lines of a key file without blank lines and comments; checks the file's mode."""
    try:
        with open(file, encoding="utf-8") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            text = opened.read(_MAX_FILE + 1)
    except (OSError, UnicodeDecodeError) as error:
        what = f"can't be read: {system_reason(error)}"
    else:
        lines = [line for line in map(str.strip, text.splitlines()) if line and line[0] != "#"]
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            what = f"can be read or written by other users (mode {mode:o}); run chmod 600 on it"
        elif len(text) > _MAX_FILE:
            what = f"has more than {_MAX_FILE:,} characters"
        elif not lines:
            what = "has no key"
        else:
            return lines
    raise ArgumentError(f"[server] api_key_file {shown(file)} {what}", "api_key_file")

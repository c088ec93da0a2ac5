"""Reads API keys from flags and files. Imports no MLX."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Sequence

from mlx_paged.errors import ArgumentError, shown, system_reason
from mlx_paged.server.settings import ApiKey, num_users

logger = logging.getLogger("mlx_paged.server")

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_KEY = re.compile(r"[!-~]{1,512}")  # printable ASCII without spaces, as headers can contain it
_INNER_EQUALS = re.compile(r"[^=]=+[^=]")
_MAX_FILE = 2**20  # bytes


def read_api_keys(texts: Sequence[str], file: str | None = None) -> tuple[ApiKey, ...]:
    """The keys given by ``--api-key`` and by the lines of ``--api-key-file``.

    Each is ``KEY``, or ``NAME KEY`` with a space in between. Keys can't contain spaces, so no part
    of a key is ever taken for a name and logged. Unnamed keys are called ``key#1``, ``key#2`` and
    so on by their position; given names can't contain ``#``.

    Raises:
        ArgumentError: a key is invalid or given twice, or the file can't be read, has no key or is
            accessible to others. No message contains a key.
    """
    given = [("api_key", text) for text in texts]
    if file is not None:
        lines = _lines(file)
        if not lines:
            raise ArgumentError(f"[server] api_key_file {shown(file)} has no key", "api_key_file")
        given += [("api_key_file", line) for line in lines]
    keys: list[ApiKey] = []
    for index, (argument, text) in enumerate(given, start=1):
        key = _parsed(text, argument, index)
        if any(key.key == other.key for other in keys):
            raise ArgumentError(f"[server] {argument}: key {index} is given twice", argument)
        keys.append(key)
    return tuple(keys)


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
        texts, file: as for :func:`read_api_keys`.
        keys: the current keys.
    """

    def __init__(self, texts: Sequence[str], file: str, keys: tuple[ApiKey, ...]):
        self.keys = keys
        self._texts = texts
        self._file = file
        self._read = self._seen = _state_of(file)

    def look(self) -> None:
        """Reread the file if it has changed, but not since the previous call of this method."""
        now = _state_of(self._file)
        is_settled, self._seen = now == self._seen, now
        if is_settled and now != self._read:
            self.read_again()

    def read_again(self) -> None:
        self._read = _state_of(self._file)
        try:
            self.keys = read_api_keys(self._texts, self._file)
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


def _parsed(text: str, argument: str, index: int) -> ApiKey:
    words = text.split(maxsplit=1)
    is_named = len(words) == 2
    name, key = words if is_named else (f"key#{index}", text.strip())
    if is_named and not _NAME.fullmatch(name):
        raise ArgumentError(
            f"[server] {argument}: the name of key {index} must be 1 to 64 letters, digits, "
            "or any of . _ @ -",
            argument,
        )
    if not _KEY.fullmatch(key):
        raise ArgumentError(
            f"[server] {argument}: key {index} must be 1 to 512 ASCII characters without spaces; "
            "NAME KEY gives it a name",
            argument,
        )
    return ApiKey(name, key, is_named)


def _lines(file: str) -> list[str]:
    """The lines of a key file without blank lines and comments; checks the file's mode."""
    try:
        with open(file, encoding="utf-8") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if stat.S_IMODE(mode) & (stat.S_IRWXG | stat.S_IRWXO):
                raise ArgumentError(
                    f"[server] api_key_file {shown(file)} can be read or written by other users "
                    f"(mode {stat.S_IMODE(mode):o}); run chmod 600 on it",
                    "api_key_file",
                )
            text = opened.read(_MAX_FILE + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(
            f"[server] api_key_file {shown(file)} can't be read: {system_reason(error)}",
            "api_key_file",
        ) from error
    if len(text) > _MAX_FILE:
        raise ArgumentError(
            f"[server] api_key_file {shown(file)} has more than {_MAX_FILE:,} characters",
            "api_key_file",
        )
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]

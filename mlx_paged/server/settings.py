"""``ServerSettings``: the server's settings, each declared with its flag. Imports no MLX."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import urlsplit

from mlx_paged.argument_values import AT_LEAST_0, BOOL, Domain, Flag, Option, one_of, such, whole
from mlx_paged.config import NBYTES


@dataclass(frozen=True)
class ApiKey:
    """An API key and its user.

    Args:
        name: used in logs.
        key: the secret.
        is_named: whether the operator chose the name.
    """

    name: str
    key: str
    is_named: bool = True

    @property
    def user(self) -> tuple[str, str]:
        """Identifies the user. Keys with the same given name belong to one user. Each unnamed key
        is a separate user, identified by the key itself: its generated name depends on the order
        of the keys, which may differ at the next start.
        """
        return ("name", self.name) if self.is_named else ("key", self.key)

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r})"  # no secret in a traceback or a log


_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9a-fA-F:.]+\]")


def _read_host_name(text: object) -> str | None:
    return text.lower() if isinstance(text, str) and _HOST_NAME.fullmatch(text) else None


def _read_origin(text: object) -> str | None:
    """``*``, or a scheme and a host, with an optional port."""
    if not isinstance(text, str):
        return None
    try:
        parts = urlsplit(text)
    except ValueError:
        return None
    is_right = bool(parts.scheme and parts.netloc) and text.isprintable() and "@" not in text
    is_right = is_right and text == f"{parts.scheme}://{parts.netloc}"
    return text.lower() if is_right or text == "*" else None


def setting(
    default: object, help: str, domain: Domain[Any] = BOOL, name: str = "", says: str = ""
) -> Any:
    """A field and its flag, declared in the same way as an engine option.

    Args:
        domain: the domain of the value, or of each value of a tuple.
        name: the flag, if it isn't derived from the field's name.
    """
    option = Option(help, domain, Flag(("server",), name), default=default, says=says)
    return field(default=default, metadata={"declared": option})


@dataclass(frozen=True)
class ServerSettings:
    """The server's settings. Each field is declared with its flag.

    Args:
        api_keys: the accepted keys, from flags and a file; if empty, no key is needed.
        Others: see their help.
    """

    host: str = setting(
        "127.0.0.1", "address to listen on", such("a text", lambda text: isinstance(text, str))
    )
    port: int = setting(8000, "port to listen on, 0 for a free one", whole(0, 65535))
    api_keys: tuple[ApiKey, ...] = ()
    allow_unauthenticated: bool = setting(
        False, "listen without a key on an address that other machines can reach"
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "a name to accept in the Host header, in addition to addresses and localhost; may be given "
        "several times",
        Domain(
            "a name or an address without a port", _read_host_name, _read_host_name, metavar="NAME"
        ),
        "--allowed-host",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "a web origin whose pages may use the server, such as http://localhost:3000, or * for all; "
        "may be given several times",
        Domain(
            "* or an origin without a path, such as http://localhost:3000",
            _read_origin,
            _read_origin,
            metavar="ORIGIN",
        ),
        "--cors-origin",
    )
    share_cache: bool = setting(False, "share cached K/V between users with different keys")
    allow_cache_texts: bool = setting(
        False, "let /v1/cache?text=true show excerpts of prompts to the users who sent them"
    )
    max_queue_len: int = setting(
        256, "sequences that may wait; further requests are answered with 503", AT_LEAST_0
    )
    max_body_bytes: int = setting(
        16 * 2**20, "largest request body in bytes (65536, 512K, 16M)", NBYTES, says="16M"
    )
    drain_seconds: float = setting(
        30.0,
        "how long running answers may continue after SIGTERM",
        such("a number, at least 0", lambda value: 0 <= value < math.inf, parse=float, metavar="S"),
    )
    step_timeout: float = setting(
        120.0,
        "seconds after which a step of the engine counts as hanging and /health answers 503; 0 for "
        "never",
        such(
            "a number, at least 0",
            lambda value: value >= 0,
            parse=lambda text: float(text) or math.inf,
            metavar="S",
        ),
    )
    no_idle_prefill: bool = setting(
        False,
        "while the server is idle, do not precompute finished conversations as the chat template "
        "will write them, without reasoning",
    )
    keep_reasoning: bool = setting(
        False,
        "have the chat template keep the reasoning of all earlier answers, if it supports that, so "
        "that no history is recomputed for a new question",
    )
    log_prompts: bool = setting(False, "log the texts of prompts")
    log_cache: bool = setting(False, "log for each prompt where its cache hit ended, and why")
    log_level: str = setting(
        "info",
        "the lowest level to log on stderr",
        replace(one_of("debug", "info", "warning", "error"), parse=str.lower),
    )


def num_users(keys: Iterable[ApiKey]) -> int:
    """The number of users that the keys belong to."""
    return len({key.user for key in keys})


SERVER_SETTINGS: dict[str, Option] = {
    each.name: each.metadata["declared"] for each in fields(ServerSettings) if each.metadata
}

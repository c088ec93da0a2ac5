"""``ServerSettings``: how the server behaves, each with its flag. Imports no MLX."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import urlsplit

from mlx_paged.config import NBYTES
from mlx_paged.declarations import Flag, Option
from mlx_paged.domains import AT_LEAST_0, BOOL, Domain, one_of, such, whole


@dataclass(frozen=True)
class ApiKey:
    """A key that a client may show, and whose it is.

    Args:
        name: for logs.
        key: the secret.
        is_named: whether the operator gave the name.
    """

    name: str
    key: str
    is_named: bool = True

    @property
    def user(self) -> tuple[str, str]:
        """Whose it is. Keys of one given name are one user's. A key without a name is a user of
        its own, whatever it is called: it may be given in another order at the next start.
        """
        return ("name", self.name) if self.is_named else ("key", self.key)

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r})"  # no secret in a traceback or a log


_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9a-fA-F:.]+\]")


def _read_host_name(text: object) -> str | None:
    return text.lower() if isinstance(text, str) and _HOST_NAME.fullmatch(text) else None


def _read_origin(text: object) -> str | None:
    """``*``, or a scheme and a host, with a port where it is not the scheme's own."""
    if not isinstance(text, str):
        return None
    try:
        parts = urlsplit(text)
    except ValueError:
        return None
    is_right = bool(parts.scheme and parts.netloc) and text.isprintable() and "@" not in text
    is_right = is_right and text == f"{parts.scheme}://{parts.netloc}"
    return text.lower() if is_right or text == "*" else None


_LOG_LEVELS = ("debug", "info", "warning", "error")


def setting(
    default: object, help: str, domain: Domain[Any] = BOOL, name: str = "", says: str = ""
) -> Any:
    """A field with its flag, declared as an option of an engine is.

    Args:
        domain: of the flag's values; of each, where the field has several.
        name: of the flag, where it is not the field's.
    """
    option = Option(help, domain, Flag(("server",), name), default=default, says=says)
    return field(default=default, metadata={"declared": option})


@dataclass(frozen=True)
class ServerSettings:
    """How the server behaves. Each field is declared with its flag.

    Args:
        api_keys: that a client has to show one of; none: any client may ask. They come from flags
            and from a file.
        Others: see their help.
    """

    host: str = setting(
        "127.0.0.1", "address to listen on", such("a text", lambda text: isinstance(text, str))
    )
    port: int = setting(8000, "port to listen on, 0 for a free one", whole(0, 65535))
    api_keys: tuple[ApiKey, ...] = ()
    allow_unauthenticated: bool = setting(
        False, "listen without a key on an address that others can reach"
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "a name that requests may have in their Host header, beside addresses and localhost; may "
        "be given several times",
        Domain(
            "a name or an address without a port", _read_host_name, _read_host_name, metavar="NAME"
        ),
        "--allowed-host",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "web origin whose pages may use the server, such as http://localhost:3000, or * for all; "
        "may be given several times",
        Domain(
            "* or an origin without a path, such as http://localhost:3000",
            _read_origin,
            _read_origin,
            metavar="ORIGIN",
        ),
        "--cors-origin",
    )
    share_cache: bool = setting(False, "let users with different keys share cached K/V")
    allow_cache_texts: bool = setting(
        False, "let /v1/cache?text=true show pieces of prompts, to the users who sent them"
    )
    max_queue_len: int = setting(
        256, "sequences that may wait; more are told to come back", AT_LEAST_0
    )
    max_body_bytes: int = setting(
        16 * 2**20, "largest body of a request: bytes (65536, 512K, 16M)", NBYTES, says="16M"
    )
    drain_seconds: float = setting(
        30.0,
        "how long running answers may go on after SIGTERM",
        such("a number, at least 0", lambda value: 0 <= value < math.inf, parse=float, metavar="S"),
    )
    step_timeout: float = setting(
        120.0,
        "seconds after which a step of the engine counts as hanging and /health answers 503; 0 "
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
        "do not compute a conversation's history as the chat template will write it, without "
        "reasoning, while no request runs",
    )
    keep_reasoning: bool = setting(
        False,
        "let the chat template write the reasoning of all earlier answers, where it can: no "
        "question then computes a history again",
    )
    log_prompts: bool = setting(False, "let the log hold texts of prompts")
    log_cache: bool = setting(False, "log for each prompt where it left what was cached, and why")
    log_level: str = setting(
        "info", "what is logged, on stderr", replace(one_of(*_LOG_LEVELS), parse=str.lower)
    )


def num_users(keys: Iterable[ApiKey]) -> int:
    """How many users keys belong to."""
    return len({key.user for key in keys})


SERVER_SETTINGS: dict[str, Option] = {
    each.name: each.metadata["declared"] for each in fields(ServerSettings) if each.metadata
}

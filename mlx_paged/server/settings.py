"""``ServerSettings``: how the server behaves, made once from its flags. Imports no MLX."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_MAX_QUEUE_LEN = 256
DEFAULT_MAX_BODY_BYTES = 16 * 2**20
DEFAULT_DRAIN_SECONDS = 30.0
DEFAULT_NUM_HISTORY_TOKENS = 2**20  # some 20 MB of memory


@dataclass(frozen=True)
class ApiKey:
    """A key that a client may show, and whose it is.

    Args:
        name: of the user, for logs. Keys of one name are one user's.
        key: the secret.
        is_named: whether the operator gave the name.
    """

    name: str
    key: str
    is_named: bool = True

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r})"  # no secret in a traceback or a log


@dataclass(frozen=True)
class ServerSettings:
    """How the server behaves.

    Args:
        host: name or address that it listens on.
        port: 0 takes a free one.
        api_keys: that a client has to show one of; none: everybody may ask.
        allow_unauthenticated: listen on an address that others reach, though there is no key.
        allowed_hosts: names in a ``Host`` header, beside this machine's own.
        cors_origins: web origins whose pages may use the server; ``"*"`` is all of them.
        share_cache: whether users share cached K/V. Otherwise each has a ``cache_salt``.
        max_queue_len: sequences that may wait; more are refused with 503.
        max_body_bytes: of a request.
        drain_seconds: how long running answers may go on after SIGTERM.
        log_prompts: whether logs may hold texts of users.
        log_cache: whether a line says for each prompt where it left what was cached.
        log_level: ``"debug"``, ``"info"``, ``"warning"`` or ``"error"``.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_keys: tuple[ApiKey, ...] = ()
    allow_unauthenticated: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    share_cache: bool = False
    max_queue_len: int = DEFAULT_MAX_QUEUE_LEN
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    drain_seconds: float = DEFAULT_DRAIN_SECONDS
    log_prompts: bool = False
    log_cache: bool = False
    log_level: str = "info"

"""``ServerSettings``: how the server behaves, made once from its flags. Imports no MLX."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_MAX_QUEUE_LEN = 256
DEFAULT_MAX_BODY_BYTES = 16 * 2**20
DEFAULT_DRAIN_SECONDS = 30.0
DEFAULT_STEP_TIMEOUT = 120.0


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


@dataclass(frozen=True)
class ServerSettings:
    """How the server behaves.

    Args:
        host: name or address that it listens on.
        port: 0 takes a free one.
        api_keys: that a client has to show one of; none: everybody may ask.
        allow_unauthenticated: listen on an address that others reach, though there is no key.
        allowed_hosts: names in a ``Host`` header, beside addresses and localhost.
        cors_origins: web origins whose pages may use the server; ``"*"`` is all of them.
        share_cache: whether users share cached K/V. Otherwise each has a ``cache_salt``.
        allow_cache_texts: whether ``/v1/cache`` may show a user pieces of their prompts.
        max_queue_len: sequences that may wait; more are refused with 503.
        max_body_bytes: of a request.
        drain_seconds: how long running answers may go on after SIGTERM.
        step_timeout: seconds after which a step of the engine counts as hanging; ``inf``: never.
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
    allow_cache_texts: bool = False
    max_queue_len: int = DEFAULT_MAX_QUEUE_LEN
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    drain_seconds: float = DEFAULT_DRAIN_SECONDS
    step_timeout: float = DEFAULT_STEP_TIMEOUT
    log_prompts: bool = False
    log_cache: bool = False
    log_level: str = "info"

    @property
    def num_users(self) -> int:
        """How many users the keys belong to."""
        return len({key.user for key in self.api_keys})

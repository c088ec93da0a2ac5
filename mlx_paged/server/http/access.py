"""Who may use the server: keys, names in ``Host``, and origins of web pages."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Scope

from mlx_paged.errors import shown
from mlx_paged.server.errors import ApiError, Guard
from mlx_paged.server.http.api_keys import KeyFile
from mlx_paged.server.settings import ApiKey, ServerSettings, num_users

# The state of the server in a word, and the page, which is the same for all users: what it shows
# comes from paths that need a key.
OPEN_PATHS = frozenset({"/", "/health"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Principal:
    """Whose request it is.

    Args:
        name: of the key, for logs; ``"-"`` where no key is needed.
        cache_salt: of the user's cached K/V; ``None`` where users share them.
        is_alone: whether there is no other user.
    """

    name: str = "-"
    cache_salt: str | None = None
    is_alone: bool = True

    def salted(self, cache_salt: str | None) -> str | None:
        """The salt of a request, which says one itself or not: different for each pair of user
        and salt.
        """
        if self.cache_salt is None or cache_salt is None:
            return self.cache_salt or cache_salt
        return json.dumps([self.cache_salt, cache_salt])

    def owns(self, cache_salt: str | None) -> bool:
        """Whether the prompts under a salt of :meth:`salted` can only be this user's."""
        if self.is_alone:
            return True
        if self.cache_salt is None or cache_salt is None:
            return False
        return cache_salt == self.cache_salt or cache_salt.startswith(f'["{self.cache_salt}", ')


ANONYMOUS = Principal()


class Access(Guard):
    """A request needs a key, if there are any, and leaves its user in
    ``scope["state"]["principal"]``.

    Args:
        key_file: has the keys in the place of ``settings.api_keys``, and may get others.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, key_file: KeyFile | None = None):
        super().__init__(app)
        self._share_cache = settings.share_cache
        self._key_file = key_file
        self._read(settings.api_keys if key_file is None else key_file.keys)

    def _read(self, keys: tuple[ApiKey, ...]) -> None:
        # Digests have one length, so comparing them tells nothing about a key.
        is_alone = num_users(keys) == 1
        self._keys = keys
        self._principals = [
            (_digest(key.key.encode()), _principal_of(key, self._share_cache, is_alone))
            for key in keys
        ]

    def refusal(self, scope: Scope) -> ApiError | None:
        key = _key_in(dict(scope["headers"]))
        principal = self._principal_with(key)
        if principal is None and scope["path"] in OPEN_PATHS and scope["method"] in _SAFE_METHODS:
            principal = ANONYMOUS
        if principal is None:
            return _refusal(key)
        scope.setdefault("state", {})["principal"] = principal
        return None

    def _principal_with(self, key: bytes | None) -> Principal | None:
        if self._key_file is not None and self._key_file.keys is not self._keys:
            self._read(self._key_file.keys)
        if not self._principals:
            return ANONYMOUS
        if key is None:
            return None
        digest = _digest(key)
        found = None
        for expected, principal in self._principals:  # all of them, wherever it is
            if hmac.compare_digest(expected, digest):
                found = principal
        return found


def _key_in(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key of ``Authorization: Bearer``, or of ``x-api-key``, which Anthropic's clients send."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip()
    return headers.get(b"x-api-key", b"").strip() or None


def _refusal(key: bytes | None) -> ApiError:
    if key is None:
        what = "no API key was given; send it as Authorization: Bearer KEY or as x-api-key: KEY"
    else:
        what = "the API key is wrong"
    return ApiError(401, what, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _principal_of(key: ApiKey, share_cache: bool, is_alone: bool) -> Principal:
    if share_cache:
        return Principal(key.name, is_alone=is_alone)
    text = "mlx_paged user {} {}".format(*key.user)
    return Principal(key.name, hashlib.sha256(text.encode()).hexdigest()[:32], is_alone)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class OriginGuard(Guard):
    """A web page may use the server only if its origin is allowed.

    A page of any site can send requests to 127.0.0.1, and a site whose name is made to point to
    this machine (DNS rebinding) can read the answers. So ``Host`` must be an address, which no
    site can point elsewhere, localhost, ``--host``, or an ``--allowed-host``; of addresses, those
    of this machine alone where the server listens on it alone. A server that others reach with a
    key may have any name unless ``--allowed-host`` says some: a rebound page has no key. A request
    that changes something or computes must come from the server's own page, from
    ``--cors-origin``, or from no page.

    Args:
        is_loopback: whether only this machine can reach the server.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, is_loopback: bool):
        super().__init__(app)
        self._origins = frozenset(settings.cors_origins)
        self._hosts = frozenset(settings.allowed_hosts)
        self._is_loopback = is_loopback
        self._is_any_host = not is_loopback and not self._hosts and bool(settings.api_keys)
        self._own_host = settings.host.lower()

    def refusal(self, scope: Scope) -> ApiError | None:
        method, path, headers = scope["method"], scope["path"], dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        # HTTP/1.0 has requests without the header, which no page sends: supervisors that look.
        is_plain_look = b"host" not in headers and path in OPEN_PATHS and method in _SAFE_METHODS
        if not is_plain_look and not self._is_allowed_host(host):
            return ApiError(
                421,
                f"the Host header {shown(host)} is not this server's name; --allowed-host allows "
                "others",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin")
        if origin is None or method in _SAFE_METHODS or "*" in self._origins:
            return None
        text = origin.decode("latin-1").lower()
        if text in self._origins or _host_of(text) == host:
            return None
        return ApiError(
            403,
            f"pages of the origin {shown(text)} may not use this server; --cors-origin allows them",
            code="origin_not_allowed",
        )

    def _is_allowed_host(self, host: str) -> bool:
        if self._is_any_host:
            return True
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name in self._hosts or name == self._own_host or is_loopback_name(name):
            return True
        return not self._is_loopback and _address(name) is not None


def is_loopback_name(name: str) -> bool:
    """Whether a name or an address can only be this machine: localhost, 127.0.0.1, [::1]."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a name is, if it is one."""
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def _host_of(origin: str) -> str | None:
    """Host and port of a page's origin, as its requests to its own server have them."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None

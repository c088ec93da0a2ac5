"""Access control: API keys, ``Host`` headers and the origins of web pages."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Scope

from mlx_paged.errors import shown
from mlx_paged.server.errors import ApiError, Guard
from mlx_paged.server.settings import ApiKey, KeyFile, ServerSettings, num_users

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Headers that a router writes and removes from the requests of clients begin with this.
ROUTER_PREFIX = b"x-mlx-paged-"
_USER_HEADER = ROUTER_PREFIX + b"user"


@dataclass(frozen=True)
class Principal:
    """The user of a request.

    Args:
        name: the name of the key, for logs; ``"-"`` if no key is needed.
        cache_salt: the salt of the user's cached K/V; ``None`` if users share them.
        is_alone: whether there is no other user.
        models: the names of the models that the user may use; ``None`` for all.
        is_admin: whether the user may load and unload models and adapters.
    """

    name: str = "-"
    cache_salt: str | None = None
    is_alone: bool = True
    models: frozenset[str] | None = None
    is_admin: bool = False

    def salted(self, cache_salt: str | None) -> str | None:
        """Combine the user's salt with that of a request; different pairs give different salts."""
        if self.cache_salt is None or cache_salt is None:
            return self.cache_salt or cache_salt
        return json.dumps([self.cache_salt, cache_salt])

    def owns(self, cache_salt: str | None) -> bool:
        """Whether prompts under a salt made by :meth:`salted` can only belong to this user."""
        if self.is_alone:
            return True
        if self.cache_salt is None or cache_salt is None:
            return False
        return cache_salt == self.cache_salt or cache_salt.startswith(f'["{self.cache_salt}", ')

    def header(self) -> tuple[bytes, bytes]:
        """The header in which a router passes the user to the process of a model."""
        value = json.dumps([self.name, self.cache_salt, self.is_alone, None, self.is_admin])
        return _USER_HEADER, value.encode()


ANONYMOUS = Principal()


class Access(Guard):
    """Checks the API key, if keys are configured, and sets ``scope["state"]["principal"]``.

    Args:
        key_file: provides the keys instead of ``settings.api_keys``, and may be reread.
        is_loopback: whether only this machine can reach the server. Without keys, its users are
            administrators.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        key_file: KeyFile | None = None,
        is_loopback: bool = False,
    ):
        super().__init__(app)
        self._without_key = Principal(is_admin=is_loopback)
        self._share_cache = settings.share_cache
        self._key_file = key_file
        self._read(settings.api_keys if key_file is None else key_file.keys)

    def _read(self, keys: tuple[ApiKey, ...]) -> None:
        is_alone = num_users(keys) == 1
        self._keys = keys
        # By digest, so that the time of a lookup reveals nothing about a key.
        self._principals = {
            _digest(key.key.encode()): _principal_of(key, self._share_cache, is_alone)
            for key in keys
        }

    def refusal(self, scope: Scope) -> ApiError | None:
        if self._key_file is not None and self._key_file.keys is not self._keys:
            self._read(self._key_file.keys)
        is_open = is_open_path(scope["path"]) and scope["method"] in SAFE_METHODS
        principal = ANONYMOUS if is_open else None
        if not self._keys:
            principal = self._without_key
        key = _key_in(dict(scope["headers"]))
        if key is not None:
            principal = self._principals.get(_digest(key), principal)
        if principal is not None:
            scope.setdefault("state", {})["principal"] = principal
            return None
        what = "the API key is wrong"
        if key is None:
            what = "no API key was given; send it as Authorization: Bearer KEY or as x-api-key: KEY"
        return ApiError(401, what, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _key_in(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key in ``Authorization: Bearer``, or in ``x-api-key`` as sent by Anthropic's clients."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip()
    return headers.get(b"x-api-key", b"").strip() or None


def _principal_of(key: ApiKey, share_cache: bool, is_alone: bool) -> Principal:
    salt = None
    if not share_cache:
        text = "mlx_paged user {} {}".format(*key.user)
        salt = hashlib.sha256(text.encode()).hexdigest()[:32]
    return Principal(key.name, salt, is_alone, key.models, key.is_admin)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def check_admin(principal: Principal, what: str, purpose: str) -> None:
    """Raise :class:`ApiError` unless the user may change which models and adapters are loaded.

    Args:
        what, purpose: for the error, such as ``"a model"`` and ``"to load it"``.
    """
    if not principal.is_admin:
        text = (
            f"{what} needs a key that is marked admin {purpose}, or no keys and a client on this "
            "machine"
        )
        raise ApiError(403, text, code="admin_needed")


class BehindRouter(Guard):
    """Sets ``scope["state"]["principal"]`` to the user that the router in front has found. Only the
    router can reach the socket.
    """

    def refusal(self, scope: Scope) -> ApiError | None:
        value = dict(scope["headers"]).get(_USER_HEADER)
        if value is None:
            return ApiError(401, "the request does not come from the router")
        scope.setdefault("state", {})["principal"] = Principal(*json.loads(value))
        return None


class OriginGuard(Guard):
    """Refuses requests of web pages whose origin is not allowed.

    Pages of any site can send requests to 127.0.0.1, and a site whose name is made to resolve to
    this machine (DNS rebinding) can read the answers. So ``Host`` must be an address, to which no
    name resolves, or localhost, ``--host`` or an ``--allowed-host``. If only this machine can reach
    the server, the address must be a loopback address. A server that requires a key and is
    reachable from other machines accepts any name unless ``--allowed-host`` is given, since a
    rebound page has no key. Requests other than GET, HEAD and OPTIONS must come from the server's
    own page, from a ``--cors-origin``, or from no page at all.

    Args:
        is_loopback: whether only this machine can reach the server.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, is_loopback: bool):
        super().__init__(app)
        self._origins = settings.cors_origins
        self._hosts = {*settings.allowed_hosts, settings.host.lower()}
        self._is_loopback = is_loopback
        self._is_any_host = not (is_loopback or settings.allowed_hosts or not settings.api_keys)

    def refusal(self, scope: Scope) -> ApiError | None:
        method, path, headers = scope["method"], scope["path"], dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        # In HTTP/1.0 the header may be missing; supervisors check the health in this way, and web
        # pages can't omit it.
        is_plain_check = b"host" not in headers and is_open_path(path) and method in SAFE_METHODS
        if not is_plain_check and not self._is_allowed_host(host):
            return ApiError(
                421,
                f"the Host header {shown(host)} is not a name of this server; --allowed-host "
                "allows others",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin")
        if origin is None or method in SAFE_METHODS or "*" in self._origins:
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
        if name in self._hosts or is_loopback_name(name):
            return True
        return not self._is_loopback and _address(name) is not None


def guarded(
    app: ASGIApp, settings: ServerSettings, is_loopback: bool, key_file: KeyFile | None = None
) -> ASGIApp:
    """Wrap an application in the middleware that decides whose requests are answered."""
    app = Access(app, settings, key_file, is_loopback)
    if settings.cors_origins:
        # Outside Access: preflight requests have no key, and pages may read that a key is missing.
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after"],
            max_age=600,
        )
    return OriginGuard(app, settings, is_loopback)


def is_open_path(path: str) -> bool:
    """Whether a path needs no key: the health check, and pages, also of one of several models.
    These are static: their data come from paths that need a key.
    """
    return path in ("/", "/health") or (path.startswith("/model/") and path.endswith("/"))


def is_loopback_name(name: str) -> bool:
    """Whether a name or an address always refers to this machine: localhost, 127.0.0.1, [::1]."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an IP address; ``None`` if the name is not an address."""
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def _host_of(origin: str) -> str | None:
    """The host and the port of an origin, in the form of the ``Host`` header."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


@cache
def html_page(package: str) -> HTMLResponse:
    """The page ``page.html`` of a package."""
    html = resources.files(package).joinpath("page.html").read_text("utf-8")
    headers = {
        "Content-Security-Policy": security_policy(html),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)


def security_policy(html: str) -> str:
    """A policy that allows a page its own script, its own style and requests to its own server.

    Raises:
        ValueError: the page does not have exactly one script and one style.
    """
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.S)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.S)
    return (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

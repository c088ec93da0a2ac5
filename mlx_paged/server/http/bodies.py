"""Parses JSON bodies strictly, large ones outside the event loop."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from starlette.requests import Request

from mlx_paged.errors import shown
from mlx_paged.server.errors import ApiError
from mlx_paged.server.http.limits import check_json
from mlx_paged.server.service import Service

# Bytes that are parsed in the event loop, within 1 to 2 ms. More would delay streams.
_SMALL_BODY = 2**15


async def read_json(request: Request, service: Service, user: str) -> Any:
    """Parse the body of a request.

    Raises:
        ApiError: it is not valid JSON, or has a content encoding.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        what = f"the content encoding {shown(encoding)} is not supported; send the body unencoded"
        raise ApiError(415, what, headers={"Accept-Encoding": "identity"})
    body = await request.body()
    if len(body) <= _SMALL_BODY:
        return parse_json(body)
    return await service.run_in_tokenizer_pool(user, lambda _: parse_json(body))


def parse_json(body: bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ApiError: it is invalid, or too expensive to parse; 400.
    """
    check_json(body)
    try:
        value = json.loads(
            body, parse_constant=_refuse_constant, object_pairs_hook=_with_unique_names
        )
        if b"\\ud" in body.lower():
            json.dumps(value, ensure_ascii=False).encode()  # Fails for lone surrogates.
        return value
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except UnicodeEncodeError:
        raise ApiError(400, "the body contains a lone surrogate, half a character") from None
    except ValueError as error:
        # Also UnicodeDecodeError, whose message would quote the body.
        what = f": {error}" if isinstance(error, json.JSONDecodeError) else ""
        raise ApiError(400, f"the body is not valid JSON{what}") from None


def _with_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate names: a proxy that inspects the body might use the other value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ApiError(400, f"the body contains the name {shown(name)} twice in an object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(400, f"the body is not valid JSON: {name} is not allowed")

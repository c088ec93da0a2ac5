"""JSON bodies, and what of them is expensive to parse."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from starlette.requests import Request

from mlx_paged.errors import shown
from mlx_paged.server.errors import ApiError
from mlx_paged.server.http.limits import check_json
from mlx_paged.server.service import Service

# Bytes that the loop's thread reads itself, in a millisecond or two. More would hold up streams.
_SMALL_BODY = 2**15


async def read_json(request: Request, service: Service, user: str) -> Any:
    """The value of a body.

    Raises:
        ApiError: it is not JSON, or encoded in a way that is not read.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        what = f"a body in the content encoding {shown(encoding)} is not read; send it plain"
        raise ApiError(415, what, headers={"Accept-Encoding": "identity"})
    body = await request.body()
    if len(body) <= _SMALL_BODY:
        return parse_json(body)
    return await service.run_in_tokenizer_pool(user, lambda _: parse_json(body))


def parse_json(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ApiError: it is none, or too much to parse; 400.
    """
    check_json(body)
    try:
        value = json.loads(
            body, parse_constant=_refuse_constant, object_pairs_hook=_with_unique_names
        )
        if b"\\ud" in body.lower():
            json.dumps(value, ensure_ascii=False).encode()  # Halves of characters have no UTF-8.
        return value
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except UnicodeEncodeError:
        raise ApiError(400, "the body has half a character, a lone surrogate") from None
    except ValueError as error:
        # UnicodeDecodeError is one, too. Its text would quote the body.
        what = f": {error}" if isinstance(error, json.JSONDecodeError) else ""
        raise ApiError(400, f"the body is not valid JSON{what}") from None


def _with_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Of two values of one name, others that look at a request may see another one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ApiError(400, f"the body has the name {shown(name)} twice in an object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(400, f"the body is not valid JSON: {name} is not allowed")

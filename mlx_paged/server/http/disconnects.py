"""Work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")

CLIENT_LEFT = 499  # nginx's number


class ClientLeftError(Exception):
    """The client closed its connection; there is no client to answer."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns. It is cancelled as soon as the client leaves.

    Args:
        receive: of a request whose body was read. No other task may call it meanwhile.

    Raises:
        ClientLeftError: the client left before the work was done.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        # Until what was cancelled has given back what it held.
        await asyncio.wait({working, leaving})
        if not working.cancelled():
            working.exception()  # It was looked at, so that asyncio does not log it.


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

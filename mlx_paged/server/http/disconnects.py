"""``until_disconnect``: cancels work when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")

CLIENT_LEFT = 499  # nginx's status for this


class ClientLeftError(Exception):
    """The client has disconnected."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; it is cancelled as soon as the client disconnects.

    Args:
        receive: that of a request whose body was read. No other task may call it meanwhile.

    Raises:
        ClientLeftError: the client disconnected before the work was done.
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
        # Wait until cancelled work has released its resources.
        await asyncio.wait({working, leaving})
        if not working.cancelled():
            working.exception()  # Retrieved, so that asyncio does not log it.


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""``Reports``: what became of the requests, and what of it their readers were told."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable

from mlx_paged.engine.deltas import Told, new_part, nothing_told
from mlx_paged.engine.latencies import Latencies
from mlx_paged.engine.request_state import RequestState
from mlx_paged.request import Request, RequestOutput
from mlx_paged.sampling_params import RequestOutputKind


class Reports:
    """The requests that are not reported as finished yet, and which of them have news.

    An interrupt may come at any line: what was taken and not handed over is reported again.

    Attributes:
        states: by request id. Threads share this table and the flags of a state without a lock:
            each of their changes is a single operation, and their order does not matter.
    """

    def __init__(self, latencies: Latencies):
        self.states: dict[str, RequestState] = {}
        self._latencies = latencies
        self._news: dict[str, None] = {}  # ids of requests, in order
        # What the reader knows of a request that hands over only what is new.
        self._told: dict[str, list[Told]] = {}

    def __bool__(self) -> bool:
        """Whether there are news."""
        return bool(self._news)

    def note(self, request: Request) -> None:
        """There is news of a request."""
        if request.is_finished:
            self.states[request.request_id].finish(request)
        self._news[request.request_id] = None

    def begin_again(self) -> None:
        """All requests were restored to what was reported of them."""
        self._news = _finished(list(self.states.values()))

    def take(self) -> list[RequestOutput]:
        """The outputs with news."""
        states = [self.states[name] for name in self._news if name in self.states]
        now = time.perf_counter()
        for state in states:
            state.note_reported(self._latencies, now)
        # Finished requests are reported again if an interrupt comes before they are handed over.
        self._news = _finished(states)
        return [state.output for state in states]

    def hand_over(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Forget the finished requests and return the outputs: an interrupt comes before both or
        after.
        """
        finished = [output.request_id for output in outputs if output.finished]
        for request_id in finished:
            self._news.pop(request_id, None)
        handed_over, told = self._by_kind(outputs)
        # Calls without a line of Python in them, and on the line that returns.
        changes = itertools.chain(
            map(self._told.__setitem__, told, told.values()),
            map(self._told.pop, finished, itertools.repeat(None)),
            map(self.states.pop, finished, itertools.repeat(None)),
        )
        deque(changes, maxlen=0); return handed_over  # noqa: E702  # fmt: skip

    def _by_kind(
        self, outputs: list[RequestOutput]
    ) -> tuple[list[RequestOutput], dict[str, list[Told]]]:
        """The outputs as each request wants them, and what the readers of those that want only
        what is new know then. Changes nothing.
        """
        told: dict[str, list[Told]] = {}
        wanted: list[RequestOutput] = []
        for output in outputs:
            kind = self.states[output.request_id].output_kind
            if kind is RequestOutputKind.CUMULATIVE:
                wanted.append(output)
            elif kind is RequestOutputKind.DELTA:
                name = output.request_id
                part, told[name] = new_part(output, self._told.get(name) or nothing_told(output))
                wanted.append(part)
            elif output.finished:
                wanted.append(output)
        return wanted, told


def _finished(states: Iterable[RequestState]) -> dict[str, None]:
    """The ids of the requests that are finished, in order."""
    return {state.output.request_id: None for state in states if state.output.finished}

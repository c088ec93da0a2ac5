"""``Reports``: what became of the requests, and what of it their readers were told."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable

from mlx_paged.engine.deltas import ReportedLength, new_part
from mlx_paged.engine.latencies import Latencies
from mlx_paged.engine.request_state import Completion, RequestState
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

    def take(self) -> list[RequestState]:
        """The requests with news, whose outputs are to be handed over as they are now."""
        states = [self.states[name] for name in self._news if name in self.states]
        self._latencies.observe(states, time.perf_counter())
        # Finished requests are reported again if an interrupt comes before they are handed over.
        self._news = _finished(states)
        return states

    def hand_over(self, states: Iterable[RequestState]) -> list[RequestOutput]:
        """Return the outputs as each request wants them, and forget the finished requests: an
        interrupt comes before both or after.
        """
        outputs: list[RequestOutput] = []
        handed_over: list[tuple[Completion, str, ReportedLength]] = []
        finished: list[str] = []
        for state in states:
            output, kind, is_finished = state.output, state.output_kind, state.output.finished
            if is_finished:
                finished.append(output.request_id)
            if kind is RequestOutputKind.DELTA:
                before = [completion.handed_over for completion in state.completions]
                part, lengths = new_part(output, before)
                outputs.append(part)
                handed_over += zip(state.completions, itertools.repeat("handed_over"), lengths)
            elif is_finished or kind is RequestOutputKind.CUMULATIVE:
                outputs.append(output)
        # Calls without a line of Python in them, and on the line that returns.
        changes = itertools.chain(
            itertools.starmap(setattr, handed_over),
            map(self._news.pop, finished, itertools.repeat(None)),
            map(self.states.pop, finished, itertools.repeat(None)),
        )
        deque(changes, maxlen=0); return outputs  # noqa: E702  # fmt: skip


def _finished(states: Iterable[RequestState]) -> dict[str, None]:
    """The ids of the requests that are finished, in order."""
    return {state.output.request_id: None for state in states if state.output.finished}

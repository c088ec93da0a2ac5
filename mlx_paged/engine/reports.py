"""``Reports``: what became of the requests, and what of it their readers were told."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mlx_paged.engine.deltas import new_part
from mlx_paged.engine.latencies import Latencies
from mlx_paged.engine.request_state import RequestState
from mlx_paged.request import Request, RequestOutput
from mlx_paged.sampling_params import RequestOutputKind


class Reports:
    """The requests that are not reported as finished yet, and which of them have news.

    Attributes:
        states: by request id. Any thread adds to this table, in a single operation that needs no
            lock; the engine's thread alone takes from it.
    """

    def __init__(self, latencies: Latencies):
        self.states: dict[str, RequestState] = {}
        self._latencies = latencies
        self._news: dict[str, None] = {}  # ids of requests, in order
        self._num_taken_on = 0

    def new_states(self) -> Sequence[RequestState]:
        """The requests that were added since the last call, in order."""
        num_new = len(self.states) - self._num_taken_on
        if not num_new:
            return ()
        # One more may have come since they were counted: dicts keep their order.
        new = list(self.states.values())[self._num_taken_on :]
        self._num_taken_on += len(new)
        return new

    def note(self, request: Request) -> None:
        """There is news of a request."""
        if request.is_finished:
            self.states[request.request_id].finish(request)
        self._news[request.request_id] = None

    def drop(self, state: RequestState) -> None:
        """Forget a request that has ended, of which no output is wanted."""
        name = state.output.request_id
        if self.states.get(name) is state:
            self._latencies.observe([state], time.perf_counter())
            self._news.pop(name, None)
            self._forget(name)

    def report(self) -> list[RequestOutput]:
        """The outputs with news, as each request wants them. Finished requests are forgotten."""
        states = [self.states[name] for name in self._news]
        self._news.clear()
        self._latencies.observe(states, time.perf_counter())
        self._latencies.observe_steps()
        outputs: list[RequestOutput] = []
        for state in states:
            output, kind = state.output, state.output_kind
            if output.finished:
                self._forget(output.request_id)
            if kind is RequestOutputKind.DELTA:
                before = [completion.handed_over for completion in state.completions]
                part, lengths = new_part(output, before)
                for completion, length in zip(state.completions, lengths, strict=True):
                    completion.handed_over = length
                outputs.append(part)
            elif output.finished or kind is RequestOutputKind.CUMULATIVE:
                outputs.append(output)
        return outputs

    def _forget(self, name: str) -> None:
        del self.states[name]
        self._num_taken_on -= 1

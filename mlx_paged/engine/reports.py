"""``Reports``: the outputs of requests, and which of them have to be reported."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mlx_paged.engine.deltas import new_part
from mlx_paged.engine.latencies import Latencies
from mlx_paged.engine.request_state import RequestState
from mlx_paged.request import Request, RequestOutput
from mlx_paged.sampling_params import RequestOutputKind


class Reports:
    """The requests whose end is not reported yet, and which of them have changed.

    Attributes:
        states: by request id. Any thread may add an entry, in a single operation that needs no
            lock; only the engine's thread removes them.
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
        # Another thread may have added more since then; dicts keep their order.
        new = list(self.states.values())[self._num_taken_on :]
        self._num_taken_on += len(new)
        return new

    def note(self, request: Request) -> None:
        """Mark a request as changed."""
        if request.is_finished:
            self.states[request.request_id].finish(request)
        self._news[request.request_id] = None

    def drop(self, state: RequestState) -> None:
        """Forget a finished request without reporting it."""
        name = state.output.request_id
        if self.states.get(name) is state:
            self._latencies.observe([state], time.perf_counter())
            self._news.pop(name, None)
            self._forget(name)

    def report(self) -> list[RequestOutput]:
        """The changed outputs, by the ``output_kind`` of each request. Forgets finished ones."""
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

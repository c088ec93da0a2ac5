"""A token's way from ``LLM.generate`` to the backend and back to text, as calls.

    python -m paged_testing.walk      # with tools/ on the path

An idle engine answers one prompt of the demo model in plain MLX. Where the request is queued, gets
its slots, is computed, is sampled, gets its token, its text and its output, the package's functions
on the stacks of both threads are noted; for all but the first, in a decode step. Each function
counts once. DESIGN.md shows what is printed, and tests/test_walk.py holds its length.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import mlx_paged
from mlx_paged import LLM, SamplingParams, demo_model_path
from mlx_paged.core import KVCacheManager
from mlx_paged.engine import steps
from mlx_paged.engine.scheduling.request_queues import RequestQueues
from mlx_paged.engine.scheduling.scheduler import Scheduler
from mlx_paged.engine.text_stream import TextStream
from mlx_paged.ops.reference import ReferenceBackend
from mlx_paged.request import RequestOutput

PACKAGE = Path(mlx_paged.__file__).parent


class Call(NamedTuple):
    """A function of the package that is on a stack.

    Args:
        file: below the package.
    """

    file: str
    name: str


def stack_of(frame: FrameType | None) -> list[Call]:
    """The package's functions on a stack, the outermost first."""
    calls = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            name = frame.f_code.co_qualname.replace(".<locals>", "")
            calls.append(Call(str(path.relative_to(PACKAGE)), name))
        frame = frame.f_back
    return calls[::-1]


MOST_LOOKS = 10_000
# Where the way is looked at.
STATIONS: tuple[tuple[Any, str], ...] = (
    (RequestQueues, "add"),
    (KVCacheManager, "allocate_slots"),
    (ReferenceBackend, "update_and_attend"),
    (steps, "sample"),
    (Scheduler, "append_token"),
    (TextStream, "add"),
    (RequestOutput, "__init__"),
)


def walk() -> list[Call]:
    """The functions in the order in which they are first met."""
    caller = threading.get_ident()
    met: dict[tuple[Any, str], list[Call]] = {}
    own = {station: getattr(*station) for station in STATIONS}

    def noting(station: tuple[Any, str]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            # The newest time counts, which is in a decode.
            met[station] = [*stack_of(sys._getframe(1)), place_of(own[station])]
            if threading.get_ident() != caller:
                met[station] = [*waiting_stack(caller), *met[station]]
            return own[station](*args, **kwargs)

        return call

    for station in STATIONS:
        setattr(*station, noting(station))
    try:
        llm = LLM(demo_model_path(), run_ahead=False)
        llm.generate("The code of apple is 4821.", SamplingParams(max_tokens=4, temperature=0))
    finally:
        for station in STATIONS:
            setattr(*station, own[station])
    return list(dict.fromkeys(call for station in STATIONS for call in met[station]))


def waiting_stack(thread: int) -> list[Call]:
    """The package's functions on the stack of a thread that waits for the engine's, or is about to
    wait.
    """
    for _ in range(MOST_LOOKS):
        stack = stack_of(sys._current_frames()[thread])
        if stack and stack[-1].name == "EngineCall.result":
            return stack
        time.sleep(0.001)
    raise RuntimeError("[walk] the caller does not wait for the engine's thread")


def place_of(function: Any) -> Call:
    """Where a function is."""
    code = getattr(function, "__code__", None)
    if code is None or not Path(code.co_filename).is_relative_to(PACKAGE):
        return Call("request.py", function.__qualname__)  # a dataclass's constructor
    return Call(str(Path(code.co_filename).relative_to(PACKAGE)), function.__qualname__)


def lines(calls: list[Call]) -> list[str]:
    """The calls as they are printed, one for each line, and their numbers."""
    listed = [f"{call.file:28} {call.name}" for call in calls]
    return [*listed, f"{len(calls)} calls in {len({call.file for call in calls})} files"]


def main() -> None:
    print("\n".join(lines(walk())))


if __name__ == "__main__":
    main()

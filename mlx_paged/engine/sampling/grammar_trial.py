"""Separate processes in which each grammar is first compiled.

llguidance has limits, but some grammars overflow the stack (the JSON schema
``{"const": -9223372036854775807}``, in 1.9), and some never terminate (``{"multipleOf":
1000003}``). Neither can be caught in a thread, and llguidance's own limits apply to other work. So
a grammar is first compiled in a separate process with a CPU time limit and a low priority, and in
the engine's process only if the first one survives. There are at most ``NUM_PROCESSES`` of them;
each is started on demand, serves all engines, and ends with this process. It imports llguidance and
nothing from this package.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# Seconds. Compiling takes milliseconds of CPU time, and hundreds of them for large schemas. TIMEOUT
# is wall-clock time, for a machine that is too busy to run the process.
MAX_CPU_SECONDS = 2
TIMEOUT = 10.0
NUM_PROCESSES = 2
_NICENESS = 10
# Compiling recurses as deep as rules and schemas refer to each other. This is about five times what
# the deepest grammar of the maximum length needed; unused stack takes no memory.
STACK_NBYTES = 2**29


class Failure(NamedTuple):
    """Why a trial failed.

    Args:
        what: the reason, as a predicate of the grammar.
        is_certain: whether another trial would fail, too.
    """

    what: str
    is_certain: bool


class Trials:
    """Tries grammars, one at a time in each process. Any thread may call it."""

    def __init__(self) -> None:
        self._processes = [TrialProcess() for _ in range(NUM_PROCESSES)]

    def failure_of(self, text: str, vocabulary: Mapping[str, Any]) -> Failure | None:
        """As :meth:`TrialProcess.failure_of`, in a free process if there is one."""
        free = [each for each in self._processes if not each.is_busy]
        # The first one, so that grammars in sequence don't start a second process.
        process = free[0] if free else random.choice(self._processes)
        return process.failure_of(text, vocabulary)


class TrialProcess:
    """Tries grammars one at a time, in a process started on demand. Any thread may call it."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], Any] = lambda: None  # of the process

    @property
    def is_busy(self) -> bool:
        return self._one_at_a_time.locked()

    def failure_of(self, text: str, vocabulary: Mapping[str, Any]) -> Failure | None:
        """Compile a grammar in the other process: ``None`` if the process survives, else the reason
        for its end.

        Args:
            vocabulary: its size (``num_tokens``), ``special`` tokens by name, and the ``eos`` ids.

        Raises:
            OSError: the process can't be started.
        """
        with self._one_at_a_time:
            return self._try(text, vocabulary)

    def _try(self, text: str, vocabulary: Mapping[str, Any]) -> Failure | None:
        process, is_late = self._started(), threading.Event()
        # It is reused only after it has answered: an answer that comes after an interrupt must not
        # be taken for that to the next grammar.
        self._process = None

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(TIMEOUT, end)
        try:
            timer.start()
            question = {"text": text, "vocabulary": vocabulary, "seconds": MAX_CPU_SECONDS}
            answer = _ask(process, question)
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
        if answer:
            self._process = process
            return None
        if process.wait() == -signal.SIGXCPU:
            return Failure(f"takes more than {MAX_CPU_SECONDS} seconds", is_certain=True)
        if is_late.is_set():
            return Failure(f"takes more than {TIMEOUT:g} seconds", is_certain=False)
        return Failure("crashes the compiler", is_certain=True)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                # Without this folder on the path, since its modules are not top-level ones.
                [sys.executable or "python", "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # not interrupted by Ctrl-C
            )
            self._end = weakref.finalize(self, _end, self._process)
        return self._process


def _ask(process: subprocess.Popen[str], question: Mapping[str, Any]) -> str:
    """The line that a process answers with; empty if it has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        return process.stdout.readline()
    except BrokenPipeError:
        return ""


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # Buffered output can't be written any more.
                pipe.close()


# The rest runs in the other process.


class _Vocabulary:
    """The tokenizer interface of llguidance with single bytes and special tokens; others are
    empty.
    """

    def __init__(self, vocabulary: Mapping[str, Any]):
        special: dict[str, int] = vocabulary["special"]
        names = {token: name.encode() for name, token in special.items()}
        others = iter([bytes([byte]) for byte in range(256)])
        num_tokens = max(vocabulary["num_tokens"], 256 + len(names))
        self.tokens = [names.get(token) or next(others, b"") for token in range(num_tokens)]
        self._token_of = {token: index for index, token in enumerate(self.tokens)}
        self.special_token_ids = sorted(names)
        self.eos_token_id: int = vocabulary["eos"][0]
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._token_of[bytes([byte])] for byte in data]


def limit_cpu_time(seconds: float) -> None:
    """Let the system end this process (SIGXCPU) after this much more CPU time, rounded up to a
    whole second of its total.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    wanted = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    if most == resource.RLIM_INFINITY or wanted < most:
        resource.setrlimit(resource.RLIMIT_CPU, (wanted, most))


def main() -> None:
    """Try one grammar for each line of stdin."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    os.nice(_NICENESS)  # Answers in progress have priority.
    # No core dump when a grammar exceeds the limit.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    tokenizers: dict[str, LLTokenizer] = {}
    threading.stack_size(STACK_NBYTES)
    for line in sys.stdin:
        question = json.loads(line)
        limit_cpu_time(question["seconds"])
        key = json.dumps(question["vocabulary"])
        if key not in tokenizers:
            wrapper = TokenizerWrapper(_Vocabulary(question["vocabulary"]))
            tokenizers[key] = LLTokenizer(wrapper, eos_token=question["vocabulary"]["eos"])

        def attempt(text: str = question["text"], tokenizer: LLTokenizer = tokenizers[key]) -> None:
            limits = LLParserLimits(verbose_errors=False)
            matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        print("done", flush=True)


if __name__ == "__main__":
    main()

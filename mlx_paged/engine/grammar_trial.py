"""A process in which each grammar is compiled first.

llguidance is careful with grammars, but some overflow the stack (the JSON schema
``{"const": -9223372036854775807}``, in 1.9), and some never end (``{"multipleOf": 1000003}``).
Neither can be caught in a thread, and llguidance's own limits count other work. So a grammar is
tried in a process of its own, which has a limit of CPU time and a low priority, and is compiled in
the engine's when that has survived it. There are ``NUM_PROCESSES`` of them at most; each begins
when it is needed, serves all engines, and ends with this one. It imports llguidance and nothing of
this package.
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

# Seconds. What is compiled here takes milliseconds of CPU time, large schemas hundreds of them. The
# other limit is that of the clock, for a machine that has no time for the process.
MAX_CPU_SECONDS = 2
TIMEOUT = 10.0
NUM_PROCESSES = 2
_NICENESS = 10
# Compiling recurses as deep as rules and schemas refer to each other. This is some five times what
# the deepest of the longest grammars took; what is not used costs no memory.
STACK_NBYTES = 2**29


class Failure(NamedTuple):
    """Why a grammar did not survive its trial.

    Args:
        what: it did.
        is_certain: it would do that again.
    """

    what: str
    is_certain: bool


class Trials:
    """Tries grammars, as many at a time as there are processes; from any thread."""

    def __init__(self, num_processes: int = NUM_PROCESSES):
        self._processes = [TrialProcess() for _ in range(num_processes)]

    def failure_of(self, text: str, vocabulary: Mapping[str, Any]) -> Failure | None:
        """What :meth:`TrialProcess.failure_of` says, from a process that is free if one is."""
        free = [each for each in self._processes if not each.is_busy]
        # The first one, so that grammars that come one by one start no second process.
        process = free[0] if free else random.choice(self._processes)
        return process.failure_of(text, vocabulary)


class TrialProcess:
    """Tries grammars, one at a time; from any thread. Its process is started when it is needed."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], Any] = lambda: None  # of the process

    @property
    def is_busy(self) -> bool:
        return self._one_at_a_time.locked()

    def failure_of(self, text: str, vocabulary: Mapping[str, Any]) -> Failure | None:
        """Compile a grammar in the other process: ``None`` if that is still there, else what became
        of it.

        Args:
            vocabulary: of :func:`light_vocabulary`.

        Raises:
            OSError: no other process can be started.
        """
        with self._one_at_a_time:
            return self._failure_of(text, vocabulary)

    def _failure_of(self, text: str, vocabulary: Mapping[str, Any]) -> Failure | None:
        process, is_late = self._started(), threading.Event()
        # Asked again only once it has answered: what it says after an interrupt is not for the next
        # grammar.
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
        return Failure("is more than the compiler survives", is_certain=True)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                # Without this folder on the path: its modules are not top-level ones.
                [sys.executable or "python", "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C is not for it
            )
            self._end = weakref.finalize(self, _end, self._process)
        return self._process


def light_vocabulary(
    num_tokens: int, special: Mapping[str, int], eos_token_ids: Sequence[int]
) -> dict[str, Any]:
    """What a trial needs of a vocabulary: its size, and its special tokens by name."""
    return {"num_tokens": num_tokens, "special": dict(special), "eos": list(eos_token_ids)}


def _ask(process: subprocess.Popen[str], question: Mapping[str, Any]) -> str:
    """The line that a process answers with; empty if it is gone."""
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
            with contextlib.suppress(OSError):  # What was written reaches no reader.
                pipe.close()


# What follows runs in the other process.


class _Vocabulary:
    """Bytes and special tokens; all others are empty. What llguidance wants of a tokenizer."""

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
    """Let the system end this process (SIGXCPU) when it has worked for this long from now on,
    rounded up to the next whole second of all that it worked.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    wanted = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    if most == resource.RLIM_INFINITY or wanted < most:
        resource.setrlimit(resource.RLIMIT_CPU, (wanted, most))


def main() -> None:
    """Try one grammar for each line of the input."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    os.nice(_NICENESS)  # What is answered meanwhile comes first.
    # The end of a grammar that takes too long leaves no file of the process's memory behind.
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

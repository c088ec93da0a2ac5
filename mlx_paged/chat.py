"""Chat with a model in the terminal: ``python -m mlx_paged.chat``, or with a message, once.

The answer goes to stdout and everything else to stderr, so that it can be piped. Flags follow ``mlx_lm.chat``.
Nothing heavy is imported until the arguments are known to be right.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mlx_paged import __version__, arguments
from mlx_paged.config import BLOCK_SIZES

if TYPE_CHECKING:
    from mlx_paged.conversation import Conversation
    from mlx_paged.generation import GenerationResponse

EXAMPLE_MODEL = "mlx-community/Qwen3-0.6B-4bit"
HELP = """\
/help    this text
/reset   forget the conversation (the system prompt stays)
/stats   what the K/V cache holds
/exit    leave (also Ctrl-D); Ctrl-C stops an answer"""


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = arguments.Parser(
        prog="python -m mlx_paged.chat",
        description="Chat with a model whose K/V live in a paged (or a contiguous) cache.",
        allow_abbrev=False,
    )
    parser.add_argument("message", nargs="?", help="answer this once and leave; - reads it from standard input")
    parser.add_argument(
        "--model", help=f"local folder or Hugging Face repo, e.g. {EXAMPLE_MODEL} (default: the bundled demo model)"
    )
    parser.add_argument("--adapter-path", help="folder with LoRA or DoRA adapters for the model, as mlx-lm trains them")
    parser.add_argument(
        "--kv", choices=("basic", "paged"), default="paged", help="the KV cache: contiguous or paged (default: paged)"
    )
    parser.add_argument(
        "--max-tokens",
        "-m",
        type=arguments.max_tokens,
        default=256,
        help="tokens per answer, -1 for no limit (default: 256)",
    )
    parser.add_argument(
        "--temp", type=arguments.at_least_0, default=0.0, help="sampling temperature, 0 is greedy (default: 0)"
    )
    parser.add_argument("--top-p", type=arguments.probability, default=1.0, help="sampling top-p (default: 1, off)")
    parser.add_argument("--top-k", type=arguments.whole, default=0, help="sampling top-k (default: 0, off)")
    parser.add_argument("--min-p", type=arguments.probability, default=0.0, help="sampling min-p (default: 0, off)")
    parser.add_argument("--seed", type=arguments.whole, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--system-prompt", help="system prompt of the conversation")
    parser.add_argument(
        "--no-thinking", action="store_true", help="ask the model's chat template for an answer without reasoning"
    )
    parser.add_argument(
        "--block-size", type=int, choices=BLOCK_SIZES, default=16, help="tokens per K/V block (default: 16)"
    )
    parser.add_argument(
        "--kv-cache-bytes",
        type=arguments.budget,
        metavar="N",
        help="K/V budget: bytes (65536, 512M, 2G) or blocks (256blocks) (default: a share of the memory)",
    )
    parser.add_argument(
        "--prefill-step-size",
        type=arguments.positive,
        default=512,
        help="prompt tokens computed at a time (default: 512)",
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "reference", "metal"),
        default="auto",
        help="operations on the paged cache (default: auto)",
    )
    parser.add_argument("--version", action="version", version=f"mlx_paged {__version__}")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the chat and return its exit status: 0, 2 for the user's mistakes, 130 when Ctrl-C ended it."""
    args = setup_arg_parser().parse_args(argv)
    try:
        return _run(args)
    except KeyboardInterrupt:
        _say("")
        return 130
    except BrokenPipeError:
        # The reader of our output left (| head): nothing more to say, and nowhere to say it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(args: argparse.Namespace) -> int:
    message = args.message
    if message is not None:
        message = _clean(sys.stdin.read() if message == "-" else message)
        if not message.strip():
            return _fail("the message is empty")
    try:
        conversation = _load_conversation(args)
    except ValueError as error:
        return _fail(str(error))
    options = _answer_options(args)
    if message is not None:
        return _answer_once(conversation, message, options)
    _chat(conversation, options)
    return 0


def _load_conversation(args: argparse.Namespace) -> Conversation:
    _say(f"[loading {args.model or 'the bundled demo model'} ...]", end="\r" if sys.stderr.isatty() else "\n")
    import mlx.core as mx

    from mlx_paged.conversation import Conversation
    from mlx_paged.engine.model_runner import ModelRunner, make_kv_cache
    from mlx_paged.engine.session import Session
    from mlx_paged.loading import demo_model_path, load

    mx.random.seed(args.seed)
    model, tokenizer = load(args.model or demo_model_path(), adapter_path=args.adapter_path)
    cache = make_kv_cache(
        model, args.kv, block_size=args.block_size, kv_cache_bytes=args.kv_cache_bytes, backend=args.backend
    )
    conversation = Conversation(
        Session(ModelRunner(model, cache)),
        tokenizer,
        system_prompt=None if args.system_prompt is None else _clean(args.system_prompt),
        enable_thinking=False if args.no_thinking else None,
    )
    _say_setting(args, conversation)
    return conversation


def _answer_options(args: argparse.Namespace) -> dict[str, Any]:
    from mlx_paged.sampling import make_sampler

    return {
        "max_tokens": args.max_tokens,
        "prefill_step_size": args.prefill_step_size,
        "sampler": make_sampler(temp=args.temp, top_p=args.top_p, min_p=args.min_p, top_k=args.top_k),
    }


# Answers


def _answer_once(conversation: Conversation, message: str, options: dict[str, Any]) -> int:
    try:
        was_interrupted = _answer(conversation, message, options)
    except (ValueError, RuntimeError) as error:
        return _fail(str(error))
    return 130 if was_interrupted else 0


def _chat(conversation: Conversation, options: dict[str, Any]) -> None:
    _say("[/help for commands, Ctrl-D to leave]")
    while True:
        try:
            line = _read_line()
            if line is None or line.strip() in ("/exit", "/quit"):
                return
            _take_turn(conversation, line, options)
        except KeyboardInterrupt:
            _say("\n[Ctrl-D or /exit to leave]")


def _take_turn(conversation: Conversation, line: str, options: dict[str, Any]) -> None:
    command = line.strip()
    if not command:
        return
    if command == "/help":
        _say(HELP)
    elif command == "/reset":
        conversation.reset()
        _say("[the conversation is empty]")
    elif command == "/stats":
        _say_stats(conversation)
    elif command.startswith("/") and " " not in command:
        _say(f"[unknown command {command}; /help lists them]")
    else:
        try:
            _answer(conversation, line, options)
        except (ValueError, RuntimeError) as error:
            _say(f"[{error}]")


class _StopAnswer(Exception):
    """Ctrl-C, between two steps."""


def _answer(conversation: Conversation, message: str, options: dict[str, Any]) -> bool:
    """Stream one answer and its figures; True when Ctrl-C cut it short."""
    show_progress = sys.stderr.isatty()
    response = None
    with _interrupt_flag() as interrupted:

        def progress(done: int, total: int) -> None:
            # A step is never cut in the middle: the cache is whole whenever we are here.
            if interrupted:
                raise _StopAnswer
            if show_progress and total - done > 0 and total > options["prefill_step_size"]:
                _say(f"[prompt {done}/{total} tokens, {100 * done // total}%]", end="\r")

        answer = conversation.ask(message, progress=progress, **options)
        try:
            for response in answer:
                if response.generation_tokens == 1 and show_progress:
                    _say("", end="\r\033[K")
                print(response.text, end="", flush=True)
                if interrupted:
                    raise _StopAnswer
        except _StopAnswer:
            pass
        finally:
            # The conversation notes what was said so far.
            answer.close()
    if response is not None:
        print(flush=True)
        _say_figures(conversation, response, options["max_tokens"])
    if interrupted:
        _say("[stopped]")
    return bool(interrupted)


@contextmanager
def _interrupt_flag() -> Iterator[list[int]]:
    """Collect Ctrl-C in a list, to be looked at between two steps; the second one leaves the program at once."""
    caught: list[int] = []

    def note(signum: int, frame: object) -> None:
        if caught:
            raise SystemExit(130)
        caught.append(signum)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)


# The terminal


def _read_line() -> str | None:
    """The next line of the user, ``None`` at the end of the input."""
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            # input() edits lines and keeps a history once readline is there; its prompt goes to stdout.
            import readline  # noqa: F401

            return _clean(input(">> "))
        if sys.stdin.isatty():
            _say(">> ", end="")
        line = sys.stdin.readline()
        return _clean(line) if line else None
    except EOFError:
        _say("")
        return None


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def _fail(message: str) -> int:
    _say(f"python -m mlx_paged.chat: error: {' '.join(message.split())}")
    return 2


def _clean(text: str) -> str:
    """Text without what no tokenizer takes: bytes that were no UTF-8, which Python hands over as lone surrogates."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _say_setting(args: argparse.Namespace, conversation: Conversation) -> None:
    import mlx.core as mx

    cache = conversation.session.cache
    config = cache.config
    device = "Metal" if mx.metal.is_available() else "GPU" if mx.default_device().type == mx.gpu else "CPU"
    backend = getattr(cache, "backend", "MLX SDPA")
    _say(f"[model: {args.model or 'bundled demo model'} | device: {device} | backend: {backend} | kv: {cache.kind}]")
    if cache.kind == "paged":
        _say(
            f"[K/V budget: {config.num_blocks:,} blocks of {config.block_size} tokens = {config.num_slots:,} tokens = "
            f"{config.nbytes / 1e9:.2f} GB ({config.nbytes_per_token:,} bytes a token in {config.dtype}); "
            f"grows into it]"
        )
    else:
        _say(f"[K/V budget: {config.num_slots:,} tokens = {config.nbytes / 1e9:.2f} GB in {config.dtype}]")
    if args.model is None:
        _say(
            "[This is the demo model: tiny, trained on made-up text. It recalls, copies, counts and adds; try: The "
            f"code of apple is 4821. What is the code of apple? A real model: --model {EXAMPLE_MODEL}]"
        )


def _say_figures(conversation: Conversation, response: GenerationResponse, max_tokens: int) -> None:
    stats = conversation.session.cache.stats()
    _say(
        f"Prompt: {response.prompt_tokens} tokens ({response.cached_tokens} reused), "
        f"{response.prompt_tps:.3f} tokens-per-sec, first token after {response.time_to_first_token:.3f} s"
    )
    _say(f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec")
    blocks = f"{stats.blocks_used} of {stats.num_blocks} blocks in use, " if stats.num_blocks else ""
    _say(f"K/V: {blocks}{stats.num_tokens} tokens, {stats.nbytes_held / 1e6:.1f} MB held")
    _say(f"Peak memory: {response.peak_memory:.3f} GB")
    if response.finish_reason == "length":
        if response.generation_tokens == max_tokens:
            _say(f"[the answer was cut at --max-tokens {max_tokens}]")
        else:
            _say("[the answer was cut: the K/V budget is full; raise --kv-cache-bytes or /reset]")


def _say_stats(conversation: Conversation) -> None:
    stats = conversation.session.cache.stats()
    config = conversation.session.cache.config
    unfilled = 1 - stats.num_tokens * config.nbytes_per_token / stats.nbytes_used if stats.nbytes_used else 0.0
    _say(f"messages: {len(conversation.messages)}, tokens held: {stats.num_tokens}")
    if stats.num_blocks:
        _say(
            f"blocks: {stats.blocks_used} of {stats.num_blocks} in use ({stats.blocks_used / stats.num_blocks:.1%}), "
            f"{config.block_size} tokens each, {unfilled:.1%} of their slots unfilled"
        )
    _say(
        f"K/V memory: {stats.nbytes_used / 1e6:.2f} MB used, {stats.nbytes_held / 1e6:.2f} MB allocated, "
        f"budget {config.nbytes / 1e6:.2f} MB"
    )


if __name__ == "__main__":
    sys.exit(main())

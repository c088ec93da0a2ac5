"""Chat with a model in the terminal: ``python -m mlx_paged.chat``, or with a message, once.

The answer goes to stdout and everything else to stderr, so that it can be piped. Flags follow ``mlx_lm.chat``.
Nothing heavy is imported until the arguments are known to be right.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from mlx_paged import __version__, arguments
from mlx_paged.config import BLOCK_SIZES
from mlx_paged.interrupts import caught_interrupts

if TYPE_CHECKING:
    from mlx_paged.conversation import Conversation
    from mlx_paged.generation import GenerationResponse
    from mlx_paged.request import SamplingParams
    from mlx_paged.responder import Responder

EXAMPLE_MODEL = "mlx-community/Qwen3-0.6B-4bit"
HELP = """\
/help    this text
/fork    go on in a branch, which shares the K/V of the conversation so far
/back    leave the branch, and go on where it began
/reset   forget the conversation (the system prompt stays)
/stats   what the K/V cache holds, how often it was hit, what the branches share
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
    params = _sampling_params(args)
    if message is not None:
        return _answer_once(conversation, message, params)
    _chat(conversation, params)
    return 0


def _load_conversation(args: argparse.Namespace) -> Conversation:
    _say(f"[loading {args.model or 'the bundled demo model'} ...]", end="\r" if sys.stderr.isatty() else "\n")
    from mlx_paged.conversation import Conversation
    from mlx_paged.loading import demo_model_path, load

    model, tokenizer = load(args.model or demo_model_path(), adapter_path=args.adapter_path)
    conversation = Conversation(
        _make_responder(args, model, tokenizer),
        tokenizer,
        system_prompt=None if args.system_prompt is None else _clean(args.system_prompt),
        enable_thinking=False if args.no_thinking else None,
    )
    _say_setting(args, conversation)
    return conversation


def _make_responder(args: argparse.Namespace, model: Any, tokenizer: Any) -> Responder:
    from mlx_paged.responder import EngineResponder, SessionResponder

    options = {"block_size": args.block_size, "kv_cache_bytes": args.kv_cache_bytes, "backend": args.backend}
    if args.kv == "paged":
        from mlx_paged.engine.engine import Engine

        # One answer at a time; the branches wait in the prefix cache.
        scheduling = {"max_num_seqs": 1, "max_num_batched_tokens": args.prefill_step_size}
        return EngineResponder(Engine(model, tokenizer, seed=args.seed, **options, **scheduling))
    import mlx.core as mx

    from mlx_paged.engine.model_runner import ModelRunner, make_kv_cache
    from mlx_paged.engine.session import Session

    mx.random.seed(args.seed)
    session = Session(ModelRunner(model, make_kv_cache(model, args.kv, **options)))
    return SessionResponder(session, tokenizer, args.prefill_step_size)


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    from mlx_paged.request import SamplingParams

    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temp,
        top_p=args.top_p or 1.0,  # As in mlx-lm, 0 is off.
        top_k=args.top_k,
        min_p=args.min_p,
    )


# Answers


def _answer_once(conversation: Conversation, message: str, params: SamplingParams) -> int:
    try:
        was_interrupted = _answer(conversation, message, params)
    except (ValueError, RuntimeError) as error:
        return _fail(str(error))
    return 130 if was_interrupted else 0


def _chat(conversation: Conversation, params: SamplingParams) -> None:
    _say("[/help for commands, Ctrl-D to leave]")
    branches = [conversation]  # the last one is talked to
    while True:
        try:
            line = _read_line()
            if line is None or line.strip() in ("/exit", "/quit"):
                return
            _take_turn(branches, line, params)
        except KeyboardInterrupt:
            _say("\n[Ctrl-D or /exit to leave]")


def _take_turn(branches: list[Conversation], line: str, params: SamplingParams) -> None:
    command = line.strip()
    if not command:
        return
    if command in COMMANDS:
        COMMANDS[command](branches)
    elif command.startswith("/") and " " not in command:
        _say(f"[unknown command {command}; /help lists them]")
    else:
        try:
            _answer(branches[-1], line, params)
        except (ValueError, RuntimeError) as error:
            _say(f"[{error}]")


def _fork(branches: list[Conversation]) -> None:
    try:
        branches.append(branches[-1].fork())
    except RuntimeError as error:
        _say(f"[{error}]")
        return
    num_tokens = len(branches[-1].responder.tokens)
    _say(f"[branch {len(branches) - 1} of the conversation: {num_tokens} tokens so far are shared; /back leaves it]")


def _back(branches: list[Conversation]) -> None:
    if len(branches) == 1:
        _say("[this is no branch; /fork begins one]")
        return
    branches.pop().responder.close()
    where = f"in branch {len(branches) - 1}" if len(branches) > 1 else "in the conversation"
    _say(f"[back {where}: messages: {len(branches[-1].messages)}]")


def _reset(branches: list[Conversation]) -> None:
    branches[-1].reset()
    if len(branches) == 1:
        # Nothing that another branch goes back to.
        branches[0].responder.shrink()
    _say("[the conversation is empty]")


class _StopAnswer(Exception):
    """Ctrl-C, between two steps."""


def _answer(conversation: Conversation, message: str, params: SamplingParams) -> bool:
    """Stream one answer and its figures; True when Ctrl-C cut it short."""
    show_progress = sys.stderr.isatty()
    response = None
    # The second Ctrl-C leaves the program.
    with caught_interrupts(second=SystemExit(130)) as interrupted:

        def progress(done: int, total: int) -> None:
            # A step is never cut in the middle: the cache is whole whenever we are here.
            if interrupted:
                raise _StopAnswer
            if show_progress and 0 < done < total:
                _say(f"[prompt {done}/{total} tokens, {100 * done // total}%]", end="\r")

        answer = conversation.ask(message, params, progress=progress)
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
        _say_figures(conversation, response, params.max_tokens)
    if interrupted:
        _say("[stopped]")
    return bool(interrupted)


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

    cache = conversation.responder.cache
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
    stats = conversation.responder.cache.stats()
    _say(
        f"Prompt: {response.prompt_tokens} tokens ({response.cached_tokens} reused), "
        f"{response.prompt_tps:.3f} tokens-per-sec, first token after {response.time_to_first_token:.3f} s"
    )
    _say(f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec")
    num_tokens = len(conversation.responder.tokens)
    _say(f"K/V: {num_tokens} tokens of the conversation, {stats.nbytes_held / 1e6:.1f} MB allocated")
    _say(f"Peak memory: {response.peak_memory:.3f} GB")
    if response.finish_reason == "length":
        if response.generation_tokens == max_tokens:
            _say(f"[the answer was cut at --max-tokens {max_tokens}]")
        else:
            _say("[the answer was cut: the K/V budget is full; raise --kv-cache-bytes or /reset]")


def _say_stats(branches: list[Conversation]) -> None:
    responder = branches[-1].responder
    stats, config = responder.cache.stats(), responder.cache.config
    _say(f"messages: {len(branches[-1].messages)}, tokens held: {len(responder.tokens)}")
    if responder.cache.kind == "paged":
        _say_pool(branches)
    _say(f"K/V memory: {stats.nbytes_held / 1e6:.2f} MB allocated, budget {config.nbytes / 1e6:.2f} MB")


def _say_pool(branches: list[Conversation]) -> None:
    engine = branches[-1].responder.engine
    stats, config = engine.stats(), engine.cache.config
    _say(
        f"blocks: {stats.num_cached_blocks} of {config.num_blocks} hold K/V "
        f"({stats.num_cached_blocks / config.num_blocks:.1%}), {config.block_size} tokens each, "
        f"{stats.num_evictions} evicted so far"
    )
    _say(
        f"prefix cache: {stats.num_hit_tokens} of {stats.num_queried_tokens} prompt tokens found ({stats.hit_rate:.1%})"
    )
    num_branches = len(branches) - 1
    if num_branches:
        tables = [engine.cached_block_ids(branch.responder.tokens) for branch in branches]
        _say(
            f"sharing: the conversation and {num_branches} branch{'es' * (num_branches > 1)} are "
            f"{sum(map(len, tables))} blocks long and take {len(set().union(*tables))}"
        )


COMMANDS = {
    "/help": lambda branches: _say(HELP),
    "/fork": _fork,
    "/back": _back,
    "/reset": _reset,
    "/stats": _say_stats,
}


if __name__ == "__main__":
    sys.exit(main())

"""The chat as a program: its flags, which are named after those of ``mlx_lm.chat``, the settings
that /set changes, and the way to its exit status. MLX is not imported until the arguments are
checked.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import stat
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_paged.cli import flags
from mlx_paged.cli.chat.terminal import Reader, Screen, clean, read_stdin
from mlx_paged.cli.program import Parser, import_first, is_follower, run_program
from mlx_paged.cli.streams import warnings_as_lines, write
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.options.argument_values import (
    ANY_TEXT,
    AT_LEAST_0,
    AT_LEAST_1,
    Domain,
    Option,
    one_of,
    switch,
)
from mlx_paged.options.config import DEFAULT_MAX_NUM_BATCHED_TOKENS
from mlx_paged.options.sampling_declarations import SAMPLING_PARAMS
from mlx_paged.options.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mlx_paged.cli.chat.conversation import Conversation
    from mlx_paged.snapshots.prompt_caches import PrefixFacts

OPTIONS = {
    "seed": Option("random seed for sampling", AT_LEAST_0, default=0),
    "system_prompt": Option("system prompt of the conversation", replace(ANY_TEXT, parse=clean)),
    "prompt_cache_file": Option(
        "continue the prompt whose K/V and token ids are in this file, such as a snapshot",
        replace(ANY_TEXT, metavar="FILE"),
    ),
    "allow_other_model": switch(
        "use --prompt-cache-file with --model even if the file names another model"
    ),
    "hide_thinking": switch("hide the model's reasoning (<think>)"),
    "prefill_step_size": Option(
        "prompt tokens computed at a time",
        AT_LEAST_1,
        default_text="as many as take --prefill-step-seconds, up to "
        f"{DEFAULT_MAX_NUM_BATCHED_TOKENS}",
    ),
    "plain": switch(
        "write plain text to a terminal, for screen readers too: no markdown, no dimmed or redrawn "
        "lines"
    ),
    "json": switch(
        "with a message: write the answer and its statistics, or an error, as one JSON object"
    ),
    "verbose": switch("print all statistics of the model, the cache and each answer"),
}
# The flags by the library's arguments, for errors. "kv" is left out: errors quote kv='basic'.
FLAGS = flags.FLAGS | flags.engine_flags("chat") | {"max_num_batched_tokens": "--prefill-step-size"}
del FLAGS["kv"]
_NO_INPUT = (
    "there is no message: give one as argument, or on standard input, or start the chat in a "
    "terminal"
)


class _Parser(Parser):
    """``words`` of the result are those that are no flags, and ``is_message`` says that the only
    one comes after ``--``.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        given = list(sys.argv[1:] if args is None else args)
        known, rest = super().parse_known_args(given, namespace)
        if not any(word.startswith("-") for word in rest):
            # argparse takes the words before the next flag only.
            known.words, rest = [*known.words, *rest], []
        known.is_message = len(known.words) == 1 and given[-2:] == ["--", *known.words]
        return known, rest


def setup_arg_parser(prog: str | None = None) -> Parser:
    """The argument parser of the chat, for a program of this name."""
    name = Path(sys.argv[0]).name  # as it was called
    chat = _Parser(
        prog=prog or (name if name == "mlx_paged.chat" else "python -m mlx_paged.chat"),
        description="Chat with a model in the terminal, or ask it once.",
        flags=flags.SAMPLING | FLAGS,
        usage="%(prog)s [options] [model] [message]",
    )
    chat.add_argument(
        "words",
        nargs="*",
        metavar="model, message",
        help="the model, as --model, or a single word that is a path or a model on this machine; "
        "answer this message and exit; - reads it, of any number of lines, from stdin",
    )
    flags.add_flags(chat, "chat", OPTIONS)
    chat.add_version()
    return chat


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run the chat and return its exit status.

    It is 0, 1 if output was lost, 2 for a mistake of the user, or 130 after Ctrl-C.

    Args:
        argv: the arguments, without the program's name; those of this process by default.
        prog: the program's name in help and errors.
    """
    parser = setup_arg_parser(prog)
    if "--json" in (sys.argv[1:] if argv is None else argv):
        parser.report = lambda text: _write_json({"error": text})
    return run_program(parser, argv, _run, FLAGS)


def _run(args: argparse.Namespace) -> int:
    screen = Screen()
    screen.is_plain = args.plain
    try:
        with warnings_as_lines(screen.warn):
            _read_words(args)
            if not is_follower():
                return _answer_or_converse(args, screen)
            warnings.simplefilter("ignore")  # rank 0 shows them
            _load(args)[0].engine.follow()
            return 0
    finally:
        screen.clear_progress()


def _answer_or_converse(args: argparse.Namespace, screen: Screen) -> int:
    """Answer the message, or else read messages; returns the exit status.

    Raises:
        ValueError: there was no message in the pipe.
    """
    message = _read_message(args)
    with closing(_make_reader(screen) if message is None else Reader()) as reader:
        loading = f"[loading {args.model or 'the bundled demo model'} ...]"
        if args.verbose:
            screen.say(loading)
        else:
            screen.announce(loading, "[loading ...]")
        conversation, settings = _load(args)
        with closing(conversation.engine):
            from mlx_paged.cli.chat.commands import converse
            from mlx_paged.cli.chat.dialogue import Dialogue, say_start

            if args.verbose or not args.json:
                say_start(screen, args, conversation.engine, settings, message is None)
            dialogue = Dialogue([conversation], settings, screen, reader, args.verbose)
            if message is None:
                if not converse(dialogue) and not reader.is_interactive:
                    raise ValueError(f"standard input is empty; {_NO_INPUT}")
                return 0
            if not args.json:
                return 130 if dialogue.ask(message) else 0
            answer = dialogue.answer_in_full(message)
            _write_json({"model": args.model or "demo", **answer})
            return 130 if answer["finish_reason"] == "interrupted" else 0


def _write_json(content: Mapping[str, Any]) -> None:
    """Write one line of JSON to stdout, in ASCII, which every locale can write."""
    write(json.dumps(content) + "\n")


def _read_words(args: argparse.Namespace) -> None:
    """Set ``args.model`` and ``args.message`` from the words of the command line: a message, a
    model that is on this machine, or a model and a message.

    Raises:
        ValueError: it is unclear what a word is, or there are too many.
    """
    words, has_model = args.words, args.model is not None
    args.message = words[-1] if words else None
    if len(words) > 2 - has_model:
        beside = " beside --model" * has_model
        raise ValueError(
            f"{len(words)} words are given{beside}; a message of several words needs quotes"
        )
    if not words or has_model or words == ["-"] or args.is_message:
        return
    word, is_model_given = words[0], len(words) == 2
    is_one_word = len(word.split()) == 1 or os.path.exists(os.path.expanduser(word))
    if not (is_model_given or is_one_word):
        return
    import_first("mlx_paged.loading")
    from mlx_paged.loading.folder import local_model_of

    model, way = local_model_of(word)
    if is_model_given:
        if model is None and way is None:
            raise ValueError(
                f"there is no model {shown(word)}; a message of several words needs quotes"
            )
        args.model = model or word
    elif model is not None:
        args.model, args.message = model, None
    elif way is not None:
        quoted = shlex.quote(word) if shlex.quote(word) != word else f"'{word}'"
        raise ValueError(
            f"there is no model {shown(word)} on this machine; {way}. To send this as a message, "
            f"put -- before it (-- {quoted}), or send it through a pipe"
        )


def _make_reader(screen: Screen) -> Reader:
    """The reader for this program's stdin."""
    if not sys.stdin.isatty() or not (screen.stderr_is_terminal or screen.stdout_is_terminal):
        return Reader()
    from mlx_paged.cli.chat.line_editor import LineEditor, history_path

    return LineEditor(screen, history_path(os.environ))


def _read_message(args: argparse.Namespace) -> str | None:
    """The message to answer once, or ``None`` for a dialogue; raises ``ValueError`` if there can be
    neither.
    """
    if args.message is None:
        if args.json:
            raise ValueError("--json answers one message; give it as argument, or - to read it")
        if _is_known_to_be_empty(sys.stdin):
            raise ValueError(f"standard input is empty; {_NO_INPUT}")
        return None
    message = clean(args.message)
    if message == "-":
        message = ""
        with suppress(EOFError):
            message = read_stdin(sys.stdin.read)
    if not message.strip():
        raise ValueError("the message is empty")
    return message


def _is_known_to_be_empty(stdin: Any) -> bool:
    """Whether stdin is an empty file or device, and not a terminal."""
    try:
        mode = os.fstat(stdin.fileno()).st_mode
        waits = stdin.isatty() or not (stat.S_ISREG(mode) or stat.S_ISCHR(mode))
        return not waits and not stdin.buffer.peek(1)
    except (OSError, ValueError, AttributeError):  # not a file
        return False


def _load(args: argparse.Namespace) -> tuple[Conversation, Settings]:
    import_first("mlx_paged.loading", "mlx_paged.cli.chat.dialogue")
    from mlx_paged.cli.chat.conversation import Conversation
    from mlx_paged.engine.engine import Engine
    from mlx_paged.engine.options import with_step_seconds
    from mlx_paged.snapshots.prompt_caches import PrefixFacts

    facts: PrefixFacts | None = None
    if args.prompt_cache_file is None:
        if args.allow_other_model:
            raise ValueError("--allow-other-model is of no use without --prompt-cache-file")
    elif args.system_prompt is not None:
        raise ValueError(
            "--system-prompt can't be combined with --prompt-cache-file, which already begins the "
            "conversation; make it part of the cached prompt"
        )
    else:
        facts = PrefixFacts.read(args.prompt_cache_file)
        if not args.allow_other_model or args.model is None:
            args.model = _model_of(facts, args.model)
    config = None if facts is None else dict(facts.tokenizer_config)
    model, tokenizer, options, sampling = flags.load_model(args, "chat", config)
    # As in mlx_lm.chat, XTC never removes line breaks and the end of sequence.
    newline = tokenizer.encode("\n", add_special_tokens=False)
    sampling["xtc_special_tokens"] = [*newline, *tokenizer.eos_token_ids]
    # One answer at a time; the branches stay in the prefix cache.
    options |= {"max_num_seqs": 1, "max_num_batched_tokens": args.prefill_step_size}
    engine = Engine(model, tokenizer, **with_step_seconds(options))
    prefix: list[int] = []
    if facts is not None and facts.is_snapshot:
        prefix = engine.load_snapshot(facts.file)
    elif facts is not None:
        # The model was chosen by the file.
        prefix = engine.import_prompt_cache(facts.file, allow_other_model=True)
    thinking = {"enable_thinking": False} if args.no_thinking else {}
    conversation = Conversation(engine, tokenizer, args.system_prompt, thinking, prefix)
    return conversation, Settings(args, sampling)


def _model_of(facts: PrefixFacts, given: str | None) -> str | None:
    """The model to load: the one that a file of K/V names, or ``--model``.

    Raises:
        ArgumentError: they name different models.
    """
    from mlx_paged.loading.folder import DEMO, demo_model_path

    # A file that this package exported may have only the folder's name, as for the bundled model.
    named = DEMO if facts.model == demo_model_path().name else facts.model
    if given is None or facts.model is None or facts.model == Path(given).name or given == named:
        return given or named
    folders = [Path(name).expanduser() for name in (given, facts.model)]
    if not (all(folder.exists() for folder in folders) and folders[0].samefile(folders[1])):
        raise ArgumentError(
            f"[chat] --prompt-cache-file {facts.file} was made with the model {facts.model}, and "
            f"--model is {given}; leave --model out, create the file again, or use "
            "--allow-other-model if they are the same",
            "model",
        )
    return given


# What /set changes


# Sampling parameters by their names in /set.
_FIELDS = {
    each.flag_name(name).removeprefix("--"): name
    for name, each in SAMPLING_PARAMS.items()
    if each.flag is not None
} | {"seed": "seed"}
_SHOWN_APART = ("temperature", "xtc_probability", "xtc_threshold", "max_tokens", "seed")
# The settings by name, with their values.
VARIABLES: dict[str, Domain[Any]] = {
    **{name: SAMPLING_PARAMS[field].flag_domain for name, field in _FIELDS.items()},
    "seed": AT_LEAST_0,
    "thinking": replace(one_of("show", "hide"), what="show or hide", parse=str.lower),
}


class Settings:
    """The settings that can be changed while the chat runs.

    Args:
        args: the flags; a sampling flag that was not given is ``None``.
        chosen: the sampling, by field of ``SamplingParams``.

    Attributes:
        sampling: parameters of the next answers; ``seed`` is that of their seeds.
        from_model: names of the sampling settings that the model recommends.
        thinking: ``"show"`` or ``"hide"``: what becomes of the model's reasoning.
    """

    def __init__(self, args: argparse.Namespace, chosen: Mapping[str, Any]):
        # The text is searched for reasoning marks, which may be special tokens.
        self.sampling = SamplingParams(
            max_tokens=args.max_tokens, seed=args.seed, skip_special_tokens=False, **chosen
        )
        not_given = {name for name, value in vars(args).items() if value is None}
        self.from_model = [canonical_name(name) for name in chosen if name in not_given]
        self.thinking = "hide" if args.hide_thinking else "show"
        self._seeds = random.Random(args.seed)

    def next_params(self) -> SamplingParams:
        """The parameters of the next answer, with a new seed."""
        return replace(self.sampling, seed=self._seeds.getrandbits(63))

    def describe_sampling(self) -> str:
        """``"greedy"``, or the temperature and the active filters."""
        sampling, default = self.sampling, SamplingParams()
        if sampling.is_greedy:
            return "greedy"
        shown = [f"temp {sampling.temperature:g}"]
        for name, field in _FIELDS.items():
            if field not in _SHOWN_APART and getattr(sampling, field) != getattr(default, field):
                shown.append(f"{name} {self.get(name)}")
        if sampling.xtc_probability:
            shown.append(f"xtc {sampling.xtc_probability:g} above {sampling.xtc_threshold:g}")
        return ", ".join(shown)

    def get(self, name: str) -> str:
        """The value of a setting as text."""
        value = getattr(self.sampling, _FIELDS[name]) if name in _FIELDS else self.thinking
        return f"{value:g}" if isinstance(value, float) else str(value)

    def set(self, name: str, text: str) -> None:
        """Change one setting.

        Raises:
            ValueError: the value is invalid.
        """
        try:
            value = VARIABLES[name].read_flag(text)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{name} {error}") from error
        if name in _FIELDS:
            self.sampling = replace(self.sampling, **{_FIELDS[name]: value})
        else:
            self.thinking = value
        if name == "seed":
            self._seeds = random.Random(value)


def canonical_name(name: str) -> str:
    """``top_p``, ``TOP-P`` and ``--top-p`` are ``top-p``; ``temperature`` is ``temp``."""
    name = name.lower().lstrip("-").replace("_", "-")
    return "temp" if name == "temperature" else name

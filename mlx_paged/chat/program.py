"""The chat as a program, from its arguments to its exit status.

MLX is not imported until the arguments are checked.
"""

from __future__ import annotations

import argparse
import os
import shlex
import stat
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

from mlx_paged.chat.command_line import (
    FLAGS,
    Settings,
    error_line,
    setup_arg_parser,
    write_json,
)
from mlx_paged.chat.terminal import (
    PipeReader,
    Reader,
    Screen,
    clean,
    is_terminal,
    without_line_end,
)
from mlx_paged.command_line.imports import import_first
from mlx_paged.command_line.program import run_program
from mlx_paged.errors import shown
from mlx_paged.launch import is_follower, say_errors_only
from mlx_paged.standard_streams import NO_STDOUT, OutputLostError, read_all, warnings_as_lines

if TYPE_CHECKING:
    from mlx_paged.chat.conversation import Conversation

NO_INPUT = (
    "there is no message: give one as argument, or on standard input, or start the chat in a "
    "terminal"
)


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run the chat and return its exit status.

    It is 0, 1 if output was lost, 2 for a mistake of the user, or 130 after Ctrl-C.

    Args:
        argv: the arguments, without the program's name; those of this process by default.
        prog: the program's name in help and errors.
    """
    screen = Screen()

    def run(args: argparse.Namespace) -> int:
        screen.is_plain = args.plain
        try:
            with warnings_as_lines(screen.warn):
                return _run(args, screen)
        finally:
            screen.clear_progress()

    mistakes = (ValueError, RuntimeError)
    return run_program(setup_arg_parser(prog), argv, run, FLAGS, mistakes=mistakes)


def _run(args: argparse.Namespace, screen: Screen) -> int:
    try:
        _read_words(args)
    except ValueError as error:
        if args.json:
            write_json({"error": error_line(error)})
        raise
    if is_follower():
        say_errors_only()
        _load(args)[0].engine.follow()
        return 0
    if sys.stdout is None:
        raise OutputLostError(NO_STDOUT)
    try:
        message = _read_message(args)
        with closing(_make_reader(screen) if message is None else PipeReader()) as reader:
            _say_loading(args, screen)
            conversation, settings = _load(args)
            with closing(conversation.engine):
                return _answer_or_converse(args, message, conversation, settings, screen, reader)
    except (ValueError, RuntimeError, KeyboardInterrupt) as error:
        if args.json:
            is_interrupt = isinstance(error, KeyboardInterrupt)
            write_json({"error": "interrupted" if is_interrupt else error_line(error)})
        raise


def _say_loading(args: argparse.Namespace, screen: Screen) -> None:
    loading = f"[loading {args.model or 'the bundled demo model'} ...]"
    if args.verbose:
        screen.say(loading)
    else:
        screen.announce(loading, "[loading ...]")


def _answer_or_converse(
    args: argparse.Namespace,
    message: str | None,
    conversation: Conversation,
    settings: Settings,
    screen: Screen,
    reader: Reader,
) -> int:
    """Answer the message, or else read messages; returns the exit status.

    Raises:
        ValueError: there was no message in the pipe.
    """
    from mlx_paged.chat.dialogue import (
        Dialogue,
        describe_start,
        describe_start_briefly,
        warnings_at_start,
    )
    from mlx_paged.chat.loop import converse

    if args.verbose:
        screen.say(describe_start(args, conversation.engine, settings, message is None))
    elif not args.json:
        parts = describe_start_briefly(args, conversation.engine, settings)
        screen.say_in_a_line(parts, "/help" if message is None else "")
    if not args.json or args.verbose:
        for warning in warnings_at_start(args, conversation.engine):
            screen.say(warning)
    dialogue = Dialogue([conversation], settings, screen, reader, args.verbose)
    if message is not None and args.json:
        answer = dialogue.answer_in_full(message)
        write_json({"model": args.model or "demo", **answer})
        return 130 if answer["finish_reason"] == "interrupted" else 0
    if message is not None:
        return 130 if dialogue.ask(message) else 0
    if not converse(dialogue) and not reader.is_interactive:
        raise ValueError(f"standard input is empty; {NO_INPUT}")
    return 0


def _read_words(args: argparse.Namespace) -> None:
    """Set ``args.model`` and ``args.message`` from the words of the command line: a message, a
    model, or a model and a message.

    Raises:
        ValueError: it is unclear what a word is, or there are too many.
    """
    words = args.words
    args.message = words[-1] if words else None
    if len(words) == 1 and args.model is None and words[0] != "-" and not args.is_message:
        _read_only_word(args, words[0])
    elif len(words) == 2 and args.model is None:
        args.model = _named_model(words[0])
    elif len(words) > 1:
        beside = "" if args.model is None else " beside --model"
        raise ValueError(
            f"{len(words)} words are given{beside}; a message of several words needs quotes"
        )


def _read_only_word(args: argparse.Namespace, word: str) -> None:
    """It is a model if it is one on this machine, and else the message."""
    if len(word.split()) != 1 and not os.path.exists(os.path.expanduser(word)):
        return
    import_first("mlx_paged.loading")
    from mlx_paged.loading.folder import is_model, local_model_of, way_to_get

    model, way = local_model_of(word), way_to_get(word)
    if model is not None and not is_model(model):
        way = "a model is a folder with config.json and weights, or a .gguf file"
    elif model is not None:
        args.model, args.message = model, None
        return
    if way is not None:
        quoted = shlex.quote(word) if shlex.quote(word) != word else f"'{word}'"
        raise ValueError(
            f"there is no model {shown(word)} on this machine; {way}. To send this as a message, "
            f"put -- before it (-- {quoted}), or send it through a pipe"
        )


def _named_model(word: str) -> str:
    """The model that the first of two words names."""
    import_first("mlx_paged.loading")
    from mlx_paged.loading.folder import local_model_of, way_to_get

    model = local_model_of(word)
    if model is None and way_to_get(word) is None:
        raise ValueError(
            f"there is no model {shown(word)}; a message of several words needs quotes"
        )
    return model or word


def _make_reader(screen: Screen) -> Reader:
    """The reader for this program's stdin."""
    if not is_terminal(sys.stdin) or not (screen.stderr_is_terminal or screen.stdout_is_terminal):
        return PipeReader()
    from mlx_paged.chat.line_editor import LineEditor, history_path
    from mlx_paged.chat.loop import complete

    return LineEditor(complete, screen, history_path(os.environ))


def _read_message(args: argparse.Namespace) -> str | None:
    """The message to answer once, or ``None`` for a dialogue; raises ``ValueError`` if there can be
    neither.
    """
    if args.message is None:
        if args.json:
            raise ValueError("--json answers one message; give it as argument, or - to read it")
        if sys.stdin is None:
            raise ValueError(f"standard input is closed; {NO_INPUT}")
        if _is_known_to_be_empty(sys.stdin):
            raise ValueError(f"standard input is empty; {NO_INPUT}")
        return None
    message = args.message
    if message == "-":
        message = without_line_end(read_all())
    message = clean(message)
    if not message.strip():
        raise ValueError("the message is empty")
    return message


def _is_known_to_be_empty(stdin: Any) -> bool:
    """Whether stdin is an empty file or device, and not a terminal."""
    try:
        mode = os.fstat(stdin.fileno()).st_mode
        waits = is_terminal(stdin) or not (stat.S_ISREG(mode) or stat.S_ISCHR(mode))
        return not waits and not stdin.buffer.peek(1)
    except (OSError, ValueError, AttributeError):  # not a file
        return False


def _load(args: argparse.Namespace) -> tuple[Conversation, Settings]:
    import_first("mlx_paged.loading", "mlx_paged.chat.dialogue")
    from mlx_paged.chat.conversation import (
        Conversation,
        chosen_model,
        load_prefix,
        read_facts,
    )
    from mlx_paged.command_line.flags import engine_options
    from mlx_paged.distributed import launched_ranks
    from mlx_paged.engine.engine import Engine
    from mlx_paged.engine.options import with_step_seconds
    from mlx_paged.loading import (
        demo_model_path,
        dtype_config,
        find_model_for,
        load_draft_model,
        load_for,
        read_sampling_defaults,
    )

    facts = None
    if args.allow_other_model and args.prompt_cache_file is None:
        raise ValueError("--allow-other-model is of no use without --prompt-cache-file")
    if args.prompt_cache_file is not None:
        if args.system_prompt is not None:
            raise ValueError(
                "--system-prompt can't be combined with --prompt-cache-file, which already begins "
                "the conversation; make it part of the cached prompt"
            )
        facts = read_facts(args.prompt_cache_file)
        args.model = chosen_model(facts, args.model, args.allow_other_model)
    folder = demo_model_path() if args.model is None else find_model_for(args.model, args.force)
    defaults = {} if args.no_generation_config else read_sampling_defaults(folder)
    settings = Settings(args, defaults)
    options = engine_options(args, "chat")
    model, tokenizer = load_for(
        launched_ranks(),
        folder,
        tokenizer_config=None if facts is None else dict(facts.tokenizer_config),
        model_config=dtype_config(folder, args.dtype),
        adapter_path=args.adapter_path,
        tokenizer_path=args.tokenizer,
        skip_check=args.skip_check,
        engine_options=options,
        refuses_too_large=not args.force,
    )
    # As in mlx_lm.chat, XTC never removes line breaks and the end of sequence.
    newline = tokenizer.encode("\n", add_special_tokens=False)
    settings.spare_from_xtc([*newline, *tokenizer.eos_token_ids])
    engine = Engine(
        model,
        tokenizer,
        draft_model=load_draft_model(args.draft_model, tokenizer, skip_check=args.skip_check),
        **with_step_seconds(
            {
                **options,
                # One answer at a time; the branches stay in the prefix cache.
                "max_num_seqs": 1,
                "max_num_batched_tokens": args.prefill_step_size,
            }
        ),
    )
    conversation = Conversation(
        engine,
        tokenizer,
        system_prompt=None if args.system_prompt is None else clean(args.system_prompt),
        enable_thinking=False if args.no_thinking else None,
        prefix=() if facts is None else load_prefix(engine, facts),
    )
    return conversation, settings

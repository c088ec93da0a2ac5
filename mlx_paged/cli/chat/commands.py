"""The loop of the chat: it answers messages, and runs commands, which begin with a slash."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mlx_paged.block_store.directory import replaced_file
from mlx_paged.cli.chat.dialogue import Dialogue
from mlx_paged.cli.chat.program import FLAGS, VARIABLES, canonical_name
from mlx_paged.cli.program import error_line
from mlx_paged.cli.streams import OutputLostError
from mlx_paged.engine.descriptions import describe_stats
from mlx_paged.errors import CacheFullError, one_line, reason, system_reason, without_room

FORMAT = "mlx_paged.chat"
VERSION = 1
KV_SUFFIX = ".safetensors"
KEYS = (
    ("//TEXT", "send a message that begins with a slash"),
    ("\\ at a line's end", "continue on a new line, as Alt-Enter (Esc Enter) does"),
    ("Tab, arrow keys", "complete a command, recall earlier messages"),
    ("Ctrl-C, Ctrl-D", "stop an answer, leave the chat"),
)


class LeaveChat(EOFError):
    """The user said /exit, which ends the input."""


def converse(dialogue: Dialogue) -> int:
    """Handle messages until the user leaves; returns their number, commands included.

    Raises:
        KeyboardInterrupt: Ctrl-C, if the messages come from a pipe.
        OutputLostError: stdout can't be written.
    """
    reader, num_messages = dialogue.reader, 0
    while True:
        try:
            text = reader.read()
            if text.strip():
                num_messages += 1
                take(dialogue, text)
        except EOFError:
            return num_messages
        except KeyboardInterrupt:
            if not reader.is_interactive:
                raise
            dialogue.screen.say("[Ctrl-D or /exit to leave]")


def take(dialogue: Dialogue, text: str) -> None:
    """Handle a message or a command. Its errors are printed, and the conversation continues.

    Raises:
        LeaveChat: it was /exit.
        Others: see :func:`converse`.
    """
    stripped = text.strip()
    try:
        if not stripped.startswith("/"):
            dialogue.ask(text)
        elif stripped.startswith("//"):
            dialogue.ask(text.lstrip()[1:])
        else:
            name, *argument = stripped.split(None, 1)
            _run_command(dialogue, name, "".join(argument))
    except (LeaveChat, OutputLostError):
        raise
    except (ValueError, RuntimeError) as error:
        dialogue.screen.say(f"[{_said(error)}]")
    except Exception as error:
        # A bug, here or in the tokenizer, must not end the conversation.
        dialogue.screen.say(f"[{reason(error)}]")


def _run_command(dialogue: Dialogue, name: str, argument: str) -> None:
    command = COMMANDS.get(name.lower())
    if command is None:
        raise ValueError(
            f"unknown command {name}; /help lists them, and // begins a message with a slash"
        )
    if argument and not command.argument:
        raise ValueError(f"{command.name} takes no argument")
    if not argument and command.argument and not command.argument.startswith("["):
        raise ValueError(f"{command.name} needs {command.argument}")
    if (said := command.run(dialogue, argument)) is not None:
        dialogue.screen.say(f"[{said}]")


def _said(error: BaseException) -> str:
    """The text of an error, for a line in brackets."""
    return without_room(error_line(error, FLAGS))


# The commands. Each returns what is said of it in brackets, if anything.


def _help(dialogue: Dialogue, argument: str) -> None:
    dialogue.screen.say_rows([*((each.usage, each.help) for each in COMMAND_TABLE), *KEYS])


def _regenerate(dialogue: Dialogue, argument: str) -> None:
    conversation = dialogue.conversation
    if conversation.last_turn is None:
        raise ValueError("there is no message of the user yet")
    before, text = conversation.last_turn
    had_answer = conversation.messages[-1]["role"] == "assistant"
    dialogue.ask(text, before)
    if had_answer and dialogue.settings.sampling.is_greedy:
        greedy = "[greedy: the same answer each time; /set temp 0.7 varies it]"
        dialogue.screen.say(greedy, is_dim=True)


def _edit(dialogue: Dialogue, argument: str) -> str | None:
    if dialogue.conversation.last_turn is None:
        raise ValueError("there is no message to edit yet")
    (before, last), text = dialogue.conversation.last_turn, argument
    if not argument:
        if not dialogue.reader.is_interactive:
            raise ValueError("without a terminal, /edit needs the new text: /edit TEXT")
        with suppress(EOFError):
            text = dialogue.reader.read(last)
    if not text.strip():
        return "nothing has changed"
    dialogue.ask(text, before)
    return None


def _system(dialogue: Dialogue, argument: str) -> str:
    conversation = dialogue.conversation
    if not argument:
        current = conversation.system_prompt
        return "no system prompt" if current is None else f"system prompt: {current}"
    is_removed = argument in ('""', "''")
    conversation.set_system_prompt(None if is_removed else argument)
    return f"system prompt {'removed' if is_removed else 'set'}"


def _set(dialogue: Dialogue, argument: str) -> str | None:
    settings = dialogue.settings
    name, _, value = argument.replace("=", " ", 1).partition(" ")
    name, value = canonical_name(name), value.strip()
    if not name:
        dialogue.screen.say_rows([(name, settings.get(name)) for name in VARIABLES])
        return None
    if name not in VARIABLES:
        raise ValueError(f"unknown setting {name!r}; the settings are {', '.join(VARIABLES)}")
    if value:
        settings.set(name, value)
    return f"{name} {settings.get(name)}"


def _save(dialogue: Dialogue, argument: str, overwrites: bool = False) -> str:
    conversation, file = dialogue.conversation, _expand(argument)
    if not overwrites and is_transcript(file):
        if not dialogue.reader.is_interactive:
            raise ValueError(f"{file} exists; /save! {argument} overwrites it")
        dialogue.screen.say(f"[{file} exists]")
        if not dialogue.reader.confirm("overwrite it?"):
            return "not saved"
    # The messages first: the K/V may not fit on the disk.
    file = save_messages(file, conversation.messages)
    done = f"saved to {file}: messages: {len(conversation.messages)}"
    if conversation.tokens:
        dialogue.screen.announce("[saving the K/V ...]")
        kv_file = file.with_name(file.name + KV_SUFFIX)
        try:
            num_tokens = conversation.engine.save_snapshot(kv_file, conversation.tokens)
            save_messages(file, conversation.messages, kv_file.name)
            nbytes = kv_file.stat().st_size
            done += f"; K/V of {num_tokens:,} tokens in {kv_file.name}, {nbytes / 1e6:.1f} MB"
        except (ValueError, OSError) as error:
            dialogue.screen.say(f"[the K/V were not saved: {_said(error)}]")
    return done


def _load(dialogue: Dialogue, argument: str) -> str:
    conversation, file = dialogue.conversation, _expand(argument)
    messages, kv_file = load_messages(file)
    try:
        conversation.load_messages(messages)
    except ValueError as error:
        raise ValueError(f"{file} can't be continued: {_said(error)}") from error
    done = f"loaded from {file}: messages: {len(conversation.messages)}"
    if kv_file is not None:
        dialogue.screen.announce("[loading the K/V ...]")
        try:
            done += f"; K/V of {conversation.load_kv(kv_file):,} tokens"
        except (ValueError, CacheFullError) as error:
            said = f"[the K/V were not loaded, and will be recomputed: {_said(error)}]"
            dialogue.screen.say(said)
    is_open = bool(conversation.messages[-1]["role"] == "user")
    return done + "; /regenerate answers the last one" * is_open


def _fork(dialogue: Dialogue, argument: str) -> str:
    branches = dialogue.branches
    branches.append(branches[-1].fork())
    num_tokens = len(branches[-1].tokens)
    return (
        f"branch {len(branches) - 1} of the conversation: {num_tokens:,} tokens so far are "
        "shared; /back leaves it"
    )


def _back(dialogue: Dialogue, argument: str) -> str:
    branches = dialogue.branches
    if len(branches) == 1:
        return "this is not a branch; /fork begins one"
    branches.pop()
    where = f"in branch {len(branches) - 1}" if len(branches) > 1 else "in the conversation"
    return f"back {where}: messages: {len(branches[-1].messages)}"


def _reset(dialogue: Dialogue, argument: str) -> str:
    dialogue.conversation.reset()
    if len(dialogue.branches) == 1:
        # No other branch needs the K/V.
        dialogue.conversation.engine.reset_prefix_cache()
        dialogue.conversation.engine.shrink()
    return "the conversation is empty"


def _stats(dialogue: Dialogue, argument: str) -> None:
    conversation, branches = dialogue.conversation, dialogue.branches
    engine, num_branches = conversation.engine, len(branches) - 1
    held = f"messages: {len(conversation.messages)}, tokens held: {len(conversation.tokens):,}"
    *lines, memory = describe_stats(engine)
    if num_branches and engine.cache.kind == "paged":
        tables = [engine.cached_block_ids(each.tokens) for each in branches]
        lines.append(
            f"sharing: the conversation and {num_branches} branch{'es' * (num_branches > 1)} "
            f"have {sum(map(len, tables))} blocks, {len(set().union(*tables))} of them distinct"
        )
    dialogue.screen.say("\n".join([held, *lines, memory]))


def _exit(dialogue: Dialogue, argument: str) -> None:
    raise LeaveChat


class Command(NamedTuple):
    """A slash command.

    Args:
        argument: its name in the help; in brackets if it is optional, empty if there is none.
    """

    name: str
    argument: str
    help: str
    run: Callable[[Dialogue, str], str | None]

    @property
    def usage(self) -> str:
        return f"{self.name} {self.argument}".strip()


COMMAND_TABLE = (
    Command("/help", "", "list the commands and keys", _help),
    Command("/regenerate", "", "answer the last message again", _regenerate),
    Command("/edit", "[TEXT]", "replace the last message, and answer it", _edit),
    Command("/system", "[TEXT]", 'show, set or (with "") remove the system prompt', _system),
    Command("/set", "[NAME VALUE]", "show the settings or change one: /set temp 0.7", _set),
    Command("/save", "FILE", "save the conversation as JSON, and its K/V in a second file", _save),
    Command(
        "/save!", "FILE", "the same, over a saved conversation", partial(_save, overwrites=True)
    ),
    Command("/load", "FILE", "continue a saved conversation", _load),
    Command("/fork", "", "continue in a branch, which shares the K/V so far", _fork),
    Command("/back", "", "leave the branch and return to where it began", _back),
    Command("/reset", "", "start a new conversation; the system prompt stays", _reset),
    Command(
        "/stats", "", "K/V in use, hits of the prefix cache, blocks that branches share", _stats
    ),
    Command("/exit", "", "leave the chat (also /quit, Ctrl-D)", _exit),
)
COMMANDS = {each.name: each for each in COMMAND_TABLE} | {"/quit": COMMAND_TABLE[-1]}


# Saved conversations


def save_messages(
    file: Path, messages: Sequence[Mapping[str, Any]], kv_file: str | None = None
) -> Path:
    """Write the messages to a file, atomically; returns its path without links. No file but a saved
    conversation is overwritten.

    Args:
        kv_file: name of the file with the K/V, in the same folder.

    Raises:
        ValueError: the file is something else, or can't be written; the message is one line.
    """
    kv = {} if kv_file is None else {"kv_file": kv_file}
    content = {"format": FORMAT, "version": VERSION, **kv, "messages": messages}
    text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
    try:
        if file.exists() and not is_transcript(file):
            raise ValueError(f"{file} exists and is not a saved conversation; choose another name")
        file = file.resolve()
        with replaced_file(file) as stream:
            stream.write(text.encode("utf-8", errors="replace"))
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        raise ValueError(f"{file} can't be written: {system_reason(error)}") from error
    return file


def load_messages(file: Path) -> tuple[list[Any], Path | None]:
    """Read a file; returns its messages, which are not checked yet, and the file with their K/V, if
    there is one.

    Raises:
        ValueError: it can't be read, or is not a conversation; the message is one line.
    """
    content, kv_file = _read_json(file), None
    if isinstance(content, dict):
        if content.get("version", VERSION) != VERSION:
            raise ValueError(
                f"{file} has version {content['version']!r}, and only version {VERSION} can be read"
            )
        name = content.get("kv_file")
        # Always in the folder of the conversation: the file must not lead elsewhere.
        if isinstance(name, str) and "\0" not in name and Path(name).name:
            kv_file = file.resolve().with_name(Path(name).name)
        content = content.get("messages")
    if not isinstance(content, list):
        raise ValueError(f"{file} is not a conversation: it has no list of messages")
    return content, kv_file


def is_transcript(file: Path) -> bool:
    """Whether :func:`save_messages` wrote the file."""
    content = None
    with suppress(ValueError):
        content = _read_json(file)
    return isinstance(content, dict) and content.get("format") == FORMAT


def _read_json(file: Path) -> Any:
    if os.path.exists(file) and not os.path.isfile(file):  # reading a pipe would not end
        raise ValueError(f"{file} is not a file")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} can't be read: {system_reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a conversation: {one_line(error)}") from error


def _expand(path: str) -> Path:
    if "\0" in path:
        raise ValueError(f"{path!r} is not a file name")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path} can't be found: {error}") from error

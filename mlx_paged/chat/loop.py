"""The loop of a dialogue: messages are answered, and lines that begin with a slash are commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from mlx_paged.chat.command_line import error_line
from mlx_paged.chat.dialogue import Dialogue
from mlx_paged.chat.files import load_messages, save_kv, save_messages
from mlx_paged.chat.reports import describe_stats
from mlx_paged.chat.settings import VARIABLES, canonical_name
from mlx_paged.errors import CacheFullError, reason, without_room
from mlx_paged.standard_streams import OutputLostError

KEYS = (
    ("//TEXT", "send a message that begins with a slash"),
    ("\\ at a line's end", "go on in a new line; so do Alt-Enter (Esc Enter) and pasted lines"),
    ("Tab, arrow keys", "complete a command, bring back what was sent"),
    ("Ctrl-C, Ctrl-D", "stop an answer, leave"),
)


class LeaveChat(Exception):
    """The user said /exit."""


def converse(dialogue: Dialogue) -> int:
    """Take messages until the user leaves; returns how many there were, commands included.

    Raises:
        KeyboardInterrupt: Ctrl-C, where the messages come from a pipe.
        OutputLostError, BrokenPipeError: there is nowhere to write to.
    """
    reader, num_messages = dialogue.reader, 0
    while True:
        try:
            text = reader.read()
            if text is None:
                return num_messages
            if text.strip():
                num_messages += 1
                take(dialogue, text)
        except LeaveChat:
            return num_messages
        except KeyboardInterrupt:
            if not reader.is_interactive:
                raise
            dialogue.say("[Ctrl-D or /exit to leave]")


def take(dialogue: Dialogue, text: str) -> None:
    """One message or command of the user. An error is said, and the conversation lives on.

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
            _run_command(dialogue, stripped)
    except (LeaveChat, OutputLostError, BrokenPipeError):
        raise
    except (ValueError, RuntimeError) as error:
        dialogue.say(f"[{_said(error)}]")
    except Exception as error:
        # A defect, of ours or of the tokenizer: the conversation is worth more than its traceback.
        dialogue.say(f"[{reason(error)}]")


def _run_command(dialogue: Dialogue, line: str) -> None:
    name, *rest = line.split(None, 1)
    argument = "".join(rest)
    command = COMMANDS.get(name.lower())
    if command is None:
        dialogue.say(
            f"[unknown command {name}; /help lists them, and // begins a message with a slash]"
        )
    elif argument and not command.argument:
        dialogue.say(f"[{command.name} takes no argument]")
    elif not argument and command.argument and not command.argument.startswith("["):
        dialogue.say(f"[{command.name} needs {command.argument}]")
    else:
        command.run(dialogue, argument)


def _said(error: BaseException) -> str:
    """What an error says, for a line that is in brackets already."""
    return without_room(error_line(error))


def complete(typed: str) -> Iterable[str]:
    """The words that may follow at the end of a command line; ``"path"`` where a file name
    does."""
    words = typed.split(" ")
    if len(words) == 1:
        return sorted(COMMANDS)
    name = words[0].lower()
    if name in ("/save", "/load"):
        return ["path"]
    if name == "/set" and len(words) == 2:
        return VARIABLES
    if name == "/set" and len(words) == 3 and canonical_name(words[1]) in VARIABLES:
        return VARIABLES[canonical_name(words[1])].choices or ()
    return []


# The commands


def _help(dialogue: Dialogue, argument: str) -> None:
    dialogue.screen.say_rows([*((each.usage, each.help) for each in COMMAND_TABLE), *KEYS])


def _regenerate(dialogue: Dialogue, argument: str) -> None:
    last = dialogue.conversation.messages[-1:]
    had_answer = bool(last) and last[0]["role"] == "assistant"
    dialogue.ask_again()
    if had_answer and dialogue.settings.sampling.is_greedy:
        dialogue.screen.say_dim("[greedy: the same answer each time; /set temp 0.7 brings others]")


def _edit(dialogue: Dialogue, argument: str) -> None:
    before = dialogue.conversation.last_user_text
    if before is None:
        raise ValueError("there is no message of yours to edit yet")
    text: str | None = argument
    if not argument:
        if not dialogue.reader.is_interactive:
            raise ValueError("/edit needs the new text where there is no terminal: /edit TEXT")
        text = dialogue.reader.read(before)
    if text is None or not text.strip():
        dialogue.say("[nothing is changed]")
        return
    dialogue.ask_again(text)


def _system(dialogue: Dialogue, argument: str) -> None:
    conversation = dialogue.conversation
    if not argument:
        current = conversation.system_prompt
        dialogue.say("[no system prompt]" if current is None else f"[system prompt: {current}]")
    elif argument in ('""', "''"):
        conversation.set_system_prompt(None)
        dialogue.say("[the system prompt is removed]")
    else:
        conversation.set_system_prompt(argument)
        dialogue.say("[the system prompt is set]")


def _set(dialogue: Dialogue, argument: str) -> None:
    settings = dialogue.settings
    name, _, value = argument.replace("=", " ", 1).partition(" ")
    name, value = canonical_name(name), value.strip()
    if not name:
        dialogue.screen.say_rows([(name, settings.get(name)) for name in VARIABLES])
        return
    if value:
        settings.set(name, value)
    dialogue.say(f"[{name} {settings.get(name)}]")


def _save(dialogue: Dialogue, argument: str) -> None:
    conversation = dialogue.conversation
    # Without the K/V first: they may not fit on the disk.
    file = save_messages(argument, conversation.messages)
    done = f"saved to {file}: messages: {len(conversation.messages)}"
    if conversation.tokens:
        dialogue.screen.show_progress("[saving the K/V ...]")
        try:
            done += f"; {save_kv(conversation, file)}"
        except (ValueError, OSError) as error:
            dialogue.say(f"[the K/V are not saved: {_said(error)}]")
    dialogue.say(f"[{done}]")


def _load(dialogue: Dialogue, argument: str) -> None:
    file, messages, kv_file = load_messages(argument)
    conversation = dialogue.conversation
    try:
        conversation.load_messages(messages)
    except ValueError as error:
        raise ValueError(f"{file} can't be gone on with: {_said(error)}") from error
    done = f"loaded from {file}: messages: {len(conversation.messages)}"
    if kv_file is not None:
        dialogue.screen.show_progress("[loading the K/V ...]")
        try:
            done += f"; K/V of {conversation.load_kv(kv_file):,} tokens"
        except (ValueError, CacheFullError) as error:
            dialogue.say(f"[the K/V are not loaded, and computed again: {_said(error)}]")
    if conversation.messages[-1]["role"] == "user":
        done += "; /regenerate answers the last"
    dialogue.say(f"[{done}]")


def _fork(dialogue: Dialogue, argument: str) -> None:
    branches = dialogue.branches
    branches.append(branches[-1].fork())
    num_tokens = len(branches[-1].tokens)
    dialogue.say(
        f"[branch {len(branches) - 1} of the conversation: {num_tokens} tokens so far are shared; "
        "/back leaves it]"
    )


def _back(dialogue: Dialogue, argument: str) -> None:
    branches = dialogue.branches
    if len(branches) == 1:
        dialogue.say("[this is not a branch; /fork begins one]")
        return
    branches.pop()
    where = f"in branch {len(branches) - 1}" if len(branches) > 1 else "in the conversation"
    dialogue.say(f"[back {where}: messages: {len(branches[-1].messages)}]")


def _reset(dialogue: Dialogue, argument: str) -> None:
    dialogue.conversation.reset()
    if len(dialogue.branches) == 1:
        # Nothing that another branch goes back to.
        dialogue.conversation.engine.reset_prefix_cache()
        dialogue.conversation.engine.shrink()
    dialogue.say("[the conversation is empty]")


def _stats(dialogue: Dialogue, argument: str) -> None:
    dialogue.say(describe_stats(dialogue.branches))


def _exit(dialogue: Dialogue, argument: str) -> None:
    raise LeaveChat


class Command(NamedTuple):
    """A slash command.

    Args:
        argument: its name in the help; in brackets if it may be left out, empty if there is none.
    """

    name: str
    argument: str
    help: str
    run: Callable[[Dialogue, str], None]
    aliases: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        return f"{self.name} {self.argument}".strip()


COMMAND_TABLE = (
    Command("/help", "", "this text", _help),
    Command("/regenerate", "", "answer the last message once more", _regenerate),
    Command("/edit", "[TEXT]", "change the last message, and answer it again", _edit),
    Command("/system", "[TEXT]", 'show or set the system prompt ("" removes it)', _system),
    Command("/set", "[NAME VALUE]", "show or change settings: /set temp 0.7", _set),
    Command("/save", "FILE", "write the conversation to a file (JSON), its K/V beside it", _save),
    Command("/load", "FILE", "go on with a conversation that was saved", _load),
    Command("/fork", "", "go on in a branch, which shares the K/V so far", _fork),
    Command("/back", "", "leave the branch, and go on where it began", _back),
    Command("/reset", "", "forget the conversation (the system prompt stays)", _reset),
    Command(
        "/stats",
        "",
        "what the K/V cache holds, how often it was hit, what the branches share",
        _stats,
    ),
    Command("/exit", "", "leave (also /quit, Ctrl-D)", _exit, ("/quit",)),
)
COMMANDS = {name: command for command in COMMAND_TABLE for name in (command.name, *command.aliases)}

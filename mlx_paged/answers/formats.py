"""The formats in which models call tools and mark their reasoning, as one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Engine: TypeAlias = Literal["tagged", "json", "literals", "harmony"]


@dataclass(frozen=True)
class Tags:
    """Calls as tags: one around a call, and one around each argument.

    Args:
        call, argument: the opening tags, with ``{name}`` or ``{key}`` and perhaps ``{type}`` in
            them. ``{any}`` is any further attributes, and white space any white space.
        call_end, argument_end: the closing tags.
        newline: one line break at each end of a value belongs to the tags.
        json: opening and closing tag of all arguments as one object, if there is such a form.
        typed_as_text: the value of ``{type}`` for texts. Values of other types are JSON. Without
            it, the schema says what a value is.
        has_entities: ``&quot;`` and ``&amp;`` in names are escapes.
        between: what is written between tags.
        attributes: what is written for the last ``{any}`` of a call's tag; ``{number}`` is any.
    """

    call: str
    argument: str
    argument_end: str
    call_end: str = ""
    newline: bool = False
    json: tuple[str, str] | None = None
    typed_as_text: str = ""
    has_entities: bool = False
    between: str = ""
    attributes: str = ""


@dataclass(frozen=True)
class Headed:
    """Calls as a name, a mark and a JSON object.

    Args:
        head: alternatives of what comes before the object, as in :class:`Tags`; ``{id}`` is the
            call's id.
        end: alternatives of what comes after it.
        is_repeated: whether a call may follow without the start mark of the format.
    """

    head: tuple[str, ...]
    end: tuple[str, ...] = ()
    is_repeated: bool = False


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls of tools.

    Args:
        name: where mlx-lm has a parser for the format, that parser's name.
        start, end: the marks around one or several calls. Both may be empty: an answer that begins
            as a call is one, if the tool was offered and nothing else follows.
        shape: how a call is written between them; ``"json"``: ``{"name": ..., "arguments": ...}``
            or a list of them; ``"python"``: ``[name(key=value), ...]``; ``"gemma"``:
            ``call:name{key:value}``.
        quote: the mark around texts in Gemma's notation.
        other_starts, other_ends: further marks that begin or end calls.
        is_section: whether calls have marks of their own between ``start`` and ``end``.
        starts_bare: whether a call may lack its start mark.
        templates: texts of a chat template in the format, all of which occur.
        vocabulary: tokens of a vocabulary in the format, all of which occur.
        has_short_ids: whether ids of calls have nine characters.
        begins_in_reasoning: whether the family's answers begin within reasoning even where the
            prompt has not opened it, so that its closing mark comes alone.
    """

    name: str
    engine: Engine
    start: str = ""
    end: str = ""
    shape: Tags | Headed | Literal["json", "python", "gemma"] = "json"
    quote: str = '"'
    other_starts: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()
    is_section: bool = False
    starts_bare: bool = False
    templates: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    has_short_ids: bool = False
    begins_in_reasoning: bool = False

    @property
    def is_bare(self) -> bool:
        """Whether an answer that begins as a call is one."""
        return self.starts_bare and not isinstance(self.shape, Tags)


def _glm(prefix: str = "", **more: str) -> Tags:
    return Tags(
        "{name}",
        f"<{prefix}arg_key>{{key}}</{prefix}arg_key> <{prefix}arg_value>",
        f"</{prefix}arg_value>",
        **more,  # type: ignore[arg-type]
    )


def _xml(invoke: str, parameter: str, attribute: str = "", **more: str) -> Tags:
    return Tags(
        f'<{invoke}{{any}} name="{{name}}"{{any}}>',
        f'<{parameter}{{any}} name="{{key}}"{attribute}{{any}}>',
        f"</{parameter}>",
        f"</{invoke}>",
        between="\n",
        **more,  # type: ignore[arg-type]
    )


_DSML = "｜DSML｜"
_BOX = "｜tool▁"


_DSML_SECTIONS = ("function_calls", "tool_calls", " calls")


def _dsml(name: str, section: str, space: str = "") -> CallFormat:
    """DeepSeek's from V3.2 on. The versions differ in the name of a section and in a space; each of
    them is read as the others are.
    """
    tags = _xml(
        f"{_DSML}{space}invoke",
        f"{_DSML}{space}parameter",
        ' string="{type}"',
        typed_as_text="true",
    )
    sections = [section, *(each for each in _DSML_SECTIONS if each != section)]
    starts, ends = ([f"<{slash}{_DSML}{each}>" for each in sections] for slash in ("", "/"))
    return CallFormat(
        name,
        "tagged",
        starts[0],
        ends[0],
        tags,
        other_starts=tuple(starts[1:]),
        other_ends=tuple(ends[1:]),
        is_section=True,
        templates=(f"{_DSML}{section}",),
        vocabulary=(_DSML,),
    )


_QWEN_XML = Tags(
    "<function={name}>", "<parameter={key}>", "</parameter>", "</function>", True, between="\n"
)

_BOXED_HEADS = (
    f"<{_BOX}call▁begin｜> function <{_BOX}sep｜> {{name}} ```json",
    f"<{_BOX}call▁begin｜> {{name}} <{_BOX}sep｜>",
)
_BOXED_ENDS = f"``` <{_BOX}call▁end｜>", f"<{_BOX}call▁end｜>"


def _boxed(name: str, *templates: str) -> CallFormat:
    """DeepSeek's up to V3.1: each of the two is read as the other is, and writes its own."""
    heads, ends = _BOXED_HEADS, _BOXED_ENDS
    if not templates:
        heads, ends = heads[::-1], ends[::-1]
    start = f"<{_BOX}calls▁begin｜>"
    return CallFormat(
        name,
        "json",
        start,
        f"<{_BOX}calls▁end｜>",
        Headed(heads, ends),
        is_section=True,
        templates=(start, *templates),
        vocabulary=() if templates else (start,),
    )


# In the order in which they are looked for.
FORMATS: tuple[CallFormat, ...] = (
    CallFormat(
        "minimax_m2", "tagged", "<minimax:tool_call>", "</minimax:tool_call>",
        _xml("invoke", "parameter"), is_section=True, templates=("<minimax:tool_call>",),
        begins_in_reasoning=True,
    ),
    CallFormat(
        "gemma4", "literals", "<|tool_call>", "<tool_call|>", "gemma", '<|"|>',
        templates=("<|tool_call>", "<tool_call|>"),
    ),
    CallFormat(
        "function_gemma", "literals", "<start_function_call>", "<end_function_call>", "gemma",
        "<escape>", templates=("<start_function_call>",),
    ),
    CallFormat(
        "longcat", "tagged", "<longcat_tool_call>", "</longcat_tool_call>", _glm("longcat_"),
        templates=("<longcat_tool_call>",),
    ),
    CallFormat(
        "glm47", "tagged", "<tool_call>", "</tool_call>", _glm(), templates=("<arg_key>",)
    ),
    CallFormat("laguna", "tagged", "<tool_call>", "</tool_call>", _glm()),
    CallFormat(
        "pythonic", "literals", "<|tool_call_start|>", "<|tool_call_end|>", "python",
        vocabulary=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    CallFormat(
        "qwen3_coder", "tagged", "<tool_call>", "</tool_call>", _QWEN_XML, starts_bare=True,
        templates=("<tool_call>", "<function="),
    ),
    CallFormat(
        "kimi_k2", "json", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        Headed(
            ("<|tool_call_begin|> {name} <|tool_call_argument_begin|>",), ("<|tool_call_end|>",)
        ),
        is_section=True, templates=("<|tool_calls_section_begin|>",),
    ),
    CallFormat(
        "minicpm5", "tagged", "", "", _xml("function", "param"),
        templates=('<function name="', '<param name="'),
    ),
    CallFormat(
        "mistral", "json", "[TOOL_CALLS]", "",
        Headed(("{name} [CALL_ID] {id} [ARGS]", "{name} [ARGS]", "{name}"), (), True),
        templates=("[TOOL_CALLS]",), vocabulary=("[TOOL_CALLS]",), has_short_ids=True,
    ),
    CallFormat(
        "muse_spark", "tagged", "<atem:function_calls>", "</atem:function_calls>",
        _xml("atem:invoke", "atem:parameter"), is_section=True,
        templates=("<atem:function_calls>",),
    ),
    CallFormat(
        "kimi_k3", "tagged", "<|open|>tools<|sep|>", "<|close|>tools<|sep|>",
        Tags(
            '<|open|>call{any} tool="{name}"{any}<|sep|>',
            '<|open|>argument{any} key="{key}"{any} type="{type}"{any}<|sep|>',
            "<|close|>argument<|sep|>", "<|close|>call<|sep|>",
            json=("<|open|>json{any}<|sep|>", "<|close|>json<|sep|>"),
            typed_as_text="string", has_entities=True, attributes=' index="{number}"',
        ),
        is_section=True, vocabulary=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    ),
    CallFormat(
        "harmony", "harmony",
        vocabulary=("<|channel|>", "<|message|>", "<|call|>", "<|return|>"),
    ),
    _dsml("deepseek_v4_1", " calls", " "),
    _dsml("deepseek_v3_2", "function_calls"),
    _dsml("deepseek_v4", "tool_calls"),
    _boxed("deepseek_v3", "```json"),
    _boxed("deepseek_v3_1"),
    CallFormat(
        "command", "json", "<|START_ACTION|>", "<|END_ACTION|>",
        vocabulary=("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    CallFormat(
        "phi4", "json", "<|tool_call|>", "<|/tool_call|>", other_starts=("functools",),
        templates=("<|tool_call|>", "<|/tool_call|>"),
        vocabulary=("<|tool_call|>", "<|/tool_call|>"),
    ),
    CallFormat(
        "granite", "json", "<|tool_call|>", "", other_starts=("<tool_call>",),
        templates=("<|tool_call|>",), vocabulary=("<|tool_call|>", "<|start_of_role|>"),
    ),
    CallFormat(
        "json_tools", "json", "<tool_call>", "</tool_call>", templates=("<tool_call>",)
    ),
    CallFormat(
        "llama4", "literals", "<|python_start|>", "<|python_end|>", "python", starts_bare=True,
        vocabulary=("<|python_start|>", "<|python_end|>"),
    ),
    CallFormat(
        "llama3", "json", "<|python_tag|>", "", starts_bare=True, vocabulary=("<|python_tag|>",)
    ),
)  # fmt: skip

JSON_LIST = CallFormat("json_list", "json", starts_bare=True)
"""An answer of calls only, ``[{"name": ..., "arguments": {...}}, ...]``: it is enforced if there is
no grammar for the model's own format.
"""


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks around reasoning.

    Args:
        tokens: of a vocabulary with these marks.
        name: of the format of calls that it goes with; empty: any other.
        other_ends: further marks that close it.
        hidden: marks of an answer's structure that are not shown.
        is_exact: whether white space beside marks belongs to the texts.
        forced_end: what ends it and begins the text of an answer, if that is more than ``end``.
    """

    start: str
    end: str
    tokens: tuple[str, ...] = ()
    name: str = ""
    other_ends: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    is_exact: bool = False
    forced_end: str = ""

    @property
    def all_marks(self) -> tuple[str, ...]:
        """All texts in which there may be control tokens."""
        return (self.start, self.end, *self.other_ends, *self.hidden, self.forced_end)


def _pair(start: str, end: str, **more: tuple[str, ...]) -> ReasoningFormat:
    return ReasoningFormat(start, end, (start, end), **more)  # type: ignore[arg-type]


# Found by their tokens, in this order.
REASONING: tuple[ReasoningFormat, ...] = (
    _pair("<think>", "</think>"),
    _pair("<longcat_think>", "</longcat_think>"),
    _pair("<mm:think>", "</mm:think>"),
    _pair("<|think:start|>", "<|think:end|>"),
    _pair("[THINK]", "[/THINK]"),
    _pair("<seed:think>", "</seed:think>"),
    _pair(
        "<|START_THINKING|>", "<|END_THINKING|>",
        hidden=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ReasoningFormat("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
    ReasoningFormat(
        "<|open|>think<|sep|>", "<|close|>think<|sep|>",
        ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        other_ends=("<|open|>response<|sep|>",),
        hidden=(
            "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>",
            "<|end_of_msg|>",
        ),
        is_exact=True,
    ),
    ReasoningFormat(
        "<|channel|>analysis<|message|>", "<|end|>", ("<|channel|>", "<|message|>"), "harmony",
        hidden=("<|start|>", "<|constrain|>", "<|call|>", "<|return|>"), is_exact=True,
        forced_end="<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
)  # fmt: skip


def format_named(name: str) -> CallFormat | None:
    """The format of this name; ``None`` if there is none."""
    return next((each for each in FORMATS if each.name == name), None)

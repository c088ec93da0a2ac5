"""What a template takes is found out by rendering, and a conversation is put into that form."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from mlx_paged.answers.template_traits import (
    CallForm,
    TemplateTraits,
    UnsayableError,
    find_traits,
)

ALTERNATES = """\
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}
{{- '<' + m.role + '>' + m.content }}
{%- endfor %}"""
# As DeepSeek V3's own: a call is written only beside a null, and its arguments are a text.
NULL_CONTENT = """\
{%- for m in messages %}
{{- '<' + m.role + '>' }}
{%- if m.content is none %}
{%- for call in m.tool_calls %}
{{- call.function.name + call.function.arguments }}
{%- endfor %}
{%- else %}{{ m.content }}{% endif %}
{%- endfor %}"""
# As Llama 3.1's: one call, and no text beside it.
ONE_CALL = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}
{{- '<' + m.role + '>' }}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}
{{- m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}
{%- else %}{{ m.content }}{% endif %}
{%- endfor %}"""
# As Mistral's: short ids, roles that alternate around calls, and no text beside them.
SHORT_IDS = """\
{%- set ns = namespace(index=0) %}
{%- for m in messages %}
{%- if m.role in ('user', 'assistant') and not m.tool_calls %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}
{%- endif %}
{{- '<' + m.role + '>' }}
{%- if m.tool_calls %}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}
{{- call.id + call.function.name }}{{ call.function.arguments | tojson }}
{%- endfor %}
{%- else %}{{ m.content }}{% endif %}
{%- if m.role == 'tool' %}{{ m.tool_call_id }}{% endif %}
{%- endfor %}"""
NO_CALLS = "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def renderer(template: str):
    def render(messages, options=None) -> str:
        options = dict(options or {})
        tools = options.pop("tools", None)
        [text], _ = render_jinja_template(
            [list(messages)], tools, chat_template=template, **options
        )
        return text

    return render


def adapted(template: str, *messages: dict[str, Any], write_calls=None) -> str:
    render = renderer(template)
    return render(find_traits(render).adapt(messages, write_calls))


def said(role: str, content: str | None = "", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, call_id: str | None = None, **arguments: Any) -> dict[str, Any]:
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if call_id is None else {**made, "id": call_id}


@pytest.mark.parametrize(
    ("template", "traits"),
    [
        (ALTERNATES, TemplateTraits(False, "nowhere", frozenset(), None)),
        (
            NULL_CONTENT,
            TemplateTraits(shows_tools=False, calls=CallForm("text", None, text="apart")),
        ),
        (ONE_CALL, TemplateTraits(calls=CallForm(several="apart", text="apart"))),
        (
            SHORT_IDS,
            TemplateTraits(
                False, "anywhere", frozenset(), CallForm(text="before", has_short_ids=True)
            ),
        ),
        (NO_CALLS, TemplateTraits(shows_tools=False, calls=None)),
        ("{{ raise_exception('nothing') }}", TemplateTraits()),
        ("{% for", TemplateTraits()),
    ],
)
def test_what_a_template_takes_is_found_out(template, traits):
    assert find_traits(renderer(template)) == traits


def test_questions_in_turn_are_one_where_roles_have_to_alternate():
    with pytest.raises(TemplateError, match="alternate"):
        renderer(ALTERNATES)([said("user", "a"), said("user", "b")])
    assert adapted(ALTERNATES, said("user", "a"), said("user", "b")) == "<user>a\n\nb"
    assert (
        adapted(
            ALTERNATES,
            said("system", "be"),
            said("system", "brief"),
            said("user", "a"),
            said("assistant", "b"),
            said("assistant", "c"),
            said("system", "hurry"),
            said("user", "d"),
        )
        == "<user>be\n\nbrief\n\na<assistant>b\n\nc"
        "<user><system-reminder>\nhurry\n</system-reminder>\n\nd"
    )


def test_a_call_is_written_beside_null_with_its_arguments_as_text_where_that_is_asked_for():
    messages = [
        said("user", "q"),
        said("assistant", "let me see", tool_calls=[call("find", "c1", at="é")]),
        said("tool", "found", tool_call_id="c1"),
    ]
    assert adapted(NULL_CONTENT, *messages) == (
        '<user>q<assistant>let me see<assistant>find{"at": "é"}<tool>found'
    )
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"at": "é"}


def test_each_call_is_a_message_of_its_own_followed_by_its_result():
    text = adapted(
        ONE_CALL,
        said("user", "q"),
        said("assistant", "both", tool_calls=[call("one", "c1", a=1), call("two", "c2", b=2)]),
        said("tool", "second", tool_call_id="c2"),
        said("tool", "first", tool_call_id="c1"),
        said("tool", "of no call", tool_call_id="c3"),
    )
    assert text == (
        '<user>q<assistant>both<assistant>one{"a": 1}<tool>first<assistant>two{"b": 2}'
        "<tool>second<tool>of no call"
    )


def test_ids_are_shortened_alike_and_text_beside_calls_moves_to_the_end_of_the_message_before():
    long_id = "call_0123456789"
    text = adapted(
        SHORT_IDS,
        said("user", "q"),
        said("assistant", "one moment", tool_calls=[call("f", long_id), call("g", "abcdef123")]),
        said("tool", "x", tool_call_id=long_id),
        said("tool", "y"),
        said("assistant", "done"),
    )
    short = text.split("<assistant>", 2)[2][:9]
    assert short.isalnum() and short != "abcdef123"
    assert text == (
        "<user>q\n\n<assistant>\none moment\n</assistant>"
        f"<assistant>{short}f{{}}abcdef123g{{}}<tool>x{short}<tool>yabcdef123<assistant>done"
    )


def test_calls_that_a_template_does_not_write_are_refused_by_the_place_of_their_message():
    messages = [said("user", "q"), said("assistant", tool_calls=[call("f")]), said("tool", "r")]
    with pytest.raises(UnsayableError, match=r"messages\[1\] has calls of tools"):
        adapted(NO_CALLS, *messages)
    with pytest.raises(UnsayableError, match=r"messages\[1\] has the result of a tool"):
        adapted(NO_CALLS, messages[0], messages[2])


def test_calls_are_a_part_of_the_content_where_the_template_writes_results_but_no_calls():
    """As LFM2's."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    messages = [
        said("user", "q"),
        said("assistant", "so: ", tool_calls=[call("f", a=1)]),
        said("tool", "r"),
    ]
    with pytest.raises(UnsayableError, match=r"messages\[1\] has calls of tools"):
        adapted(template, *messages)

    def write(calls):
        return "".join(f"[{each['function']['name']}]" for each in calls)

    assert adapted(template, *messages, write_calls=write) == "<user>q<assistant>so: [f]<tool>r"


def test_a_conversation_that_a_template_takes_is_left_as_it_is():
    messages = [
        said("system", "s"),
        said("user", "q", name="Tom"),
        said("assistant", "so", reasoning_content="hm", tool_calls=[call("f", "c1", a=1)]),
        said("tool", "r", tool_call_id="c1", name="f"),
        said("user", "again"),
        said("user", "and again"),
    ]
    assert TemplateTraits().adapt(messages) == messages

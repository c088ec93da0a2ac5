"""Words of the package's texts: comments, docstrings, messages and pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


# What must not return, and what to write instead.
WORDS = {
    r"nobody|somebody": "name who: no request, another process",
    r"whoever": "name who: the caller, the reader",
    r"anew": "again",
    r"comes? to light": "is found, is read",
    r"behind one another|one behind the other": "one after the other",
    r"behind (the|its) (prompt|sinks|hit|end|last|first)": "after, past",
    r"everybody": "all users, all others",
    r"for ever": "forever, without end",
    r"for want of": "because there is no",
    r"so many (tokens|bytes|blocks|conversations)": "this many, a number of",
    r"none of (ours|theirs)": "something else",
    r"rooms": "modules, buffers, places",
    r"(hand|hands|handed) on": "pass on",
    r"tends? it|tended by": "maintain",
    r"(can|could) be had": "is available",
    r"an argument that there is not|an argument that does not exist": "an unknown argument",
    r"from what is there": "from a local path",
    r"at the door": "when it is added, where it is called",
    r"(?<!there\s)(is|are|was|were) no (valid|number|snapshot|model|prompt cache|integer"
    r"|parameters?|json|utf-8|gbnf|gguf|file|folder|terminal|conversation|messages?|mapping|branch"
    r"|schema|state|member|mark|secret|name|part|short)": "is not a ...",
    r"stops? to (listen|read|write|wait|run)": "stops listening",
    r"stands? behind": "comes after, follows",
    r"says? nothing of": "says nothing about",
    r"as they were told": "as they received it",
    r"afresh": "again, from the beginning",
    r"(called|named|said|written) otherwise": "has another name",
    r"for so long": "for this long",
    r"kept to (by|whole|where|whether)": "enforced by",
    r"\w+ of ours": "this package's ...",
    r"to the users whose they are": "to the users who sent them",
    r"(is|are|be) dear": "is expensive",
    r"go(es)? on without(?! (end|limit))": "continues without it",
    r"(any|that) \w+ will do": "works, is enough",
    r"knows no rights": "has no permissions",
    r"takes? note of": "records",
    r"have come by|whose time is over": "have expired",
    r"the other way round": "the reverse",
    r"broken off": "truncated",
    r"keeps? out of sight": "freeze, hide",
    r"are the most": "at most ... are allowed",
    r"there is no \w+ of that name": "there is no model 'x'",
    r"did not happen": "is rolled back",
    r"has (said nothing|taken no message)": "has sent nothing, has accepted no message",
    r"where \w+ was due": "instead of",
    r"has no say|asks no one|what came of": "name what it does",
    r"(is|are) told": "receives",
    r"gone on with": "continued",
    r"asking the keys": "the queries of a key",
}


def texts() -> dict[str, str]:
    """By path; the words that the bundled model was trained on are none of the package's."""
    files = [
        path
        for folder, kinds in (("mlx_paged", ("py",)), ("metal", ("metal", "h", "md")))
        for kind in kinds
        for path in (REPOSITORY / folder).rglob(f"*.{kind}")
        if path.relative_to(REPOSITORY).parts[1] != "demo_model"
    ]
    files += (REPOSITORY / "docs").rglob("*.md")
    files += [REPOSITORY / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md")]
    return {str(path.relative_to(REPOSITORY)): path.read_text() for path in files}


@pytest.mark.parametrize("words", WORDS)
def test_words_of_a_private_dialect_do_not_return(words: str):
    space = r"\s+(?:#\s+|//\s+)?"  # lines of a comment begin with these
    pattern = re.compile(rf"\b({words.replace(' ', space)})\b", re.I)
    read = texts()
    assert len(read) > 200
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}, write {WORDS[words]!r}"
        for name, text in read.items()
        for match in pattern.finditer(text)
    ]
    assert found == []


def test_names_of_tests_say_who():
    others = ("server", "chat", "cache_tool", "block_store", "fuzz")
    programs = [REPOSITORY / "tests" / name for name in others]
    found = [
        f"{path.name}: {name}"
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        if not any(path.is_relative_to(folder) for folder in programs)
        for name in re.findall(r"def (test_\w+)", path.read_text())
        if re.search(r"_(nobody|somebody|whoever|anew)(_|$)", name)
    ]
    assert found == []

"""``ls`` and ``show`` as they are printed, from made-up entries."""

from __future__ import annotations

import unicodedata

import pytest
from helpers.block_entries import BLOCK_SIZE, DEMO, NOW, entries, entry, hash_of, tree_of

from mlx_paged.block_store import Fingerprint
from mlx_paged.block_store.prefixes import as_trees
from mlx_paged.cli.cache.listing import (
    ListStyle,
    counted,
    in_a_line,
    in_bytes,
    in_full,
    in_lines,
    in_short,
    list_trees,
    num_unique_digits,
    show_prefix,
)
from mlx_paged.cli.cache.program import find, of_model
from mlx_paged.errors import ArgumentError

# Categories of characters: controls, those that reverse the order, surrogates, ends of lines.
FORBIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
SHARED = [
    *entries("abcd", "abefg", "abeh"),
]
OTHERS = [*entries("xyz", age=200_000.0)[1:], entry("q", is_pinned=True, age=5.0)]
LISTED = f"""\
demo ({DEMO.digest[:8]}, K/V float32): 5 prefixes, 11 blocks of 16, 176 tokens, 11 MB
hash            tokens   bytes   used  prefixes
8e35c2cd        0-16    1.0 MB    5 s         1  pinned
fb8e20fc        0-32    2.0 MB  1 min         3
├─ 88d4266f     32-64   2.0 MB  1 min         1
└─ d81a65c1     32-48   1.0 MB  1 min         2
   ├─ 5900db88  48-64   1.0 MB  1 min         1
   └─ 21ae279e  48-80   2.0 MB  1 min         1
… 3608bca1      16-48   2.0 MB    2 d         1
… the preceding blocks are not in the folder"""


def lines(*args, **kwargs) -> str:
    return "\n".join(list_trees([tree_of(*SHARED, *OTHERS)], ListStyle(NOW, *args, **kwargs)))


def test_ls_draws_a_line_for_each_run_of_blocks():
    assert lines() == LISTED


def test_an_output_without_line_drawing_gets_ascii():
    drawn = lines(is_ascii=True)
    assert "   |- 5900db88  48-64" in drawn and "`- d81a65c1 " in drawn


def test_the_text_takes_what_is_left_of_the_terminals_width():
    def text_of(blocks) -> str:
        return "Once upon a time\nthere was 世界 a lot of text in a prompt" * len(blocks)

    for width in (70, 80, 120):
        drawn = lines(width, text_of=text_of).splitlines()
        assert [in_a_line(line, width) for line in drawn[1:]] == drawn[1:]
    assert "Once upon a time\\nthere was 世界" in lines(120, text_of=text_of)
    narrow = lines(20, text_of=text_of)
    assert "Once" not in narrow and "8e35c2cd" in narrow
    assert "prompt" in lines(text_of=text_of)


def test_levels_that_are_too_deep_to_draw_are_counted():
    words = ["t" * turn + "x" for turn in range(1, 15)]
    drawn = "\n".join(list_trees([tree_of(*entries(*words))], ListStyle(NOW)))
    assert "\n+4 " in drawn and max(map(len, drawn.splitlines())) < 100


def test_show_says_all_of_one_prefix():
    tree = tree_of(*SHARED, *OTHERS)
    block = tree.blocks[hash_of("abe")]
    style = ListStyle(NOW, text_of=lambda blocks: f"\x1b[31mtext of {len(blocks)}\nblocks")
    shown = "\n".join(show_prefix(tree, block, (), style))
    head, parts, following, text = shown.split("\n\n")
    assert dict(line.split(maxsplit=1) for line in head.splitlines()) == {
        "hash": hash_of("abe").hex(),
        "model": "demo",
        "fingerprint": tree.digest,
        "content": "content",
        "code": "1",
        "K/V": "float32, 2 layers",
        "tokens": "48 in 3 blocks",
        "bytes": "3.0 MB in 3 files",
        "prefixes": "2 go through it, of 5 of the model",
        "created": in_full(NOW - 3600, NOW),
        "used": in_full(NOW - 60, NOW),
        "pinned": "no",
        "expires": "never",
    }
    assert [line.split()[0] for line in parts.splitlines()[2:]] == ["fb8e20fc", "d81a65c1"]
    assert [line.split()[0] for line in following.splitlines()[2:]] == ["5900db88", "21ae279e"]
    assert text == "\ufffd[31mtext of 3\nblocks"


def test_show_says_whose_pin_keeps_a_prefix():
    tree = tree_of(*entries("abc", is_pinned=True))
    pins = {(tree.digest, hash_of("abc"))}
    shown = "\n".join(show_prefix(tree, tree.blocks[hash_of("a")], pins, ListStyle(NOW)))
    assert f"pinned      yes, by the pin of {hash_of('abc').hex()[:8]}\n" in shown


def test_control_characters_do_not_reach_the_terminal():
    assert in_a_line("a\x1b]0;title\x07b\nc\u2028d", 40) == "a\ufffd]0;title\ufffdb\\nc\ufffdd"
    assert in_lines("a\n\tb\r\x9bc") == "a\n\tb\ufffd\ufffdc"


def test_a_foreign_name_of_a_model_is_shown_and_found_on_one_line_without_controls():
    hostile = "ev\x1b]0;title\x07il\x9b31m\nnew\rline\u2028\u202etxt\ud800" + "x" * 10_000
    foreign = Fingerprint("content", hostile, DEMO.layers, hostile, BLOCK_SIZE, hostile)
    blocks = entries("ab", fingerprint=foreign)
    trees = as_trees({foreign.digest: foreign}, blocks)
    (block, _), style = trees[0].blocks.values(), ListStyle(NOW)
    texts = [*list_trees(trees, style), *show_prefix(trees[0], block, (), style)]
    for name in ("nothing", block.block_hash.hex()[:4]):
        with pytest.raises(ArgumentError) as error:
            of_model(trees, name)
        texts.append(str(error.value))
    with pytest.raises(ArgumentError, match="is ambiguous") as error:
        find(block.block_hash.hex(), [*trees, *trees])
    texts.append(str(error.value))
    assert all(unicodedata.category(each) not in FORBIDDEN for text in texts for each in text)
    assert max(map(len, texts)) < 1500
    assert of_model(trees, trees[0].name) == trees


def test_a_line_is_cut_by_the_columns_that_it_takes():
    assert in_a_line("abcdef", 6) == "abcdef"
    assert in_a_line("abcdef", 5) == "abcd…"
    assert in_a_line("世界", 4) == "世界" and in_a_line("世界", 3) == "世…"
    assert in_a_line("e\u0301e", 2) == "e\u0301e"
    assert in_a_line("abc", 0) == "" and in_a_line("", 0) == ""


def test_amounts_are_rounded_for_people():
    sizes = [0, 999, 1000, 9949, 99_950, 999_499, 999_500, 1_750_000, 20 * 2**30]
    assert [in_bytes(size) for size in sizes] == [
        "0 B", "999 B", "1.0 kB", "9.9 kB", "100 kB", "999 kB", "1.0 MB", "1.8 MB", "21 GB",
    ]  # fmt: skip
    ages = [0, 0.9, 1, 59, 60, 119, 7199, 7200, 172_799, 172_800]
    assert [in_short(age) for age in ages] == [
        "0 s", "0 s", "1 s", "59 s", "1 min", "1 min", "119 min", "2 h", "47 h", "2 d",
    ]  # fmt: skip
    assert in_full(NOW + 60, NOW).endswith("(in 1 min)")
    assert in_full(1e300, NOW).startswith("1e+300 s after 1970")
    assert [counted(n, "prefix", "prefixes") for n in (0, 1, 2000)] == [
        "0 prefixes", "1 prefix", "2,000 prefixes"
    ]  # fmt: skip


def test_hashes_are_shown_with_as_many_digits_as_tell_them_apart():
    assert num_unique_digits([]) == num_unique_digits(["a" * 64]) == 8
    assert num_unique_digits(["0123456789abcdef0" + end * 47 for end in "xy"]) == 18
    assert num_unique_digits(["a" * 64, "a" * 64]) == 8

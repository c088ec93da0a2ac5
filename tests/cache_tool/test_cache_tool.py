"""The verbs of ``mlx-paged cache`` on real folders."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
from helpers.block_entries import BLOCK_SIZE, DEMO, put

from mlx_paged.__main__ import main
from mlx_paged.block_store import CacheFolder, Fingerprint
from mlx_paged.core.block_hash import hash_token_blocks
from mlx_paged.loading.folder import demo_model_path

OTHER = Fingerprint("other content", "owner/other", ("layer",), "K:8,V:4", BLOCK_SIZE, "1")
COMMON = list(range(1, 33))
FIRST = [*COMMON, *range(100, 148)]
SECOND = [*COMMON, *range(200, 232)]
NBYTES = 4096  # that a block takes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    put(tmp_path / "cache", FIRST)
    put(tmp_path / "cache", SECOND)
    return tmp_path / "cache"


def ends(folder: Path) -> list[int]:
    return sorted(entry.first_token + entry.num_tokens for entry in CacheFolder(folder).entries())


def test_ls_shows_a_tree_and_json_the_same(folder: Path, cache):
    status, out, err = cache("ls", folder)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].endswith("2 prefixes, 7 blocks of 16, 112 tokens, 29 kB")
    assert sorted(line.split()[-6] for line in lines[2:]) == ["0-32", "32-64", "32-80"]
    assert [line[0] for line in lines[3:]] == ["├", "└"]

    status, out, _ = cache("ls", folder, "--json")
    (model,) = json.loads(out)["models"]
    first, *branches = model.pop("runs")
    assert model == {
        "fingerprint": DEMO.digest,
        "depends_on": json.loads(DEMO.as_json()),
        "is_outdated": False,
        "num_prefixes": 2,
        "num_blocks": 7,
        "num_tokens": 112,
        "num_states": 0,
        "num_answers": 0,
        "nbytes": 7 * NBYTES,
        "num_files_of_other_versions": 0,
        "nbytes_of_other_versions": 0,
    }
    assert (first["parent_hash"], first["num_prefixes"], first["num_blocks"]) == (None, 2, 2)
    assert {run["parent_hash"] for run in branches} == {first["hash"]}
    assert first["hash"] == hash_token_blocks(COMMON, BLOCK_SIZE)[-1].hex()


def test_blocks_of_an_earlier_version_are_named_as_such(folder: Path, cache):
    outdated = dataclasses.replace(DEMO, code="mlx_paged 2, mlx 0.30.0, metal backend on a gpu")
    last = put(folder, FIRST, outdated)
    put(folder, FIRST, dataclasses.replace(DEMO, code="mlx_paged 3, mlx 0.30.0, and more"))
    why = "of an earlier version of mlx_paged and no longer used"
    for verb in ("ls", "size"):
        status, out, _ = cache(verb, folder)
        named = [line for line in out.splitlines() if why in line]
        assert status == 0 and len(named) == 1 and outdated.digest[:8] in named[0]
        status, out, _ = cache(verb, folder, "--json")
        models = {each["fingerprint"]: each["is_outdated"] for each in json.loads(out)["models"]}
        assert len(models) == 3 and [name for name in models if models[name]] == [outdated.digest]
    status, out, _ = cache("show", folder, last, "--model", outdated.digest)
    assert status == 0 and f"{outdated.code} ({why})" in out
    # They can be removed alone.
    status, out, _ = cache("rm", folder, "--model", outdated.digest, "--all")
    assert status == 0 and out.startswith("removed 5 files")
    assert why not in cache("ls", folder)[1]


def test_show_has_the_tokens_of_a_prefix_and_its_text_with_a_tokenizer(folder: Path, cache):
    last = put(folder, SECOND)
    status, out, _ = cache("show", folder, last[:10].upper(), "--json")
    shown = json.loads(out)
    assert (status, shown["hash"], shown["token_ids"]) == (0, last, SECOND)
    assert [block["num_prefixes"] for block in shown["blocks"]] == [2, 2, 1, 1]
    assert "text" not in shown

    from mlx_paged.loading.tokenizer import read_tokenizer

    text = read_tokenizer(demo_model_path(), None, None).decode(SECOND)
    for name in ("demo", demo_model_path()):
        status, out, _ = cache("show", folder, last, "--json", "--tokenizer", name)
        assert (status, json.loads(out)["text"]) == (0, text)
    status, out, _ = cache("show", folder, last, "--tokenizer", "demo")
    assert status == 0 and out.rstrip("\n").endswith(text.splitlines()[-1])
    status, out, _ = cache("ls", folder, "--tokenizer", "demo")
    assert status == 0 and out.splitlines()[1].endswith("  text")


def test_a_pin_keeps_a_prefix_until_it_is_taken_back(folder: Path, cache):
    first, second = put(folder, FIRST), put(folder, SECOND)
    status, out, err = cache("pin", folder, first[:8], second[:8])
    assert (status, err) == (0, "")
    assert out == f"pinned {first[:8]}: 80 tokens, 20 kB\npinned {second[:8]}: 64 tokens, 16 kB\n"
    assert cache("ls", folder)[1].count("pinned") == 3
    assert cache("rm", folder, "--all")[1] == (
        "removed 0 files, 0 B; 7 pinned ones are kept (see --pinned)\n"
    )
    common = hash_token_blocks(COMMON, BLOCK_SIZE)[-1].hex()[:8]
    status, _, err = cache("unpin", folder, common)
    assert status == 2 and f"{common} is kept by the pin of " in err
    assert cache("unpin", folder, first[:8])[1] == f"unpinned {first[:8]}\n"
    assert cache("unpin", folder, first[:8])[1] == f"{first[:8]} has no pin\n"
    assert cache("rm", folder, "--shrink-to", 1)[1] == (
        "removed 3 files, 12 kB; 16 kB are left; pinned blocks are kept\n"
    )
    assert ends(folder) == [16, 32, 48, 64]
    assert cache("unpin", folder, "--all")[1] == "removed 1 pin\n"
    assert cache("rm", folder, "--all")[1] == "removed 4 files, 16 kB\n"
    assert cache("ls", folder) == (0, "no blocks\n", "")


def test_a_pin_in_the_middle_outlives_that_of_the_end(folder: Path, cache):
    last = put(folder, FIRST)
    middle = hash_token_blocks(FIRST, BLOCK_SIZE)[2].hex()
    cache("pin", folder, middle, last)
    assert cache("unpin", folder, middle)[1] == (
        f"unpinned {middle[:8]}; the pin of {last[:8]} keeps it\n"
    )


def test_rm_takes_the_line_of_ls_and_those_under_it(folder: Path, cache):
    first, common = put(folder, FIRST), hash_token_blocks(COMMON, BLOCK_SIZE)
    # A block in the middle names its line.
    middle = hash_token_blocks(FIRST, BLOCK_SIZE)[3].hex()
    assert cache("rm", folder, middle)[1] == "removed 3 files, 12 kB\n"
    assert ends(folder) == [16, 32, 48, 64]
    put(folder, FIRST)
    assert cache("rm", folder, common[0].hex(), first)[1] == "removed 7 files, 29 kB\n"
    assert ends(folder) == []


def test_rm_removes_by_model_and_by_age(folder: Path, cache):
    put(folder, FIRST, OTHER, groups=3)
    assert cache("rm", folder, "--older-than", "1h", "--model", "other")[1].startswith("removed 0")
    hour_ago = time.time() - 3700
    for path in folder.glob(f"blocks/{OTHER.digest}/*/*.kv"):
        os.utime(path, (hour_ago, hour_ago))
    assert cache("rm", folder, "--older-than", "1h", "--model", "demo")[1].startswith("removed 0")
    assert cache("rm", folder, "--older-than", "1h")[1] == "removed 15 files, 61 kB\n"
    put(folder, FIRST, OTHER)
    assert cache("rm", folder, "--model", OTHER.digest[:6])[1] == "removed 5 files, 20 kB\n"
    assert len(ends(folder)) == 7


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "say what to remove: --model, HASH, --all, --older-than, --shrink-to"),
        (["--pinned"], "say what to remove"),
        (["12345678", "--all"], "HASH and --all each say what to remove"),
        (["--all", "--older-than", "1d"], "--all and --older-than each say what to remove"),
        (["--shrink-to", "1G", "--model", "demo"], "can't be combined with --model"),
        (["--shrink-to", "1G", "--pinned"], "can't be combined with --model or --pinned"),
        (["--older-than", "soon"], "argument --older-than: must be"),
        (["--shrink-to", "5blocks"], "argument --shrink-to: must be bytes"),
        (["--shrink-to", "0"], "argument --shrink-to: must be bytes"),
        (["00000000"], "no block whose hash begins with 00000000"),
        (["--model", "Qwen"], "--model 'Qwen': the folder has no blocks of it; it holds demo"),
    ],
)
def test_rm_that_is_not_clear_removes_nothing(folder: Path, cache, words: list[str], says: str):
    status, out, err = cache("rm", folder, *words)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and " cache rm: error: " in err and says in err
    assert len(ends(folder)) == 7


def test_verify_finds_what_was_altered_and_removes_it_if_told_to(folder: Path, cache):
    assert cache("verify", folder)[:2] == (0, "7 files, 16 kB, read and checked: 0 bad\n")
    torn, altered, moved = sorted(folder.glob("blocks/*/*/*.kv"))[:3]
    torn.write_bytes(torn.read_bytes()[:-1])
    data = bytearray(altered.read_bytes())
    data[-3] ^= 1
    altered.write_bytes(data)
    shutil.copy(sorted(folder.glob("blocks/*/*/*.kv"))[3], moved)
    status, out, _ = cache("verify", folder)
    assert status == 1 and out.splitlines()[-1].endswith("read and checked: 3 bad")
    found = dict(line.split(": ") for line in out.splitlines()[:-1])
    assert set(found) == {str(torn), str(altered), str(moved)}
    assert "checksum" in found[str(altered)] and "another block" in found[str(moved)]
    status, out, _ = cache("verify", folder, "--json", "--delete")
    assert (status, len(json.loads(out)["bad"]), json.loads(out)["were_deleted"]) == (1, 3, True)
    assert cache("verify", folder)[0] == 0 and len(ends(folder)) == 4


def test_blocks_from_the_future_are_older_than_anything(folder: Path, cache):
    for path in folder.glob("blocks/*/*/*.kv"):
        os.utime(path, (time.time() + 1e8, time.time() + 1e8))
    assert cache("rm", folder, "--older-than", "30d")[:2] == (0, "removed 7 files, 29 kB\n")


def immutable(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Let the system refuse to remove a file, as it does one that is marked so."""
    unlink = os.unlink

    def refuse(name: str, **options: object) -> None:
        if os.path.basename(name) == path.name:
            raise PermissionError(1, "Operation not permitted")
        unlink(name, **options)

    monkeypatch.setattr(os, "unlink", refuse)


def test_verify_goes_on_after_what_it_can_not_remove(
    folder: Path, cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = sorted(folder.glob("blocks/*/*/*.kv"))
    a_folder, kept, torn, behind_a_link = files[:4]
    for path in (kept, torn):
        path.write_bytes(path.read_bytes()[:-1])
    a_folder.unlink()
    a_folder.mkdir()
    shutil.move(behind_a_link.parent, tmp_path / "elsewhere")
    behind_a_link.parent.symlink_to(tmp_path / "elsewhere")
    immutable(monkeypatch, kept)
    status, out, err = cache("verify", folder, "--delete")
    assert (status, err) == (1, "")
    *lines, end = out.splitlines()
    assert end.endswith("read and checked: 4 bad, 1 of them removed")
    assert sorted(lines) == sorted(
        [
            f"{a_folder}: it is not a regular file",
            f"{a_folder}: it is a folder",
            f"{kept}: it has another size than its header says",
            f"{kept}: it can't be removed: Operation not permitted",
            f"{torn}: it has another size than its header says",
            f"{behind_a_link.parent}: it can't be read: Not a directory: {behind_a_link.parent} "
            "(links are not followed)",
        ]
    )
    assert not torn.exists() and (tmp_path / "elsewhere" / behind_a_link.name).exists()
    found = json.loads(cache("verify", folder, "--delete", "--json")[1])
    assert (len(found["bad"]), found["were_deleted"], found["num_deleted"]) == (3, False, 0)
    assert [each["path"] for each in found["left"]] == [str(kept), str(a_folder)]


def test_rm_goes_on_after_what_it_can_not_remove(
    folder: Path, cache, monkeypatch: pytest.MonkeyPatch
):
    assert cache("ls", folder)[0] == 0
    a_folder, kept = sorted(folder.glob("blocks/*/*/*.kv"))[:2]
    monkeypatch.setattr("mlx_paged.cli.cache.program.of_model", replace_by_a_folder(a_folder))
    immutable(monkeypatch, kept)
    status, out, err = cache("rm", folder, "--all")
    assert (status, err) == (1, "")
    assert sorted(out.splitlines()) == sorted(
        [
            f"{a_folder}: it is a folder",
            f"{kept}: it can't be removed: Operation not permitted",
            "removed 5 files, 20 kB",
        ]
    )
    assert [path for path in folder.glob("blocks/*/*/*.kv") if path.is_file()] == [kept]


def replace_by_a_folder(path: Path):
    """A choice of models, while which a block becomes a folder."""

    def of_model(trees, name):
        path.unlink()
        path.mkdir()
        return trees

    return of_model


def test_size_compares_with_a_limit(folder: Path, cache):
    put(folder, FIRST, OTHER)
    out = cache("size", folder)[1]
    today = time.strftime("%Y-%m-%d")
    assert f"\nwritten: 49 kB in the last 24 hours, 49 kB since {today}\n" in out
    assert out.splitlines()[0] == "12 files, 49 kB"
    assert "owner/other" in out and "20 kB" in out
    assert (
        "12 files, 49 kB, 48% of the limit of 102 kB" in cache("size", folder, "--limit", "100K")[1]
    )
    over = cache("size", folder, "--limit", 4096)[1]
    assert over.startswith("12 files, 49 kB, 45 kB above the limit of 4.1 kB")
    sizes = json.loads(cache("size", folder, "--json", "--limit", "1G")[1])
    assert sizes["written"]["nbytes"] == sizes["written"]["nbytes_last_day"] == 12 * NBYTES
    assert (sizes["nbytes"], sizes["num_files"], sizes["limit"]) == (12 * NBYTES, 12, 2**30)
    assert [model["nbytes"] for model in sizes["models"]] == [7 * NBYTES, 5 * NBYTES]


VERBS = ["ls", "show", "pin", "unpin", "rm", "verify", "size"]
WORDS = {"show": ["abcd"], "pin": ["abcd"], "unpin": ["--all"], "rm": ["--all"]}


@pytest.mark.parametrize("verb", VERBS)
def test_folders_that_are_none_of_ours_are_one_line(verb: str, tmp_path: Path, cache):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("nothing", "foreign", "file", "\0"):
        status, out, err = cache(verb, tmp_path / name, *WORDS.get(verb, []))
        assert (status, out) == (2, ""), name
        assert err.count("\n") == 1 and f" cache {verb}: error: " in err, name
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["file", "foreign", "notes.txt"]


def test_a_folder_that_can_not_be_read_is_one_line(folder: Path, cache):
    assert cache("ls", folder)[0] == 0
    user = os.geteuid()
    folder.chmod(0)
    try:
        # Root could read it all the same.
        os.seteuid(user or 65534)
        said = [cache(verb, folder, *WORDS.get(verb, [])) for verb in VERBS]
    finally:
        os.seteuid(user)
        folder.chmod(0o700)
    for status, out, err in said:
        assert (status, out, err.count("\n")) == (2, "", 1) and "Permission denied" in err


def test_blocks_of_another_version_are_counted_and_can_be_removed(folder: Path, cache):
    path = sorted(folder.glob("blocks/*/*/*.kv"))[0]
    data = bytearray(path.read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    header_end = 32 + int.from_bytes(data[12:16], "little")
    crc = zlib.crc32(data[32:header_end], zlib.crc32(data[:24]))
    data[24:28] = crc.to_bytes(4, "little")
    path.write_bytes(data)
    assert "and 1 file in the format of another version, 4.1 kB" in cache("ls", folder)[1]
    assert cache("rm", folder, "--all")[1].startswith("removed 7 files")


def test_the_tool_imports_no_mlx(folder: Path):
    probe = (
        "import sys; from mlx_paged.__main__ import main; "
        f"[main(['cache', verb, {str(folder)!r}]) for verb in ('ls', 'size', 'verify')]; "
        "sys.exit('mlx' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_leaves_ends_the_tool_in_silence(folder: Path):
    command = f"{sys.executable} -m mlx_paged cache ls {folder} | true"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_gets_lines_of_its_width(folder: Path, monkeypatch: pytest.MonkeyPatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["cache", "ls", str(folder), "--tokenizer", "demo"]) == 0
    lines = terminal.getvalue().splitlines()[1:]
    # io.StringIO has no encoding, so nothing but ASCII is drawn; the ellipsis is the text's.
    assert max(map(len, lines)) == 80 and any(line.endswith("…") for line in lines)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_an_output_that_is_full_is_one_line(folder: Path):
    command = f"{sys.executable} -m mlx_paged cache ls {folder} > /dev/full"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


def test_the_help_names_all_verbs(cache):
    status, out, _ = cache("--help")
    assert status == 0 and all(f"\n    {verb} " in out for verb in VERBS)
    assert cache("ls", "--help")[0] == 0

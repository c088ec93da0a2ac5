"""What README, the guide and the other pages say of commands, files and each other."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from urllib.request import urlopen

import pytest

import mlx_paged

REPOSITORY = Path(__file__).parent.parent
GUIDE = sorted((REPOSITORY / "docs/guide").rglob("*.md"))
PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *(REPOSITORY / name for name in ("metal/README.md", "tools/metal-emulator/README.md")),
]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
MENTION = re.compile(r"(?<![\w/'`.])docs/[\w./-]+\.md")
# Code, the mark before it, and after it what it prints, if the page shows that.
SNIPPET = re.compile(
    r"(<!-- [^\n]+ -->\n)?```python\n(.*?)^```$(?:\n\n((?:    [^\n]+\n)+))?", re.M | re.S
)
SERVER = "http://127.0.0.1:8000"  # as the pages call it
# Why a snippet does not run as it stands, by what stands before it.
NOT_RUN = {
    "<!-- needs a file -->": "a GGUF file of the reader's",
    "<!-- does not end -->": "a server",
    "<!-- needs adapters -->": "adapters of the reader's",
    "<!-- needs an embedder -->": "a server of a model that was made for embeddings",
}


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_code(page: Path) -> str:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return re.sub(r"`[^`\n]+`", "", text)


def test_readme_has_at_most_900_words():
    assert len((REPOSITORY / "README.md").read_text().split()) <= 900


def test_no_link_between_pages_is_broken():
    broken = []
    for page in PAGES:
        for target, anchor in LINK.findall(without_code(page)):
            path = page.parent / target if target else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                broken.append(f"{page.relative_to(REPOSITORY)}: {target}#{anchor}")
    assert broken == []


def test_pages_that_code_and_tools_name_exist():
    folders = ("mlx_paged", "metal", "tests", "tools", "benchmarks", "examples", "grafana")
    files = [
        path for folder in (*folders, ".github") for path in (REPOSITORY / folder).rglob("*.*")
    ]
    missing = [
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path in [*files, *PAGES]
        if path.suffix in (".py", ".md", ".metal", ".h", ".toml", ".yml") and path.is_file()
        for name in MENTION.findall(path.read_text())
        if not (REPOSITORY / name).is_file()
    ]
    assert missing == []


def test_every_page_is_in_the_table_of_its_part():
    for part in ("guide", "reference", "internals"):
        index = REPOSITORY / "docs" / part / "README.md"
        linked = {target for target, _ in LINK.findall(index.read_text())}
        assert {path.name for path in index.parent.glob("*.md")} - linked == {"README.md"}


def test_the_reference_has_each_public_name_once():
    pages = "".join(path.read_text() for path in REPOSITORY.glob("docs/reference/*.md"))
    names = re.findall(r"^\.\. auto\w+:: mlx_paged\.(\w+)$", pages, re.M)
    # What it is, is mlx-lm's, and a page says so; the version is no interface.
    others = ["__version__", "make_sampler"]
    assert sorted([*names, *others]) == sorted(mlx_paged.__all__)
    assert "`mlx_paged.make_sampler` is" in pages


@dataclass(frozen=True)
class Snippet:
    """A block of Python in a page."""

    page: Path
    number: int
    mark: str
    code: str
    printed: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}-{self.number}"


def snippets() -> Iterator[Snippet]:
    for page in [REPOSITORY / "README.md", *GUIDE]:
        for number, (mark, *parts) in enumerate(SNIPPET.findall(page.read_text()), 1):
            yield Snippet(page, number, mark.strip(), *parts)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server of the bundled model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_paged.server", "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            try:
                urlopen(f"{address}/health", timeout=10).close()
                break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "snippet",
    [
        pytest.param(each, marks=[] if each.page.name == "README.md" else [pytest.mark.slow])
        for each in snippets()
        if each.mark not in NOT_RUN
    ],
    ids=str,
)
def test_a_snippet_of_the_readme_or_the_guide_runs_pasted_alone(
    snippet: Snippet, tmp_path: Path, request: pytest.FixtureRequest
):
    code = snippet.code
    if SERVER in code:
        code = code.replace(SERVER, request.getfixturevalue("server"))
    (tmp_path / "snippet.py").write_text(code)
    command = [sys.executable, "-W", "error::DeprecationWarning:snippet", "snippet.py"]
    environment = {**os.environ, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if snippet.printed:
        assert done.stdout == dedent(snippet.printed)


def test_the_snippets_of_the_library_show_what_they_print_but_for_a_stream():
    shown = [each.printed for each in snippets() if each.page.name == "library.md"]
    assert [bool(each) for each in shown] == [True, True, True, False, True, True, True]

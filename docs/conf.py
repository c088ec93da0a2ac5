"""Sphinx's settings for the site: the pages of the repository, each at its own path, and the
reference, made from docstrings. Nothing is fetched while it is built.

    python -m sphinx -W --keep-going -q -c docs . build/site

The source folder is the root of the repository, so that links mean the same here and in a clone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

import mlx_paged

project = "mlx_paged"
author = "mlx_paged contributors"
project_copyright = "2026, mlx_paged contributors"
version = release = mlx_paged.__version__

root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "metal/README.md", "tools/metal-emulator/README.md"]
exclude_patterns = [".*", "build", "dist"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"mlx_paged {version}"
html_copy_source = html_show_sourcelink = False
highlight_language = "none"  # of blocks that name no language: commands and what they print
myst_heading_anchors = 4  # headings have the names that GitHub gives them
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
nitpicky = True

# What README stands above; the others say it in the first column of their tables.
CONTENTS = (
    "docs/guide/README",
    "docs/reference/README",
    "DESIGN",
    "docs/internals/README",
    "CONTRIBUTING",
    "CHANGELOG",
    "metal/README",
    "tools/metal-emulator/README",
)
ABOVE_OTHERS = (
    "docs/guide/README",
    "docs/guide/server",
    "docs/reference/README",
    "docs/internals/README",
)


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Give a page the list of the pages below it, which a reader of the repository need not see. A
    page that is in no list fails the build.
    """
    if page == root_doc:
        below: Sequence[str] = CONTENTS
    elif page in ABOVE_OTHERS:
        cells = re.findall(r"^\| (.*?) \|", source[0], re.M)
        below = re.findall(r"\]\(([^)]+)\.md\)", "\n".join(cells))
    else:
        return
    source[0] += "\n".join(("\n\n```{toctree}", ":hidden:", "", *below, "```\n"))


# What a name alone may mean; a method goes with its class.
KINDS = ("class", "exception", "function", "data")


def resolve_short_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.TextElement
) -> nodes.Node | None:
    """Docstrings and types name things where they are defined, and the reference where they are
    public: what is there under the same last name is meant. A type that the reference does not have
    is no link; a name that a docstring marks as one must be there.
    """
    if node.get("refdomain") != "py":
        return None
    parts = node["reftarget"].split(".")
    objects = env.domains.python_domain.objects
    ends = [f".{'.'.join(parts[-count:])}" for count in (2, 1) if count <= len(parts)]
    for end in ends:
        found = {
            (entry.docname, entry.node_id)
            for name, entry in objects.items()
            if name.endswith(end) and (entry.objtype in KINDS or "." in end[1:])
        }
        if len(found) == 1:
            return make_refnode(app.builder, node["refdoc"], *found.pop(), text)
    return None if isinstance(text, nodes.literal) else text


def add_index(app: Sphinx, error: Exception | None) -> None:
    """The root of the site is README's page."""
    target = f"{root_doc}.html"
    page = f'<meta http-equiv="refresh" content="0; url={target}"><a href="{target}">{project}</a>'
    (app.outdir / "index.html").write_text(f"<!doctype html>{page}\n")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("missing-reference", resolve_short_name)
    app.connect("build-finished", add_index)

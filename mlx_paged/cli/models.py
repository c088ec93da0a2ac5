"""``mlx-paged pull`` and ``rm``: the hub's models on this machine."""

from __future__ import annotations

import argparse
import sys

from mlx_paged.cli.program import Parser, run_program
from mlx_paged.cli.streams import say, write
from mlx_paged.errors import shown

_FLAGS = {"path_or_hf_repo": "NAME"}


def setup_pull_parser(prog: str | None = None) -> Parser:
    """The argument parser of ``pull``, for a program of this name."""
    parser = Parser(
        prog=prog or "python -m mlx_paged pull",
        description="Download a model from the Hugging Face hub, or what is missing of it. A "
        "download that was interrupted continues where it stopped. chat and serve download what "
        "they need, too.",
    )
    parser.add_argument("name", metavar="NAME", help="a repo, or its address on the hub")
    parser.add_argument("--revision", help="branch, tag or commit of the repo")
    parser.add_version()
    return parser


def setup_rm_parser(prog: str | None = None) -> Parser:
    """The argument parser of ``rm``, for a program of this name."""
    parser = Parser(
        prog=prog or "python -m mlx_paged rm",
        description="Remove a model, with all its revisions, from the cache of the Hugging Face "
        "hub.",
    )
    name_help = "a repo, or the last part of its name; mlx-paged list lists them"
    parser.add_argument("name", metavar="NAME", help=name_help)
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask in a terminal")
    parser.add_version()
    return parser


def main_of_pull(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run ``mlx-paged pull`` and return its exit status: 0, 2 if there is no such model or it can't
    be had, or 130 after Ctrl-C.
    """
    return run_program(setup_pull_parser(prog), argv, _pull, _FLAGS)


def main_of_rm(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run ``mlx-paged rm`` and return its exit status: 0, 1 if the user declined, 2 if there is no
    such model, or 130 after Ctrl-C.
    """
    return run_program(setup_rm_parser(prog), argv, _rm, _FLAGS)


def _pull(args: argparse.Namespace) -> int:
    from mlx_paged.loading.folder import pull

    folder = pull(args.name, args.revision)
    write(f"{folder}\n")
    return 0


def _rm(args: argparse.Namespace) -> int:
    from huggingface_hub import scan_cache_dir

    from mlx_paged.loading.folder import LoadError, local_model_of, local_repositories

    repo, _ = local_model_of(args.name)
    if repo not in local_repositories():
        there = "its folder is not the hub's cache, so remove its files yourself"
        why = there if repo is not None else "it is not in the hub's cache"
        raise LoadError(f"[rm] {shown(args.name)} can't be removed: {why}")
    cache = scan_cache_dir()
    model = next(each for each in cache.repos if (each.repo_type, each.repo_id) == ("model", repo))
    if not args.yes and sys.stdin.isatty():
        say(f"Remove {model.repo_id}, {model.size_on_disk_str}? [y/N] ")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return 1
    revisions = [revision.commit_hash for revision in model.revisions]
    removal = cache.delete_revisions(*revisions)
    removal.execute()
    write(f"removed {model.repo_id}: {removal.expected_freed_size_str}\n")
    return 0

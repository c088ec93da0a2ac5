"""Fingerprints: the same digest for the same bytes, and only for these."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.block_stores import fingerprint

from mlx_paged.block_store import BlockStoreError, Fingerprint


def test_a_digest_does_not_depend_on_the_process():
    # Blocks of earlier processes are found by it: a change throws them all away.
    assert fingerprint().digest == "ff0ff0eda5ae388bdd8af23f1aa1624d"


def test_everything_but_the_name_is_in_the_digest():
    changes = {
        "model": "another",
        "layers": ("kv 2x64", "kv 2x64"),
        "kv_format": "q8",
        "block_size": 32,
        "code": "2",
    }
    digests = {dataclasses.replace(fingerprint(), **{k: v}).digest for k, v in changes.items()}
    assert len(digests | {fingerprint().digest}) == 1 + len(changes)
    assert set(changes) | {"model_name"} == {f.name for f in dataclasses.fields(Fingerprint)}
    assert dataclasses.replace(fingerprint(), model_name="moved").digest == fingerprint().digest


def test_a_fingerprint_survives_json():
    known = fingerprint(model_name="Qwen3 \N{SNOWMAN}", layers=("a", "b"))
    assert Fingerprint.from_json(known.as_json()) == known
    assert Fingerprint.from_json(known.as_json()).digest == known.digest


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "null", '{"model": 1}', "[" * 100_000, fingerprint().as_json()[:50]],
)
def test_a_text_that_is_none_is_refused(text):
    with pytest.raises(BlockStoreError, match="no fingerprint"):
        Fingerprint.from_json(text)


@pytest.mark.parametrize(
    "fields", [{"layers": "text"}, {"layers": (1,)}, {"block_size": 0}, {"block_size": True}]
)
def test_fields_of_a_wrong_kind_are_refused(fields):
    with pytest.raises(BlockStoreError, match="no fingerprint"):
        fingerprint(**fields)

"""What the bytes of a block depend on besides its tokens. Each fingerprint has its own folder."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re

from mlx_paged.argument_values import is_plain_integer
from mlx_paged.block_store.block_file import VERSION
from mlx_paged.block_store.errors import BlockStoreError
from mlx_paged.errors import shown

DIGEST_LENGTH = 32
"""Hexadecimal digits of a digest: 128 bits of SHA-256."""

STORED_KV_VERSION = 3
"""The version of what is stored: increase it if the blocks in existing folders may be wrong. They
are not found then, and are evicted first. Until version 2, K/V of files were stored, too.
"""
_VERSION_IN_CODE = re.compile(r"mlx_paged (\d+)\b")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Two caches can exchange blocks if their fingerprints have the same digest.

    Attributes:
        model: digest of the model's content.
        model_name: display name. It isn't part of the digest: a model that was moved or renamed has
            the same K/V.
        layers: a description of each layer's K/V: heads, widths, format of its rows.
        kv_format: the K/V format that the user chose.
        block_size: tokens per block.
        code: ``STORED_KV_VERSION``, the version of MLX, its backend and the kind of device.
    """

    model: str
    model_name: str
    layers: tuple[str, ...]
    kv_format: str
    block_size: int
    code: str

    def __post_init__(self) -> None:
        texts = (self.model, self.model_name, self.kv_format, self.code, *self.layers)
        is_right = type(self.layers) is tuple and all(type(text) is str for text in texts)
        if not is_right or not is_plain_integer(self.block_size, 1):
            raise BlockStoreError(f"no fingerprint: {shown(dataclasses.astuple(self))}")

    @functools.cached_property
    def digest(self) -> str:
        """The name of the folder: 32 hexadecimal digits, the same in every process."""
        # The version of the file format is included: files of another one have another folder.
        fields = dataclasses.asdict(self)
        del fields["model_name"]
        text = json.dumps(["mlx_paged.fingerprint", VERSION, fields], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]

    @property
    def is_outdated(self) -> bool:
        """Whether the blocks are of an earlier ``STORED_KV_VERSION``, and not used any more."""
        found = _VERSION_IN_CODE.match(self.code)
        return found is not None and int(found[1]) < STORED_KV_VERSION

    def as_json(self) -> str:
        """A readable text, which ``from_json`` reads."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """The fingerprint whose ``as_json`` this is.

        Raises:
            BlockStoreError: the text is not a fingerprint.
        """
        try:
            fields = json.loads(text)
            return cls(**{**fields, "layers": tuple(fields["layers"])})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise BlockStoreError(f"no fingerprint: {shown(text)}") from error

"""``Index``: rows about the files, in SQLite, so that sums and ages are known without looking.

It is only an index. Nothing is lost with it, since each row can be made from its file, and no read
of a block asks it. Each method raises ``sqlite3.Error`` when the database fails; ``Inventory``
deals with that.

There is a rollback journal and no write-ahead log, whose shared memory (``-shm``) is mapped: a
process would be killed (SIGBUS) if anything truncated that file in place. Nothing is synced. After
a process was killed the journal undoes what it had begun, and what a power cut has damaged is found
by ``check``.

The least recently used block is looked for among those without children (``num_children`` is kept
by triggers), so a prefix is evicted from its end, and an ancestor stays for as long as somebody may
come to it through a block that was used later.
"""

from __future__ import annotations

import dataclasses
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from mlx_paged.block_store.directory import Directory
from mlx_paged.block_store.layout import BlockName, is_digest
from mlx_paged.core.tier import MOST_HASH_BYTES, BlockHeader

ALLOCATION_UNIT = 4096
"""Bytes: file systems give a file a whole number of these."""

_VERSION = 1
_SIDE_FILES = ("-wal", "-shm", "-journal")  # the first two are those of a write-ahead log

_SCHEMA = f"""
CREATE TABLE totals (num_blocks INTEGER NOT NULL, nbytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TABLE blocks (
    digest TEXT NOT NULL,
    hash BLOB NOT NULL,
    parent BLOB,
    first_token INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    kv_group INTEGER NOT NULL,
    nbytes INTEGER NOT NULL,
    created REAL NOT NULL,
    ttl REAL,
    last_used REAL NOT NULL,
    num_hits INTEGER NOT NULL,
    num_children INTEGER NOT NULL,
    PRIMARY KEY (digest, hash)
) WITHOUT ROWID;
CREATE INDEX children ON blocks (digest, parent) WHERE parent IS NOT NULL;
CREATE INDEX leaves ON blocks (last_used, first_token DESC) WHERE num_children = 0;
CREATE TRIGGER block_added AFTER INSERT ON blocks BEGIN
    UPDATE totals SET num_blocks = num_blocks + 1, nbytes = nbytes + NEW.nbytes;
    UPDATE blocks SET num_children = num_children + 1
        WHERE digest = NEW.digest AND hash = NEW.parent;
END;
CREATE TRIGGER block_removed AFTER DELETE ON blocks BEGIN
    UPDATE totals SET num_blocks = num_blocks - 1, nbytes = nbytes - OLD.nbytes;
    UPDATE blocks SET num_children = num_children - 1
        WHERE digest = OLD.digest AND hash = OLD.parent;
END;
CREATE TRIGGER block_resized AFTER UPDATE OF nbytes ON blocks BEGIN
    UPDATE totals SET nbytes = nbytes + NEW.nbytes - OLD.nbytes;
END;
PRAGMA user_version = {_VERSION};
"""

_ADD = """
INSERT INTO blocks
SELECT :digest, :hash, :parent, :first_token, :num_tokens, :kv_group, :nbytes, :created, :ttl,
    :last_used, :num_hits, (SELECT count(*) FROM blocks WHERE digest = :digest AND parent = :hash)
WHERE true
ON CONFLICT (digest, hash) DO UPDATE SET nbytes = excluded.nbytes, created = excluded.created,
    ttl = excluded.ttl, last_used = excluded.last_used
"""

# Each gives "ok", nothing, or what is wrong. The unary plus keeps SQLite from the index.
_CHECKS = (
    "PRAGMA quick_check(1)",
    "SELECT 'the sums' FROM totals "
    "WHERE (num_blocks, nbytes) != (SELECT count(*), total(nbytes) FROM blocks)",
    "SELECT 'the number of children' FROM blocks AS parents WHERE num_children != "
    "(SELECT count(*) FROM blocks WHERE digest = parents.digest AND parent = parents.hash) LIMIT 1",
    "SELECT 'the leaves' WHERE (SELECT count(*) FROM blocks WHERE +num_children = 0) != "
    "(SELECT count(*) FROM blocks INDEXED BY leaves WHERE num_children = 0)",
)

MOST_SECONDS_AHEAD = 60.0
"""How far the clock that gave a block its time may be ahead of this one."""

# A time that is still to come says nothing of a block's use, and would keep it for ever.
_LAST_USED = "CASE WHEN last_used > :latest THEN 0 ELSE last_used END"

_COLUMNS = (
    "digest, hash, parent, first_token, num_tokens, kv_group, nbytes, created, ttl, last_used, "
    "num_hits"
)


@dataclasses.dataclass(frozen=True)
class IndexRow:
    """What is known of a block.

    Attributes:
        digest: of its fingerprint.
        block_hash: its chained hash.
        parent_hash: that of the block before it, ``None`` for the first one of a sequence.
        first_token: the position of its first token.
        num_tokens: how many tokens it has (``CacheFolder.header`` says which); 0 for a file in the
            format of another version, of which nothing more is known.
        group: the group of layers whose rows it holds.
        nbytes: what its file takes on disk, see ``nbytes_on_disk``.
        created: when it was written, in seconds since 1970.
        ttl: for how many seconds it is kept after it was last used; ``None`` for no limit.
        last_used: when it was last written or used, in seconds since 1970.
        num_hits: how often it was used, as far as the index knows: a rebuilt one starts at 0.
    """

    digest: str
    block_hash: bytes
    parent_hash: bytes | None
    first_token: int
    num_tokens: int
    group: int
    nbytes: int
    created: float
    ttl: float | None
    last_used: float
    num_hits: int = 0

    @classmethod
    def of_block(
        cls,
        digest: str,
        header: BlockHeader,
        *,
        nbytes: int,
        created: float,
        ttl: float | None,
        last_used: float,
    ) -> IndexRow:
        """The row of a block whose header is known."""
        return cls(
            digest,
            header.block_hash,
            header.parent_hash,
            header.first_token,
            len(header.token_ids),
            header.group,
            nbytes,
            created,
            ttl,
            last_used,
        )

    @property
    def name(self) -> BlockName:
        """What methods of ``CacheFolder`` take."""
        return self.digest, self.block_hash


def nbytes_on_disk(num_bytes: int) -> int:
    """What a file of ``num_bytes`` takes."""
    return -(-num_bytes // ALLOCATION_UNIT) * ALLOCATION_UNIT


class Index:
    """The rows of one folder.

    Args:
        path: the database, made if it isn't there; ``None`` for one in memory, which other
            processes know nothing of.
        busy_seconds: how long to wait while another process writes.
    """

    def __init__(self, path: Path | None, busy_seconds: float) -> None:
        self._path = path
        if path is not None:
            _make_file(path)
        self._database = sqlite3.connect(
            ":memory:" if path is None else path,
            timeout=busy_seconds,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            self._prepare()
            self.totals()
            self._file = None if path is None else _identity(path)
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        self._database.execute("PRAGMA journal_mode = TRUNCATE").fetchall()
        self._database.execute("PRAGMA synchronous = OFF")
        with self.transaction():
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _statements(_SCHEMA):
                    self._database.execute(statement)
            elif version != _VERSION:
                raise sqlite3.DatabaseError(f"the index has version {version}")

    @property
    def is_shared(self) -> bool:
        return self._path is not None

    def is_current(self) -> bool:
        """Whether the file at its path is still the one that it was opened with."""
        return self._path is None or self._file == _identity(self._path)

    def set_busy_seconds(self, seconds: float) -> None:
        self._database.execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}")

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._database.close()

    def _write(self, statement: str, parameters: Iterable[Any]) -> None:
        if self._database.in_transaction:
            self._database.executemany(statement, parameters)
        else:
            with self.transaction():
                self._database.executemany(statement, parameters)

    def wait(self) -> None:
        """Wait for the end of a transaction of another thread or process."""
        with self.transaction():
            pass

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What is done inside is done as a whole, or not at all."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def check(self) -> None:
        """Raise ``sqlite3.DatabaseError`` if pages, sums, numbers of children or leaves contradict
        each other. Takes a microsecond per row, in which no other process can commit.
        """
        for statement in _CHECKS:
            for (found,) in self._database.execute(statement).fetchall():
                if found != "ok":
                    raise sqlite3.DatabaseError(f"the index contradicts itself: {found}")

    def totals(self) -> tuple[int, int]:
        """How many blocks there are, and what they take on disk."""
        row = self._database.execute("SELECT num_blocks, nbytes FROM totals").fetchone()
        match row:
            case (int(num_blocks), int(nbytes)):
                return num_blocks, nbytes
        raise sqlite3.DatabaseError("the index has no sums")

    def add(self, rows: Iterable[IndexRow]) -> None:
        """Add rows, or what has changed of those that are there."""
        self._write(_ADD, map(_as_parameters, rows))

    def remove(self, names: Iterable[BlockName]) -> None:
        self._write("DELETE FROM blocks WHERE digest = ? AND hash = ?", names)

    def remove_digest(self, digest: str) -> None:
        self._write("DELETE FROM blocks WHERE digest = ?", [(digest,)])

    def clear(self) -> None:
        self._write("DELETE FROM blocks WHERE ?", [(True,)])

    def note_used(self, digest: str, block_hashes: Iterable[bytes], used: float) -> None:
        """Count a hit for each block, at the time ``used``."""
        self._write(
            f"UPDATE blocks SET last_used = max({_LAST_USED}, :used), num_hits = num_hits + 1 "
            "WHERE digest = :digest AND hash = :hash",
            (
                {"used": used, "latest": used + MOST_SECONDS_AHEAD, "digest": digest, "hash": each}
                for each in block_hashes
            ),
        )

    def set_last_used(self, uses: Iterable[tuple[BlockName, float]]) -> None:
        self._write(
            "UPDATE blocks SET last_used = ? WHERE digest = ? AND hash = ?",
            ((last_used, *name) for name, last_used in uses),
        )

    def oldest_leaf(
        self, is_kept: Callable[[BlockName], bool], now: float = float("inf")
    ) -> tuple[BlockName, int] | None:
        """The least recently used block without children, of those that are not ``is_kept``, and
        what it takes; of several the one with the latest tokens. Those whose time is still to come
        are the oldest.
        """
        for first in (now + MOST_SECONDS_AHEAD, -float("inf")):
            cursor = self._database.execute(
                "SELECT digest, hash, nbytes FROM blocks WHERE num_children = 0 AND last_used > ? "
                "ORDER BY last_used, first_token DESC",
                (first,),
            )
            with closing(cursor):
                for digest, block_hash, nbytes in cursor:
                    name = _checked_name(digest, block_hash)
                    if not is_kept(name):
                        return name, nbytes
        return None

    def expired(self, now: float, digest: str, ttl: float | None) -> list[tuple[BlockName, float]]:
        """Blocks whose time is over by what their writer said, or, of one fingerprint, by ``ttl``;
        with their last use.
        """
        rows = self._database.execute(
            f"SELECT digest, hash, {_LAST_USED} FROM blocks WHERE {_LAST_USED} + ttl < :now "
            f"OR (digest = :digest AND {_LAST_USED} + :ttl < :now)",
            {"now": now, "latest": now + MOST_SECONDS_AHEAD, "digest": digest, "ttl": ttl},
        )
        return [(_checked_name(digest, block_hash), used) for digest, block_hash, used in rows]

    def digests(self) -> set[str]:
        rows = self._database.execute("SELECT digest, min(hash) FROM blocks GROUP BY digest")
        return {_checked_name(digest, block_hash)[0] for digest, block_hash in rows}

    def shard(self, digest: str, first_byte: int) -> dict[bytes, tuple[int, float]]:
        """Of the blocks whose hash begins with a byte: what they take, and their last use."""
        # Hashes are at most 255 bytes long.
        last = bytes([first_byte]) + b"\xff" * 255
        rows = self._database.execute(
            "SELECT hash, nbytes, last_used FROM blocks WHERE digest = ? AND hash BETWEEN ? AND ?",
            (digest, bytes([first_byte]), last),
        )
        return {block_hash: (nbytes, last_used) for block_hash, nbytes, last_used in rows}

    def rows(self) -> list[IndexRow]:
        """All of them; of each fingerprint parents before children."""
        rows = self._database.execute(
            f"SELECT {_COLUMNS} FROM blocks ORDER BY digest, first_token, hash"
        ).fetchall()  # before the work on them: no other process can write while they are read
        return [IndexRow(*_checked_name(*row[:2]), *row[2:]) for row in rows]


def delete_index(path: Path) -> None:
    """Remove a database that is broken. Raises OSError."""
    # The database last: one that another process makes then finds nothing of the old one.
    for name in (*(f"{path}{suffix}" for suffix in _SIDE_FILES), str(path)):
        with suppress(FileNotFoundError):
            os.unlink(name)


def _as_parameters(row: IndexRow) -> dict[str, object]:
    return {
        "digest": row.digest,
        "hash": row.block_hash,
        "parent": row.parent_hash,
        "first_token": row.first_token,
        "num_tokens": row.num_tokens,
        "kv_group": row.group,
        "nbytes": row.nbytes,
        "created": row.created,
        "ttl": row.ttl,
        "last_used": row.last_used,
        "num_hits": row.num_hits,
    }


def _checked_name(digest: object, block_hash: object) -> BlockName:
    # Files are removed by what stands here, and any bit of it may be broken.
    if isinstance(digest, str) and is_digest(digest):
        match block_hash:
            case bytes() if 0 < len(block_hash) <= MOST_HASH_BYTES:
                return digest, block_hash
    raise sqlite3.DatabaseError("the index has a row of no block")


def _make_file(path: Path) -> None:
    """Make an empty database that others may not read, unless there is one. SQLite gives its side
    files the same rights.

    Raises:
        sqlite3.DatabaseError: what is there is a link, which SQLite would follow, or another
            user's.
    """
    with suppress(OSError):
        folder = Directory.at(path.parent)
        for suffix in ("", *_SIDE_FILES):
            with suppress(FileNotFoundError):
                if not folder.is_own_file(folder.status(f"{path.name}{suffix}")):
                    raise sqlite3.DatabaseError("the index is no file of the folder's owner")
        os.close(folder.create_file(path.name))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _statements(script: str) -> Iterator[str]:
    """The statements of a script; ``executescript`` would end the transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""

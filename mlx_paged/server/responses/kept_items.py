"""``KeptItems``: items of the last responses, for clients that send an ``item_reference`` in the
place of an item that they were told.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

MAX_KEPT_CHARACTERS = 2**25  # of items as JSON


class KeptItems:
    """The last items by their owner and id, in memory. Any thread may use it.

    Args:
        max_characters: that are kept; the items that were not asked for longest go first.
    """

    def __init__(self, max_characters: int = MAX_KEPT_CHARACTERS):
        self._max_characters = max_characters
        self._num_characters = 0
        self._items: OrderedDict[tuple[str | None, str], str] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, owner: str | None, items: Iterable[dict[str, Any]]) -> None:
        """Keep items of a response to ``owner``."""
        with self._lock:
            for item in items:
                text = json.dumps(item)
                key = owner, str(item["id"])
                self._num_characters += len(text) - len(self._items.pop(key, ""))
                self._items[key] = text
            while self._num_characters > self._max_characters:
                _, text = self._items.popitem(last=False)
                self._num_characters -= len(text)

    def find(self, owner: str | None, item_id: str) -> dict[str, Any] | None:
        """The item of this id that ``owner`` was told, if it is still kept."""
        with self._lock:
            text = self._items.get((owner, item_id))
            if text is None:
                return None
            self._items.move_to_end((owner, item_id))
        item: dict[str, Any] = json.loads(text)
        return item

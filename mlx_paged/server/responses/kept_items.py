"""``KeptItems``: the items of recent responses, for clients that send an ``item_reference`` instead
of the item.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

MAX_KEPT_CHARACTERS = 2**25  # of JSON


class KeptItems:
    """Recent items by owner and id, in memory. Thread-safe.

    Args:
        max_characters: the limit, beyond which the least recently used items are dropped.
    """

    def __init__(self, max_characters: int = MAX_KEPT_CHARACTERS):
        self._max_characters = max_characters
        self._num_characters = 0
        self._items: OrderedDict[tuple[str | None, str], str] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, owner: str | None, items: Iterable[dict[str, Any]]) -> None:
        """Keep the items of a response to ``owner``."""
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
        """The item with this id in a response to ``owner``, if it is still kept."""
        with self._lock:
            text = self._items.get((owner, item_id))
            if text is None:
                return None
            self._items.move_to_end((owner, item_id))
        item: dict[str, Any] = json.loads(text)
        return item

"""``History``: a conversation as chat templates take it, from what a client tells of it."""

from __future__ import annotations

from typing import Any

from mlx_paged.errors import shown
from mlx_paged.server.schemas import refused


class History:
    """Messages, which are told one thing after another.

    A content is the list of its texts until all of them are there: to join them one by one would
    take the square of their number.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._is_over = False
        self._names: dict[str, str] = {}  # of the tools, by the ids of their calls

    @property
    def last(self) -> dict[str, Any]:
        """The last message; without any, one that says nothing."""
        return self._messages[-1] if self._messages else {"role": None, "content": []}

    def end_message(self) -> None:
        """What follows is a message of its own, whatever its role is."""
        self._is_over = True

    def message(self, role: str, *texts: str) -> dict[str, Any]:
        """The message to which a role's next texts belong: the last one, or a new one."""
        if self._is_over or self.last["role"] != role:
            self._messages.append({"role": role, "content": []})
            self._is_over = False
        self._messages[-1]["content"] += texts
        return self._messages[-1]

    def remind(self, text: str) -> None:
        """What a system says in the middle, where few templates know a message of it."""
        self.message("user", f"<system-reminder>\n{text}\n</system-reminder>")

    def call(self, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        """The model calls a tool."""
        self._names[call_id] = name
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self.message("assistant").setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, place: str, kind: str) -> dict[str, Any]:
        """The message of a call's result, without a text.

        Args:
            place: of the id in the body.
            kind: what the protocol calls a call.
        """
        if call_id not in self._names:
            raise refused(place, f"is {shown(call_id)}, and no {kind} has that id")
        self.end_message()
        message = self.message("tool")
        message |= {"tool_call_id": call_id, "name": self._names[call_id]}
        return message

    def messages(self, joint: str = "") -> list[dict[str, Any]]:
        """All of them.

        Args:
            joint: between the texts of each.
        """
        for message in self._messages:
            message["content"] = joint.join(filter(None, message["content"]))
        return self._messages

"""``History``: builds the messages for a chat template from the items or blocks of a body."""

from __future__ import annotations

from typing import Any

from mlx_paged.answers.template_traits import REMINDER
from mlx_paged.errors import shown
from mlx_paged.server.schemas import refused


class History:
    """A conversation that is built step by step.

    Contents are lists of texts until the end, since concatenating the texts one by one would take
    quadratic time.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._is_over = False
        self._names: dict[str, str] = {}  # names of tools by the ids of their calls

    @property
    def last(self) -> dict[str, Any]:
        """The last message; an empty one without a role if there is none."""
        return self._messages[-1] if self._messages else {"role": None, "content": []}

    def end_message(self) -> None:
        """Begin a new message with the next text, even if its role is the same."""
        self._is_over = True

    def message(self, role: str, *texts: str) -> dict[str, Any]:
        """Add texts of a role to the last message, or to a new one, and return the message."""
        messages = self._messages
        if self._is_over or not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": []})
            self._is_over = False
        messages[-1]["content"] += texts
        return messages[-1]

    def remind(self, text: str) -> None:
        """Add a system message in the middle of the conversation, which few templates support."""
        self.message("user", REMINDER.format(text))

    def call(self, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        """Add a tool call of the assistant."""
        self._names[call_id] = name
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self.message("assistant").setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, place: str, kind: str) -> dict[str, Any]:
        """Add an empty message for the result of a call, and return it.

        Args:
            place: the place of the id in the body.
            kind: the protocol's name for a call.
        """
        if call_id not in self._names:
            raise refused(place, f"is {shown(call_id)}, but no {kind} has this id")
        self.end_message()
        message = self.message("tool")
        message |= {"tool_call_id": call_id, "name": self._names[call_id]}
        return message

    def messages(self, separator: str = "") -> list[dict[str, Any]]:
        """The finished messages; ``separator`` joins the texts of each."""
        for message in self._messages:
            message["content"] = separator.join(filter(None, message["content"]))
        return self._messages

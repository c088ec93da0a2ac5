"""The parts of messages, shared by all protocols: texts, and placeholders for other kinds."""

from __future__ import annotations

from typing import Annotated, Literal

from mlx_paged.server.schemas import Children, OneOf, Repeated, refused

# The name of each kind in words, and the way out.
_OTHERS = {
    **dict.fromkeys(("image", "image_url", "input_image"), ("images", "")),
    **dict.fromkeys(("input_audio", "audio_url"), ("audio", "")),
    **dict.fromkeys(("file", "input_file"), ("files", "")),
    "video_url": ("videos", ""),
    "document": ("documents", "; send their text"),
    "search_result": ("search results", "; send their text"),
    "container_upload": ("files", "; send their text"),
    "tool_reference": ("references to tools", "; send the tools themselves"),
}


class TextPart(Repeated):
    place = "content[]"
    type: Literal["text", "input_text", "output_text"]
    text: str

    def as_text(self, place: str, is_last: bool) -> str:
        """The text of the part in a prompt.

        Args:
            place: the place of the part in the body.
            is_last: whether the part belongs to the last message, where images and the like are
                refused; in earlier messages they are replaced by a line of text.
        """
        return self.text


class RefusalPart(Repeated):
    place = "content[]"
    type: Literal["refusal"]
    refusal: str

    def as_text(self, place: str, is_last: bool) -> str:
        return self.refusal


class OtherPart(Repeated):
    place = "content[]"
    type: Literal[
        "image", "image_url", "input_image", "input_audio", "audio_url", "file", "input_file",
        "video_url", "document", "search_result", "container_upload", "tool_reference",
    ]  # fmt: skip

    def as_text(self, place: str, is_last: bool) -> str:
        what, way_out = _OTHERS[self.type]
        if is_last:
            words = f"is {self.type!r}, but models are text-only here: no {what}{way_out}"
            raise refused(f"{place}.type", words)
        return f"[{what} are left out: this model reads text only]"


Part = Annotated[str | TextPart | RefusalPart | OtherPart, OneOf("type")]
Content = Annotated[str | Children[Part], OneOf()]


def texts_of(content: Content, place: str, is_last: bool) -> list[str]:
    """The texts of a content, which is a text or a list of parts; see :meth:`TextPart.as_text`."""
    if isinstance(content, str):
        return [content]
    return [
        part if isinstance(part, str) else part.as_text(f"{place}[{index}]", is_last)
        for index, part in enumerate(content)
    ]

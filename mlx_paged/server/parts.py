"""Parts of messages, of all protocols: texts, and what stands in a prompt for what is not text."""

from __future__ import annotations

from typing import Annotated, Literal

from mlx_paged.server.schemas import Children, OneOf, Repeated, refused

# What parts of a kind are called, and what to do instead.
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

    def told(self, place: str, is_last: bool) -> str:
        """The text that a prompt has.

        Args:
            place: of the part in the body.
            is_last: whether it is of the newest message, in which what is not text is refused; in
                the history a line of text stands for it.
        """
        return self.text


class RefusalPart(Repeated):
    place = "content[]"
    type: Literal["refusal"]
    refusal: str

    def told(self, place: str, is_last: bool) -> str:
        return self.refusal


class OtherPart(Repeated):
    place = "content[]"
    type: Literal[
        "image", "image_url", "input_image", "input_audio", "audio_url", "file", "input_file",
        "video_url", "document", "search_result", "container_upload", "tool_reference",
    ]  # fmt: skip

    def told(self, place: str, is_last: bool) -> str:
        what, way_out = _OTHERS[self.type]
        if is_last:
            words = f"is {self.type!r}, and models are text-only here: no {what}{way_out}"
            raise refused(f"{place}.type", words)
        return f"[{what} are left out: this model reads text only]"


Part = Annotated[str | TextPart | RefusalPart | OtherPart, OneOf("type")]
Content = Annotated[str | Children[Part], OneOf()]


def texts_of(content: Content, place: str, is_last: bool) -> list[str]:
    """The texts of a content, which is one, or a list of parts; see :meth:`TextPart.told`.

    Args:
        place: of the content in the body.
    """
    if isinstance(content, str):
        return [content]
    return [
        part if isinstance(part, str) else part.told(f"{place}[{index}]", is_last)
        for index, part in enumerate(content)
    ]

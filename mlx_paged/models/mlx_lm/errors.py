"""Why a model can't run in some way."""

from __future__ import annotations


class UnsuitableModelError(ValueError):
    """A model can't run in the way that was tried; the message is the reason, as a part of a
    sentence.
    """

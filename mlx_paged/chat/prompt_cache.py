"""``--prompt-cache-file``: K/V that stand before a conversation, as in ``mlx_lm.generate``.

The file is one of ``mlx_lm.cache_prompt``, or a snapshot. What it holds takes the place of all that
the chat template writes before the first message of the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.chat_template import ChatTemplateError, render_chat
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.snapshots import is_snapshot, read_prompt_cache
from mlx_paged.snapshots.errors import SnapshotError, check_path
from mlx_paged.snapshots.prompt_caches import MODEL, TOKEN_IDS, TOKENIZER_CONFIG

if TYPE_CHECKING:
    from mlx_paged.engine.engine import Engine

QUERY = "<query>"


class PromptPrefix(NamedTuple):
    """What stands before a conversation.

    Attributes:
        token_ids: of the K/V, or what stands for them where they are unknown.
        cache_salt: of the requests, where no other request shall find these K/V.
    """

    token_ids: Sequence[int] = ()
    cache_salt: str | None = None


class PromptCacheFacts(NamedTuple):
    """What a file says of itself before a model is loaded."""

    path: Path
    model: str | None = None  # as mlx-lm was told it
    tokenizer_config: Mapping[str, Any] = {}
    has_token_ids: bool = True


def read_facts(path: str) -> PromptCacheFacts:
    """Raises ``SnapshotError`` for a file that is neither a prompt cache of mlx-lm's nor a
    snapshot.
    """
    file = check_path(path)
    if is_snapshot(file):
        return PromptCacheFacts(file)
    _, metadata = read_prompt_cache(file)
    try:
        config = json.loads(metadata.get(TOKENIZER_CONFIG, "{}"))
        if not isinstance(config, dict):
            raise ValueError(f"{shown(config)} is not a mapping")
    except (ValueError, RecursionError) as error:
        raise SnapshotError(file, f"has a tokenizer_config that can't be read: {error}") from error
    # Its code is never trusted on a file's word.
    config = {name: value for name, value in config.items() if name != "trust_remote_code"}
    return PromptCacheFacts(file, metadata.get(MODEL) or None, config, TOKEN_IDS in metadata)


def chosen_model(facts: PromptCacheFacts, model: str | None) -> str | None:
    """The model to load: that of the file, unless ``--model`` says so too.

    Raises:
        ArgumentError: it says another one.
    """
    if model is None or facts.model is None:
        return model or facts.model
    # A file that was exported here may have no more than the folder's name.
    if facts.model in (model, Path(model).name):
        return model
    folders = [Path(name).expanduser() for name in (model, facts.model)]
    if all(folder.exists() for folder in folders) and folders[0].samefile(folders[1]):
        return model
    raise ArgumentError(
        f"[chat] --prompt-cache-file {facts.path} was made with the model {facts.model}, and "
        f"--model is {model}; leave --model out, or make the file again",
        "model",
    )


def put_before(engine: Engine, facts: PromptCacheFacts) -> PromptPrefix:
    """Bring the K/V of a file into an engine.

    Raises:
        SnapshotError: it holds K/V of another model, dtype or format, or was altered.
        ArgumentError: it does not say its tokens, and the engine can't hold such K/V.
        CacheFullError: the budget can't hold them.
    """
    if is_snapshot(facts.path):
        return PromptPrefix(engine.load_snapshot(facts.path))
    if facts.has_token_ids:
        return PromptPrefix(engine.import_prompt_cache(facts.path))
    return PromptPrefix(*engine.pin_prompt_cache(facts.path))


def behind_prefix(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Mapping[str, Any]],
    template_options: Mapping[str, Any],
) -> str:
    """What the chat template writes from the first message of the user on, without what stands
    before its text: the template's beginning is in the K/V, as mlx-lm has it.

    Raises:
        ChatTemplateError: the template refuses the messages, or does not write a message as it is.
    """
    text = render_chat(tokenizer, messages, template_options)
    first = next(index for index, each in enumerate(messages) if each["role"] == "user")
    probe = [*messages]
    probe[first] = {**probe[first], "content": QUERY}
    begin = render_chat(tokenizer, probe, template_options).find(QUERY)
    if begin < 0:
        raise ChatTemplateError(
            "[chat template] the model's chat template does not write a message as it is, so "
            "nothing can stand before it; leave --prompt-cache-file out"
        )
    return text[begin:]

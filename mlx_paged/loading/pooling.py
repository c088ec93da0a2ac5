"""Embedders and rerankers: what a model's folder says of embeddings, and the prompts and scores of
Qwen3-Reranker.

An embedding is the hidden row of a text's last token. Folders of sentence-transformers say so in
``modules.json`` and ``1_Pooling/config.json``, GGUF files in ``pooling_type``. Conversions for MLX
leave these files out; there, a tokenizer that ends each text with a token is the sign, or the name
of Qwen3-Embedding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.engine.input_processor import encode_prompt
from mlx_paged.errors import ArgumentError, reason, shown
from mlx_paged.loading.folder import LoadError, read_json_object
from mlx_paged.loading.gguf import is_gguf
from mlx_paged.models.language_model import LanguageModel, model_type_of
from mlx_paged.options.argument_values import is_sequence
from mlx_paged.options.sampling_params import PoolingParams

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
# Of sentence-transformers, by the last part of its class. Others change what the model computes.
_MODULES = ("Transformer", "Pooling", "Normalize")
_GGUF_POOLING = {0: "none", 1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}

_QWEN_END = "<|endoftext|>"
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# What Qwen3-Reranker was trained with. The parts are encoded apart from each other.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_ASKED = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: "
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Embedder:
    """How a model embeds texts.

    Args:
        is_declared: whether the model's files or its tokenizer say that it was made for that.
        normalizes: whether an embedding is divided by its length.
        prompts: texts that are put before an input, by their names, such as ``"query"``.
        default_prompt: the name of the one that is used if none is named; ``""`` for none.
        ends_texts: whether the last token of an encoded text is an end token.
        end_token_ids: what is appended to texts where the tokenizer does not do it.
    """

    tokenizer: TokenizerWrapper | None
    is_declared: bool = False
    normalizes: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    ends_texts: bool = False
    end_token_ids: tuple[int, ...] = ()

    def params(self, dimensions: int | None = None) -> PoolingParams:
        """The parameters of a request for an embedding of this length; ``None`` for the whole.

        Raises:
            ArgumentError: it is out of range.
        """
        return PoolingParams(dimensions=dimensions, normalize=self.normalizes)

    def text_before(self, prompt_name: str | None = None) -> str:
        """The text that is put before an input.

        Args:
            prompt_name: ``None`` for the default.

        Raises:
            ArgumentError: the model has no prompt of this name.
        """
        name = self.default_prompt if prompt_name is None else prompt_name
        if name in self.prompts or not name:
            return self.prompts.get(name, "")
        known = ", ".join(map(shown, self.prompts)) or "no prompts"
        raise ArgumentError(
            f"[embed] there is no prompt {shown(prompt_name)}; this model has {known}",
            "prompt_name",
        )

    def prompt(self, given: Any, before: str = "") -> Any:
        """A prompt of ``LLM.generate`` with the tokens of its text, unless it has token ids.

        Args:
            before: what :meth:`text_before` returned.

        Raises:
            ArgumentError: it can't be encoded.
        """
        fields = dict(given) if isinstance(given, Mapping) else {"prompt": given}
        text = fields.get("prompt")
        if not isinstance(text, str) or fields.get("prompt_token_ids") is not None:
            return given
        return {**fields, "prompt": before + text, "prompt_token_ids": self.encode(text, before)}

    def encode(self, text: str, before: str = "", name: str = "prompt") -> list[int]:
        """The token ids of an input, with the end token.

        Args:
            before: what :meth:`text_before` returned.
            name: of the input, for error messages.

        Raises:
            ArgumentError: it can't be encoded.
        """
        return encode_prompt(self.tokenizer, before + text, name) + list(self.end_token_ids)


def read_embedder(model: LanguageModel, tokenizer: TokenizerWrapper | None) -> Embedder:
    """How a model embeds texts, by the files that it was loaded from.

    Raises:
        ArgumentError: its embeddings are not those of the last token, or can't be read.
    """
    path = model.path
    ends_texts, normalizes, default = _ends_texts(tokenizer), True, ""
    end_token_ids: tuple[int, ...] = ()
    if tokenizer is not None and not ends_texts and _is_called(model, "qwen3-embedding"):
        # The first revisions of its tokenizer, and what was made from them, lack the end token.
        end_token_ids = tuple(tokenizer.encode(_QWEN_END, add_special_tokens=False))
        ends_texts = True
    declared = ends_texts
    prompts: dict[str, str] = {}
    if path is not None and is_gguf(path):
        from mlx_paged.loading.gguf.header import read_header

        metadata = read_header(path).metadata
        kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
        if kind:
            _check_pooling([_GGUF_POOLING.get(kind, str(kind))], model)
            declared = True
    elif path is not None:
        _check_attention(path, model)
        if (path / MODULES).is_file():
            modules = _read_modules(path, model)
            declared = declared or "Pooling" in modules
            normalizes = "Normalize" in modules or "Pooling" not in modules
        if (path / PROMPTS).is_file():
            config = read_json_object(path / PROMPTS)
            prompts, default = _read_prompts(config, path / PROMPTS)
    if not model.hidden_row_size:
        raise _refusal(model, "its last norm can't be read")
    return Embedder(tokenizer, declared, normalizes, prompts, default, ends_texts, end_token_ids)


def _is_called(model: LanguageModel, name: str) -> bool:
    """Whether a model's name or path contains a name, in lower case."""
    return name in f"{model.name} {model.path}".lower()


def _ends_texts(tokenizer: TokenizerWrapper | None) -> bool:
    """Whether a tokenizer appends a token to each text. No model that continues texts has one."""
    if tokenizer is None:
        return False
    try:
        plain = list(tokenizer.encode("a", add_special_tokens=False))
        ended = list(tokenizer.encode("a"))
    except Exception:  # A tokenizer may raise anything.
        return False
    return bool(plain) and ended[-1:] != plain[-1:]


def _check_attention(path: Path, model: LanguageModel) -> None:
    """Refuse a decoder that was trained to attend to later tokens, too."""
    config = read_json_object(path / "config.json") if (path / "config.json").is_file() else {}
    for each in (config, config.get("text_config")):
        if isinstance(each, dict) and (
            each.get("use_bidirectional_attention") or each.get("is_causal") is False
        ):
            raise _refusal(model, "its tokens attend to later ones, and here to earlier ones only")


def _read_modules(path: Path, model: LanguageModel) -> list[str]:
    """The names of the modules of sentence-transformers, all of which are supported."""
    file = path / MODULES
    try:
        entries = json.loads(file.read_text(encoding="utf-8-sig"))
        modules = [
            (str(each["type"]).rpartition(".")[2], str(each.get("path", ""))) for each in entries
        ]
    except Exception as error:
        raise LoadError(f"[load] {file} can't be read: {reason(error)}") from error
    for name, folder in modules:
        if name not in _MODULES:
            raise _refusal(model, f"{file.name} has a {shown(name)}, which is not supported")
        if name == "Pooling":
            config = read_json_object(path / folder / "config.json")
            kinds = [config["pooling_mode"]] if "pooling_mode" in config else []
            kinds += [
                each.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
                for each, is_on in config.items()
                if each.startswith("pooling_mode_") and is_on is True
            ]
            _check_pooling([str(kind) for kind in kinds], model)
    return [name for name, _ in modules]


def _check_pooling(kinds: Iterable[str], model: LanguageModel) -> None:
    for kind in kinds:
        if kind != "lasttoken":
            raise _refusal(
                model, f"its pooling is {shown(kind)}, and only that of the last token is supported"
            )


def _read_prompts(config: dict[str, Any], file: Path) -> tuple[dict[str, str], str]:
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name") or ""
    if not (
        isinstance(prompts, dict)
        and all(isinstance(text, str) for text in prompts.values())
        and (default in prompts or default == "")
    ):
        raise LoadError(
            f"[load] prompts in {file} must be texts by their names, one of which is "
            f"default_prompt_name, got {shown(prompts)} and {shown(default)}"
        )
    return prompts, default


def _refusal(model: LanguageModel, words: str) -> ArgumentError:
    name = model.name or model_type_of(model)
    return ArgumentError(
        f"[embed] {name} can't give embeddings here: {words}; use a model such as Qwen3-Embedding"
    )


@dataclass(frozen=True)
class Reranker:
    """Scores documents for a query as Qwen3-Reranker does: by how much more likely "yes" is than
    "no" as the next token.

    Args:
        token_ids: of "no" and "yes".
    """

    tokenizer: TokenizerWrapper
    token_ids: tuple[int, int]

    def requests(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        instruction: str | None = None,
    ) -> list[tuple[list[int], PoolingParams]]:
        """The prompt and the parameters for each document. The K/V up to the document are shared:
        they stay in the prefix cache.

        Args:
            queries: one for all documents, or one for each.
            instruction: what makes a document relevant; ``None`` for a web search.

        Raises:
            ArgumentError: an argument has another type, or a text can't be encoded.
        """
        asked, answers = _texts("queries", queries), _texts("documents", documents)
        if isinstance(queries, str):
            asked *= len(answers)
        if len(asked) != len(answers):
            raise ArgumentError(
                f"[score] queries must be one text, or one for each of {len(answers)} documents, "
                f"got {len(asked)}",
                "queries",
            )
        before, after = self._encode(_BEFORE), self._encode(_AFTER)
        heads: dict[str, list[int]] = {}
        requests: list[tuple[list[int], PoolingParams]] = []
        for query, document in zip(asked, answers, strict=True):
            text = _ASKED.format(instruction=instruction or DEFAULT_INSTRUCTION, query=query)
            if text not in heads:
                heads[text] = self._encode(text)
            token_ids = self._encode(text + document)
            # The last tokens of what is asked may merge with the document.
            num_same = sum(1 for _ in takewhile(bool, map(eq, heads[text], token_ids)))
            pooling = PoolingParams(
                token_ids=self.token_ids, num_shared_tokens=len(before) + num_same
            )
            requests.append((before + token_ids + after, pooling))
        return requests

    def _encode(self, text: str) -> list[int]:
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # A tokenizer may raise anything.
            words = f"[score] the tokenizer can't encode a text: {reason(error)}"
            raise ArgumentError(words) from error


def _texts(name: str, given: object) -> list[str]:
    several = [given] if isinstance(given, str) else given
    if not is_sequence(several) or not all(isinstance(each, str) for each in several):
        raise ArgumentError(
            f"[score] {name} must be a text or a list of texts, got {shown(given)}", name
        )
    return list(several)


def score_of(logits: Sequence[float]) -> float:
    """The probability of "yes" of "yes" or "no", from the logits of "no" and "yes"."""
    no, yes = logits
    return 1 / (1 + math.exp(min(no - yes, 700)))


def read_reranker(
    model: LanguageModel, tokenizer: TokenizerWrapper | None, is_declared: bool = False
) -> Reranker:
    """How a model scores that is a Qwen3-Reranker: by its name, by ``classifier_from_token`` in its
    ``config.json`` as vLLM reads it, or by a module ``LogitScore`` of sentence-transformers.

    Args:
        is_declared: the user says that it is one.

    Raises:
        ArgumentError: it is none.
    """
    name = model.name or model_type_of(model)
    refusal = ArgumentError(
        f"[score] {name} gives no scores: of rerankers, only Qwen3-Reranker is supported, which is "
        'known by its name; for another name, use task="score"'
    )
    token_ids: list[int] = []
    if tokenizer is not None:
        for text in ("no", "yes"):
            token_ids += tokenizer.encode(text, add_special_tokens=False)
    is_one = (
        is_declared or _is_called(model, "qwen3-reranker") or _is_classifier(model.path, token_ids)
    )
    if tokenizer is None or len(token_ids) != 2 or not is_one:
        raise refusal
    return Reranker(tokenizer, (token_ids[0], token_ids[1]))


def _is_classifier(path: Path | None, token_ids: Sequence[int]) -> bool:
    """Whether a folder says that a model answers "yes" or "no"."""
    if path is None or not path.is_dir():
        return False
    config = read_json_object(path / "config.json") if (path / "config.json").is_file() else {}
    if config.get("classifier_from_token") == ["no", "yes"]:
        return True
    score = path / "1_LogitScore" / "config.json"
    if not score.is_file():
        return False
    ids = read_json_object(score)
    return [ids.get("false_token_id"), ids.get("true_token_id")] == list(token_ids)

"""The fields that say how an answer is sampled, as vLLM and the OpenAI interface name them."""

from __future__ import annotations

from typing import Any

from mlx_paged.argument_values import kind_of
from mlx_paged.domains import BOOL, Several
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.sampling_declarations import SAMPLING_PARAMS
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.server.errors import ApiError
from mlx_paged.server.fields import Fields
from mlx_paged.server.generations import api_error

MAX_COMPLETIONS = 128  # of one prompt, as with OpenAI
MAX_STOPS = 64  # each is looked for in each new piece of text
MAX_STOPS_LEN = 2**14  # characters of all of them
MAX_WORDS = 1000
MAX_WORDS_LEN = 2**16  # characters of all of them, which are encoded twice
_TEXTS = {"stop": (MAX_STOPS, MAX_STOPS_LEN), "bad_words": (MAX_WORDS, MAX_WORDS_LEN)}
MAX_TOKEN_IDS = 2**18  # the largest vocabularies have about as many

# What vLLM can do beside, and the only values that say what happens here.
_FIXED: dict[str, tuple[object, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
}


def read_sampling(fields: Fields, defaults: SamplingParams, **values: Any) -> SamplingParams:
    """How the answers to a body are sampled.

    Args:
        fields: those that are not about sampling stay unread.
        defaults: where nothing is said.
        values: parameters that the protocol writes in its own way, such as ``max_tokens``.

    Raises:
        ApiError: a value that can't be, named; 400.
    """
    values |= {
        name: _read(fields, name)
        for name, param in SAMPLING_PARAMS.items()
        if param.wire and fields.has(name)
    }
    for name, allowed in _FIXED.items():
        fields.only(name, *allowed)
    try:
        params = defaults.clone(**values)
    except ArgumentError as error:
        raise api_error(error) from error
    if params.n > MAX_COMPLETIONS:
        raise fields.error("n", f"must be at most {MAX_COMPLETIONS}, got {params.n}")
    fields.only("best_of", params.n)
    return params


def _read(fields: Fields, name: str) -> Any:
    """A field as ``SamplingParams`` takes it, which checks its value; lists have a limit here."""
    if name in _TEXTS:
        return fields.texts(name, *_TEXTS[name])
    if name == "logit_bias":
        return _read_logit_bias(fields)
    domain = SAMPLING_PARAMS[name].domain
    if isinstance(domain, Several):
        return fields.integers(name, MAX_TOKEN_IDS)
    return fields.boolean(name) if domain is BOOL else fields.raw(name)


def _read_logit_bias(fields: Fields) -> dict[int, float]:
    """Biases by token id. JSON writes the ids as texts."""
    value = fields.raw("logit_bias")
    if not isinstance(value, dict):
        raise fields.error("logit_bias", f"must be an object, got {kind_of(value)}")
    if len(value) > MAX_TOKEN_IDS:
        raise fields.error("logit_bias", f"must have at most {MAX_TOKEN_IDS:,} entries")
    biases = Fields(value, fields.name_of("logit_bias"))
    return {_token_id(name, biases): biases.number(name) for name in value if biases.has(name)}


def _token_id(name: str, biases: Fields) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 10):
        raise ApiError(
            400,
            f"{biases.path} must map token ids to numbers, got {shown(name)}",
            param=biases.path,
        )
    return int(name)

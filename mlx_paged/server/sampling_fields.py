"""The sampling fields of bodies, with the names of OpenAI's API and vLLM: the parameters of
:mod:`mlx_paged.sampling_declarations` that requests may set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, create_model

from mlx_paged.argument_values import Several
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.sampling_declarations import SAMPLING_PARAMS
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.server.generations import api_error
from mlx_paged.server.schemas import ONE_OR_MORE, Body, Filled, at_most, fixed, refused, short

MAX_COMPLETIONS = 128  # per prompt, as in OpenAI's API
MAX_STOPS = 64  # each new piece of text is searched for all of them
MAX_STOPS_LEN = 2**14  # characters in total
MAX_WORDS = 1000
MAX_WORDS_LEN = 2**16  # characters in total; they are encoded twice
MAX_TOKEN_IDS = 2**18  # about the size of the largest vocabularies

StopTexts = Annotated[list[Filled], at_most(MAX_STOPS), short(MAX_STOPS_LEN), ONE_OR_MORE]
TokenIds = Annotated[list[int], at_most(MAX_TOKEN_IDS)]
# The keys of JSON objects are texts.
_Biases = dict[str, float | None]
_TYPES = {
    "stop": StopTexts,
    "bad_words": Annotated[list[Filled], at_most(MAX_WORDS), short(MAX_WORDS_LEN), ONE_OR_MORE],
    "logit_bias": _Biases,
}


def _type_of(name: str) -> Any:
    """The type of a field. ``SamplingParams`` checks its range; lists are limited here."""
    domain = SAMPLING_PARAMS[name].domain
    return _TYPES.get(name) or (TokenIds if isinstance(domain, Several) else domain.parse)


class _SamplingFields(Body):
    # Further features of vLLM; only the values that describe what happens here are accepted.
    use_beam_search: Annotated[Any, fixed(False)] = None
    length_penalty: Annotated[Any, fixed(1, 1.0)] = None
    spaces_between_special_tokens: Annotated[Any, fixed(True)] = None
    best_of: int | None = None

    def sampling(
        self, defaults: SamplingParams, fields: Mapping[str, str] | None = None, **values: Any
    ) -> SamplingParams:
        """The sampling parameters.

        Args:
            defaults: used for parameters that are not given.
            fields: the fields that set parameters of other names.
            values: parameters that differ between protocols, such as ``max_tokens``.
        """
        values |= {
            name: getattr(self, name)
            for name, param in SAMPLING_PARAMS.items()
            if param.wire and name in self.model_fields_set
        }
        if "logit_bias" in values:
            values["logit_bias"] = _biases_of(values["logit_bias"])
        params = made_params(defaults, values, fields)
        if params.n > MAX_COMPLETIONS:
            raise refused("n", f"must be at most {MAX_COMPLETIONS}, got {params.n}")
        if self.best_of not in (None, params.n):
            raise refused("best_of", f"is not supported, got {self.best_of}; leave it out")
        return params


if TYPE_CHECKING:
    SamplingFields = _SamplingFields
else:
    SamplingFields = create_model(
        "SamplingFields",
        __base__=_SamplingFields,
        **{
            name: (_type_of(name), Field(None, description=param.help))
            for name, param in SAMPLING_PARAMS.items()
            if param.wire
        },
    )


def made_params(
    defaults: SamplingParams, values: dict[str, Any], fields: Mapping[str, str] | None = None
) -> SamplingParams:
    """``defaults`` with some values replaced.

    Args:
        fields: the client's fields by the names of the parameters that they set.

    Raises:
        ApiError: a value is invalid, alone or together with others.
    """
    try:
        return defaults.clone(**values)
    except ArgumentError as error:
        raise api_error(error, fields) from error


def _biases_of(biases: dict[str, float | None]) -> dict[int, float]:
    if len(biases) > MAX_TOKEN_IDS:
        raise refused("logit_bias", f"must have at most {MAX_TOKEN_IDS:,} entries")
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise refused("logit_bias", f"must map token ids to numbers, got {shown(name)}")
    return {int(name): bias for name, bias in biases.items() if bias is not None}

"""The fields of ``config.json`` for a decoder of this package, and their checks."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Self

from mlx_paged.errors import shown
from mlx_paged.options.argument_values import POSITIVE

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
# No model has more than a few hundred layers; building one with many more would take hours.
MAX_LAYERS = 1000
MAX_SIZE = 2**31 - 1  # of a dimension in MLX
MAX_NUMBER = 3.4e38  # of float32

LAYER_TYPES = ("full_attention", "sliding_attention")

# The numbers that kinds of RoPE scaling read.
SCALING_NUMBERS = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
)


class DecoderArgs:
    """The base of a model's ``ModelArgs``, a dataclass with these fields and its own, whose
    ``__post_init__`` calls :meth:`check`.
    """

    family: ClassVar[str]  # the prefix of messages, in brackets

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope_theta: float | None
    rope_scaling: dict[str, Any] | None
    rope_parameters: dict[str, Any] | None
    use_sliding_window: bool
    sliding_window: int | None
    max_window_layers: int
    layer_types: list[str] | None

    def check(self) -> None:
        """Check all fields, and take ``rope_theta`` and ``rope_scaling`` from ``rope_parameters``
        if they are nested there.

        Raises:
            ValueError: names the invalid field.
        """
        self._check_sizes()
        self._check_windows()
        # transformers >= 5 nests rope_theta and the scaling under rope_parameters.
        if self.rope_parameters:
            if self.rope_theta is None:
                self.rope_theta = self.rope_parameters.get("rope_theta")
            if self.rope_scaling is None:
                self.rope_scaling = self.rope_parameters
        if self.rope_theta is None:
            raise ValueError(f"[{self.family}] config.json has no rope_theta")
        _check_number(self.family, "rope_theta", self.rope_theta)
        _check_number(self.family, "rms_norm_eps", self.rms_norm_eps)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"[{self.family}] {self.num_attention_heads} query heads are not a multiple of "
                f"{self.num_key_value_heads} KV heads"
            )
        _check_scaling(self.family, self.rope_scaling or {})

    def _check_sizes(self) -> None:
        for name in (*SIZES, "max_position_embeddings"):
            limit = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
            value = getattr(self, name)
            POSITIVE.check(self.family, f"{name} in config.json", value)
            if value > limit:
                raise ValueError(
                    f"[{self.family}] {name} in config.json must be at most {limit:,}, "
                    f"got {shown(value)}"
                )
        for name in ("rope_scaling", "rope_parameters"):
            if not isinstance(getattr(self, name), dict | None):
                raise ValueError(
                    f"[{self.family}] {name} in config.json must be an object, "
                    f"got {shown(getattr(self, name))}"
                )
        for name in ("tie_word_embeddings", "use_sliding_window"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"[{self.family}] {name} in config.json must be true or false, "
                    f"got {shown(getattr(self, name))}"
                )

    def _check_windows(self) -> None:
        if self.use_sliding_window:
            POSITIVE.check(self.family, "sliding_window in config.json", self.sliding_window)
        number = self.max_window_layers
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ValueError(
                f"[{self.family}] max_window_layers in config.json must be a whole number, "
                f"at least 0, got {shown(number)}"
            )
        types = self.layer_types
        if types is None:
            return
        if not isinstance(types, list) or len(types) != self.num_hidden_layers:
            raise ValueError(
                f"[{self.family}] layer_types in config.json must have an entry for each of "
                f"{self.num_hidden_layers} layers, got {shown(types)}"
            )
        for kind in types:
            if kind not in LAYER_TYPES:
                raise ValueError(
                    f"[{self.family}] layer_types in config.json must be of "
                    f"{', '.join(LAYER_TYPES)}, got {shown(kind)}"
                )
        if "sliding_attention" in types and not self.use_sliding_window:
            raise ValueError(
                f"[{self.family}] layer_types in config.json has sliding_attention, and "
                "use_sliding_window is not set"
            )

    @property
    def windows(self) -> list[int | None]:
        """Per layer, the number of tokens that a query attends to, itself included; ``None`` for
        all.
        """
        types = self.layer_types
        if types is None:
            num_full = self.max_window_layers if self.use_sliding_window else self.num_hidden_layers
            types = [LAYER_TYPES[index >= num_full] for index in range(self.num_hidden_layers)]
        return [self.sliding_window if kind == LAYER_TYPES[1] else None for kind in types]

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Take the known fields; raises ``ValueError`` with the names of missing ones."""
        parameters = inspect.signature(cls).parameters
        missing = [
            n
            for n, p in parameters.items()
            if p.default is inspect.Parameter.empty and n not in config
        ]
        if missing:
            raise ValueError(f"[{cls.family}] config.json lacks {', '.join(missing)}")
        return cls(**{name: config[name] for name in parameters if name in config})


def _check_scaling(family: str, scaling: dict[str, Any]) -> None:
    """Refuse unsupported kinds of RoPE scaling and invalid numbers."""
    kind = scaling.get("type") or scaling.get("rope_type")
    if not isinstance(kind, str | None):
        raise ValueError(
            f"[{family}] the type of rope_scaling in config.json must be a text, got {shown(kind)}"
        )
    if kind == "dynamic":
        # Its frequencies depend on the sequence's length, and a packed batch has many sequences.
        raise ValueError(
            f"[{family}] rope scaling 'dynamic' is not supported; yarn, linear, llama3 and "
            "longrope are"
        )
    for name in SCALING_NUMBERS:
        if scaling.get(name) is not None:
            _check_number(family, f"{name} of rope_scaling", scaling[name])


def _check_number(family: str, name: str, value: object) -> None:
    # A config.json may hold Infinity and NaN, and integers of any length.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < MAX_NUMBER:
        raise ValueError(
            f"[{family}] {name} in config.json must be a finite number above 0, got {shown(value)}"
        )

"""What a program says to its user on stderr."""

from __future__ import annotations

import warnings

from mlx_paged.standard_streams import warnings_as_lines


def test_a_warning_is_a_line_without_a_place_in_the_code():
    said: list[str] = []
    before = warnings.showwarning
    with warnings_as_lines(said.append):
        warnings.warn("[load] 4 tensors are\n quantised once more", stacklevel=1)
    assert said == ["[load] 4 tensors are quantised once more"]
    assert warnings.showwarning is before

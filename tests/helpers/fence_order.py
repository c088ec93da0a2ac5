"""Whether the fences of recorded kernel calls order every pair that must not change places.

MLX orders two kernel calls only if one binds what the other made, directly or through calls
between. The slabs are inputs of all of them, so MLX sees no dependency there: the fences have to
make one for each read after a write, write after a read and write after a write.
"""

from __future__ import annotations

from collections.abc import Sequence

from metal_emulator.checks import Call

KEY_SLABS = ("key_slab", "key_scales", "key_biases")
READERS = {
    *("paged_attention", "paged_attention_affine"),
    *("gather_blocks", "dequantize_blocks", "copy_blocks"),
}
WRITERS = {"reshape_and_cache", "encode_and_cache", "paged_attention", "copy_blocks"}


def disorders(trace: Sequence[Call]) -> list[str]:
    """One line for each pair of calls on one slab that nothing orders, the earlier call first."""
    ancestors: list[set[int]] = []
    made_by: dict[
        int, int
    ] = {}  # id of an output array: the call; the trace keeps the arrays alive
    calls_on: dict[int, list[int]] = {}  # address of a part of the key slabs: the calls so far
    found = []
    for number, call in enumerate(trace):
        parents = {made_by[id(array)] for array in call.inputs.values() if id(array) in made_by}
        ancestors.append(parents.union(*(ancestors[parent] for parent in parents)))
        made_by.update((id(array), number) for array in call.outputs.values())
        slabs = [call.addresses[name] for name in KEY_SLABS if name in call.addresses]
        for earlier in sorted({earlier for slab in slabs for earlier in calls_on.get(slab, ())}):
            conflict = _conflict(trace[earlier], call)
            if conflict and earlier not in ancestors[number]:
                found.append(
                    f"call {number} ({_name(call)}) is not behind call {earlier} "
                    f"({_name(trace[earlier])}): {conflict}"
                )
        for slab in slabs:
            calls_on.setdefault(slab, []).append(number)
    return found


def _conflict(earlier: Call, later: Call) -> str | None:
    if _writes(earlier) and _writes(later):
        return "write after write"
    if _writes(earlier) and _name(later) in READERS:
        return "read after write"
    if _name(earlier) in READERS and _writes(later):
        return "write after read"
    return None


def _writes(call: Call) -> bool:
    # Attention writes only where its plan says that it gets the rows of new tokens.
    return _name(call) in WRITERS and (
        "plan" not in call.inputs or call.inputs["plan"][2].item() == 1
    )


def _name(call: Call) -> str:
    return call.kernel.removeprefix("mlx_paged_")

"""A realistic kernel: decode attention over a paged slab, held against the formula in float64."""

import mlx.core as mx
import numpy as np
import pytest
from kernel_helpers import to_numpy
from metal_emulator import Checks, OrderDependence, metal_kernel

pytestmark = pytest.mark.usefixtures("compiler")

HEAD_DIM, BLOCK_SIZE, NUM_KV_HEADS, GROUP = 128, 16, 2, 3
SIMDGROUPS = 4

# One threadgroup per (sequence, KV head). Each simdgroup walks every fourth key, a lane holds four
# of the head's 128 dimensions, and the simdgroups' partial softmaxes are merged through threadgroup
# memory.
BODY = """
    const int seq = threadgroup_position_in_grid.y, kv_head = threadgroup_position_in_grid.x;
    const int lane = thread_index_in_simdgroup, warp = simdgroup_index_in_threadgroup;
    const int num_heads = NUM_KV_HEADS * GROUP, context_len = context_lens[seq];
    const device T* block_base[2] = {key_slab, value_slab};

    threadgroup float row_max[SIMDGROUPS][GROUP], row_sum[SIMDGROUPS][GROUP];
    threadgroup float4 partial[SIMDGROUPS][GROUP][32];

    // Load the queries of the group.
    float4 q[GROUP], acc[GROUP];
    float highest[GROUP], total[GROUP];
    for (int g = 0; g < GROUP; g++) {
      const int head = kv_head * GROUP + g;
      const size_t start = (size_t(seq) * num_heads + head) * 128;
      const device vec<T, 4>* row = (const device vec<T, 4>*)(queries + start);
      q[g] = float4(row[lane]) * scale;
      acc[g] = 0; highest[g] = -INFINITY; total[g] = 0;
    }

    // Walk the keys.
    for (int token = warp; token < context_len; token += SIMDGROUPS) {
      const int block = block_tables[seq * block_tables_shape[1] + token / BLOCK_SIZE];
      const size_t row_block = size_t(block) * NUM_KV_HEADS + kv_head;
      const size_t slot = row_block * BLOCK_SIZE + token % BLOCK_SIZE;
      const size_t offset = slot * 128;
      const float4 k = float4(((const device vec<T, 4>*)(block_base[0] + offset))[lane]);
      const float4 v = float4(((const device vec<T, 4>*)(block_base[1] + offset))[lane]);
      for (int g = 0; g < GROUP; g++) {
        const float score = simd_sum(dot(q[g], k));
        const float now_highest = max(highest[g], score);
        const float factor = fast::exp(highest[g] - now_highest);
        const float weight = fast::exp(score - now_highest);
        acc[g] = acc[g] * factor + v * weight;
        total[g] = total[g] * factor + weight;
        highest[g] = now_highest;
      }
    }

    // Merge the simdgroups.
    for (int g = 0; g < GROUP; g++) {
      partial[warp][g][lane] = acc[g];
      if (lane == 0) { row_max[warp][g] = highest[g]; row_sum[warp][g] = total[g]; }
    }
    BARRIER
    if (warp < GROUP) {
      float top = -INFINITY, sum = 0;
      float4 o = 0;
      for (int w = 0; w < SIMDGROUPS; w++) top = max(top, row_max[w][warp]);
      for (int w = 0; w < SIMDGROUPS; w++) {
        const float factor = fast::exp(row_max[w][warp] - top);
        sum += row_sum[w][warp] * factor;
        o += partial[w][warp][lane] * factor;
      }
      const size_t start = (size_t(seq) * num_heads + kv_head * GROUP + warp) * 128;
      device vec<T, 4>* row = (device vec<T, 4>*)(out + start);
      row[lane] = vec<T, 4>(o / sum);
    }
"""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


class Problem:
    def __init__(self, context_lens: list[int], dtype: mx.Dtype, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.dtype, self.context_lens = dtype, context_lens
        self.num_blocks = sum(-(-n // BLOCK_SIZE) for n in context_lens) + 3
        slab_shape = (self.num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.k, self.v = (
            mx.array(rng.normal(size=slab_shape).astype(np.float32)).astype(dtype) for _ in range(2)
        )
        q_shape = (len(context_lens), NUM_KV_HEADS * GROUP, HEAD_DIM)
        self.q = mx.array(rng.normal(size=q_shape).astype(np.float32)).astype(dtype)
        blocks = iter(rng.permutation(self.num_blocks).tolist())
        self.tables = [[next(blocks) for _ in range(-(-n // BLOCK_SIZE))] for n in context_lens]

    def run(self, body: str, checks: Checks | None = None) -> mx.array:
        widest = max(map(len, self.tables))
        # An id that no slab has fills the tables up, so a kernel that follows it is caught.
        padded = [table + [2**20] * (widest - len(table)) for table in self.tables]
        kernel = metal_kernel(
            "mini_attention",
            ["queries", "key_slab", "value_slab", "block_tables", "context_lens", "scale"],
            ["out"],
            body,
            checks=checks,
        )
        (out,) = kernel(
            inputs=[self.q, self.k, self.v, mx.array(padded), mx.array(self.context_lens),
                    HEAD_DIM**-0.5],
            template=[("T", self.dtype), ("BLOCK_SIZE", BLOCK_SIZE),
                      ("NUM_KV_HEADS", NUM_KV_HEADS), ("GROUP", GROUP),
                      ("SIMDGROUPS", SIMDGROUPS)],
            grid=(NUM_KV_HEADS * 32 * SIMDGROUPS, len(self.context_lens), 1),
            threadgroup=(32 * SIMDGROUPS, 1, 1),
            output_shapes=[self.q.shape],
            output_dtypes=[self.dtype],
        )  # fmt: skip
        return out

    def expected(self) -> np.ndarray:
        out = np.empty(self.q.shape)
        q, slab_k, slab_v = (to_numpy(a).astype(np.float64) for a in (self.q, self.k, self.v))
        for seq, (table, length) in enumerate(zip(self.tables, self.context_lens, strict=True)):
            for head in range(NUM_KV_HEADS * GROUP):
                k = slab_k[table, head // GROUP].reshape(-1, HEAD_DIM)[:length]
                v = slab_v[table, head // GROUP].reshape(-1, HEAD_DIM)[:length]
                scores = k @ q[seq, head] * HEAD_DIM**-0.5
                weights = np.exp(scores - scores.max())
                out[seq, head] = weights @ v / weights.sum()
        return out


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_paged_attention_matches_the_formula(dtype):
    problem = Problem([1, 4, 15, 16, 17, 100], dtype)
    error = np.abs(
        to_numpy(problem.run(BODY.replace("BARRIER", BARRIER))) - problem.expected()
    ).max()
    # Outputs stay below 4, so half a step of the dtype's last bit is the rounding of the output;
    # the rest is float32.
    assert error <= {mx.float32: 0, mx.float16: 2**-10, mx.bfloat16: 2**-7}[dtype] + 2e-6


def test_paged_attention_without_its_barrier_is_caught():
    with pytest.raises(OrderDependence, match="row_max, which no thread has written"):
        Problem([17, 40], mx.float32).run(BODY.replace("BARRIER", ""))


def test_a_sequence_has_the_same_bits_in_any_company():
    together = Problem([9, 50, 3], mx.float32)
    out = together.run(BODY.replace("BARRIER", BARRIER))
    alone = Problem([9, 50, 3], mx.float32)
    alone.q, alone.tables, alone.context_lens = together.q[1:2], together.tables[1:2], [50]
    assert mx.array_equal(alone.run(BODY.replace("BARRIER", BARRIER)), out[1:2])

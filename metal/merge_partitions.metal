// Merges the partitions of each query row: the second half of paged_attention for long contexts.
//
// template   T (element of out), HEAD_DIM
// inputs     partials              float [num_partial_rows, num_heads, HEAD_DIM + 4]: values, highest
//                                  score in base 2, sum, 0, 0
//            plan                  int [...], laid out by ops/attention_plan.py
//            sinks                 float [max(num_heads, 8)], LOWEST for none
// outputs    out                   T [num_tokens, num_heads, HEAD_DIM]
// grid       (SIMDGROUP_LANES * MERGE_STREAMS, num_heads, num_tokens),
//            threadgroup (all of the first, 1, 1)

constexpr int VECTORS = (HEAD_DIM + 127) / 128;
constexpr int WIDTH = HEAD_DIM + 4;

const int lane = thread_index_in_simdgroup;
const int stream = simdgroup_index_in_threadgroup;
const int head = threadgroup_position_in_grid.y;
const int num_heads = threadgroups_per_grid.y;
const int token = threadgroup_position_in_grid.z;

const device int* row = plan + plan[PLAN_ROWS] + token * ROW_FIELDS;
const int num_partitions = row[ROW_NUM_PARTITIONS];
const int stride = row[ROW_STRIDE];
const int first = row[ROW_FIRST_PARTIAL];

// Find the highest score.
float highest = LOWEST;
for (int p = lane; p < num_partitions; p += SIMDGROUP_LANES) {
  highest =
      max(highest, partials[packed_row<WIDTH>(first + p * stride, head, num_heads) + HEAD_DIM]);
}
highest = simd_max(highest);

// Add up every MERGE_STREAMS'th partition.
float4 acc[VECTORS];
float sum = 0;
UNROLL
for (int v = 0; v < VECTORS; v++) {
  acc[v] = float4(0);
}
for (int p = stream; p < num_partitions; p += MERGE_STREAMS) {
  const device float* partial = partials + packed_row<WIDTH>(first + p * stride, head, num_heads);
  const float share = fast::exp2(partial[HEAD_DIM] - highest);
  sum = fma(partial[HEAD_DIM + 1], share, sum);
  UNROLL
  for (int v = 0; v < VECTORS; v++) {
    const int c = lane + v * SIMDGROUP_LANES;
    if (c < HEAD_DIM / 4) {
      acc[v] = fma(((const device float4*)partial)[c], float4(share), acc[v]);
    }
  }
}

// Combine the streams and store the row.
threadgroup float stream_sum[MERGE_STREAMS];
threadgroup float4 stream_acc[MERGE_STREAMS * VECTORS * SIMDGROUP_LANES];
if (lane == 0) {
  stream_sum[stream] = sum;
}
UNROLL
for (int v = 0; v < VECTORS; v++) {
  stream_acc[(stream * VECTORS + v) * SIMDGROUP_LANES + lane] = acc[v];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (stream == 0) {
  for (int s = 1; s < MERGE_STREAMS; s++) {
    sum += stream_sum[s];
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
      acc[v] += stream_acc[(s * VECTORS + v) * SIMDGROUP_LANES + lane];
    }
  }
  const float norm = softmax_norm(highest, sum, sinks[head]);
  device vec<T, 4>* to = (device vec<T, 4>*)(out + packed_row<HEAD_DIM>(token, head, num_heads));
  UNROLL
  for (int v = 0; v < VECTORS; v++) {
    const int c = lane + v * SIMDGROUP_LANES;
    if (c < HEAD_DIM / 4) {
      to[c] = vec<T, 4>(acc[v] * norm);
    }
  }
}

// Attention of decodes and short query runs over block tables: one threadgroup per (partition of a
// sequence, KV head).
//
// Each K/V row that a query may see is loaded once, for all query rows of its KV head: the query
// heads of the group, for each token of the run. The newest rows come from the inputs and are
// written into their slots on the way, so that no dispatch reads a slot that it writes. Online
// softmax in float (Milakov and Gimelshein, 2018), cut into partitions as in Flash-Decoding (Dao et
// al., 2023).
//
// template   T (element), Out (T, or float for partials), HEAD_DIM, BLOCK_SIZE,
//            GROUP (query heads per KV head), RUN (query tokens per sequence, at most),
//            STREAMS (chunks of keys in flight),
//            ROW_SPLITS (simdgroups that share the rows of a chunk),
//            PARTIAL (whether merge_partitions follows)
// inputs     queries               T [num_tokens, num_heads, HEAD_DIM]
//            key_slab, value_slab  T [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM], written
//            key_rows, value_rows  T [num_tokens, num_kv_heads, HEAD_DIM], or anything if no rows come
//                                  from inputs
//            plan                  int [...], laid out by ops/attention_plan.py
//            sinks                 float [max(num_heads, 8)], LOWEST for none
//            softmax_scale         float
//            fence_in              int [8]
// outputs    out                   T [num_tokens, num_heads, HEAD_DIM], or the partials: float
//                                  [num_partial_rows, num_heads, HEAD_DIM + 4]: values, highest score,
//                                  sum, 0, 0
//            fence_out             int [8]
// grid       (SIMD_SIZE * STREAMS * ROW_SPLITS, num_kv_heads, num_partitions),
//            threadgroup (all of the first, 1, 1)

using Vec = vec<T, 4>;
// A key lies over LANES lanes, VECTORS vectors of four elements in each; a lane holds KEYS keys of
// a chunk.
constexpr int LANES = HEAD_DIM > 64 ? 32 : HEAD_DIM / 4;
constexpr int VECTORS = (HEAD_DIM + 127) / 128;
constexpr int KEYS = LANES / 4;
constexpr int SUBGROUPS = SIMD_SIZE / LANES;
// Query rows of each simdgroup: row r is query token r / GROUP of the run, head r % GROUP of the
// group.
constexpr int ROWS = (RUN * GROUP + ROW_SPLITS - 1) / ROW_SPLITS;
// Vectors of a chunk that each lane loads.
constexpr int ROW_VECTORS = LANES * VECTORS;
constexpr int LOADERS = SIMD_SIZE * ROW_SPLITS;
constexpr int LOADS = (CHUNK_SIZE * ROW_VECTORS + LOADERS - 1) / LOADERS;
constexpr bool SHARED = ROW_SPLITS > 1;

const int lane = thread_index_in_simdgroup;
const int stream = simdgroup_index_in_threadgroup / ROW_SPLITS;
const int split = simdgroup_index_in_threadgroup % ROW_SPLITS;
const int lane_in_stream = split * SIMD_SIZE + lane;
const int column = lane % LANES;
const int subgroup = lane / LANES;
const int kv_head = threadgroup_position_in_grid.y;
const int num_kv_heads = threadgroups_per_grid.y;
const int num_heads = num_kv_heads * GROUP;

if (threadgroup_position_in_grid.y == 0 && threadgroup_position_in_grid.z == 0) {
  pass_fence(fence_in, fence_out, thread_index_in_threadgroup);
}

// Read the plan.
const int window = plan[PLAN_WINDOW];
const device int* work = plan + plan[PLAN_WORK] + threadgroup_position_in_grid.z * WORK_FIELDS;
const device int* seq = plan + plan[PLAN_SEQS] + work[WORK_SEQ] * SEQ_FIELDS;
const int context_len = seq[SEQ_CONTEXT_LEN];
const int query_len = seq[SEQ_QUERY_LEN];
const int first_row = seq[SEQ_FIRST_ROW];
const int first_query = context_len - query_len;
const int partition_begin = work[WORK_PARTITION] * PARTITION_SIZE;
const int begin = max(partition_begin, first_query - window + 1);
const int end = min(partition_begin + PARTITION_SIZE, context_len);
const int num_rows = query_len * GROUP - split * ROWS;

Source<T, BLOCK_SIZE, HEAD_DIM> keys = {
    key_slab, key_rows, begin, end, plan[PLAN_HAS_ROWS] ? first_query : context_len, first_row,
    kv_head, num_kv_heads};
Source<T, BLOCK_SIZE, HEAD_DIM> values = keys;
values.slab = value_slab;
values.rows = value_rows;
const device int* block_table = plan + seq[SEQ_BLOCKS];

// Load and scale the queries.
float4 query[ROWS][VECTORS], acc[ROWS][VECTORS];
float highest[ROWS], sum[ROWS], factor[ROWS], weight[ROWS];
UNROLL
for (int i = 0; i < ROWS; i++) {
  const int row = split * ROWS + i;
  const int head = kv_head * GROUP + row % GROUP;
  highest[i] = LOWEST;
  sum[i] = 0;
  UNROLL
  for (int v = 0; v < VECTORS; v++) {
    const int c = column + v * SIMD_SIZE;
    query[i][v] = float4(0);
    acc[i][v] = float4(0);
    if (i < num_rows && c < HEAD_DIM / 4) {
      const size_t from = packed_row<HEAD_DIM>(first_row + row / GROUP, head, num_heads);
      query[i][v] = float4(((const device Vec*)(queries + from))[c]) * softmax_scale;
    }
  }
}

// Walk the chunks; loads run one step ahead of their use.
constexpr int TILE_VECTORS = SHARED ? STREAMS * CHUNK_SIZE * ROW_VECTORS : 0;
constexpr int STREAM_ROWS = STREAMS > 1 ? STREAMS * ROW_SPLITS : 0;
constexpr int TILE_BYTES = 2 * TILE_VECTORS * sizeof(Vec);
constexpr int STREAM_BYTES = 2 * STREAM_ROWS * ROW_VECTORS * sizeof(float4);
// Chunks that are shared while the keys are walked, then rows of other streams: never both at a
// time.
constexpr int SCRATCH_BYTES = TILE_BYTES > STREAM_BYTES ? TILE_BYTES : STREAM_BYTES;
threadgroup float4 scratch[SCRATCH_BYTES / sizeof(float4) + 1];
threadgroup Vec* key_tile = (threadgroup Vec*)scratch + stream * CHUNK_SIZE * ROW_VECTORS;
threadgroup Vec* value_tile = key_tile + TILE_VECTORS;
Vec key_loads[LOADS], value_loads[LOADS];
int chunk_begin = (begin / CHUNK_SIZE + stream) * CHUNK_SIZE;
const int num_rounds =
    ((end + CHUNK_SIZE - 1) / CHUNK_SIZE - begin / CHUNK_SIZE + STREAMS - 1) / STREAMS;
int block_id = chunk_begin < end ? block_table[chunk_begin / BLOCK_SIZE] : 0;
UNROLL
for (int n = 0; n < LOADS; n++) {
  const int index = lane_in_stream + n * LOADERS;
  const int position = chunk_begin + index / ROW_VECTORS;
  key_loads[n] =
      keys.load(block_id, position, index % ROW_VECTORS, index < CHUNK_SIZE * ROW_VECTORS);
  value_loads[n] =
      values.load(block_id, position, index % ROW_VECTORS, index < CHUNK_SIZE * ROW_VECTORS);
}

for (int round = 0; round < num_rounds; round++) {
  if (SHARED) {
    // Share the chunk among the simdgroups of the stream.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL
    for (int n = 0; n < LOADS; n++) {
      const int index = lane_in_stream + n * LOADERS;
      if (index < CHUNK_SIZE * ROW_VECTORS) {
        key_tile[index] = key_loads[n];
        value_tile[index] = value_loads[n];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // This lane's part of the chunk, once for all of its rows.
  Vec chunk[KEYS * VECTORS];
  UNROLL
  for (int j = 0; j < KEYS; j++) {
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
      if (SHARED) {
        chunk[j * VECTORS + v] =
            key_tile[(j * SUBGROUPS + subgroup) * ROW_VECTORS + column + v * SIMD_SIZE];
      } else {
        chunk[j * VECTORS + v] = key_loads[j * VECTORS + v];
      }
    }
  }

  // Score the keys. Key number j of this lane is key j * SUBGROUPS + subgroup of the chunk.
  const int position = chunk_begin + column / 4 * SUBGROUPS + subgroup;
  UNROLL
  for (int i = 0; i < ROWS; i++) {
    if (i < num_rows) {
      float scores[KEYS];
      UNROLL
      for (int j = 0; j < KEYS; j++) {
        scores[j] = 0;
        UNROLL
        for (int v = 0; v < VECTORS; v++) {
          scores[j] += dot(query[i][v], float4(chunk[j * VECTORS + v]));
        }
      }
      const float score = sum_over_lanes<LANES>(scores, lane);
      const int query_position = first_query + (split * ROWS + i) / GROUP;
      const bool visible =
          position < end && position <= query_position && position > query_position - window;

      // Update the maximum and the sum; what was accumulated so far shrinks by the factor.
      const float top = max(highest[i], max_over_quads(visible ? score : LOWEST));
      factor[i] = fast::exp(highest[i] - top);
      weight[i] = visible ? fast::exp(score - top) : 0;
      sum[i] = fma(sum[i], factor[i], weight[i]);
      highest[i] = top;
    }
  }

  // Load the keys of the next chunk while the values are used.
  const int next_begin = chunk_begin + STREAMS * CHUNK_SIZE;
  const int next_block_id = next_begin < end ? block_table[next_begin / BLOCK_SIZE] : 0;
  UNROLL
  for (int n = 0; n < LOADS; n++) {
    const int index = lane_in_stream + n * LOADERS;
    const int next = next_begin + index / ROW_VECTORS;
    key_loads[n] =
        keys.load(next_block_id, next, index % ROW_VECTORS, index < CHUNK_SIZE * ROW_VECTORS);
  }

  // Update the accumulators. The values of the chunk take the registers of its keys.
  UNROLL
  for (int j = 0; j < KEYS; j++) {
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
      if (SHARED) {
        chunk[j * VECTORS + v] =
            value_tile[(j * SUBGROUPS + subgroup) * ROW_VECTORS + column + v * SIMD_SIZE];
      } else {
        chunk[j * VECTORS + v] = value_loads[j * VECTORS + v];
      }
    }
  }
  UNROLL
  for (int i = 0; i < ROWS; i++) {
    if (i < num_rows) {
      UNROLL
      for (int v = 0; v < VECTORS; v++) {
        acc[i][v] *= factor[i];
      }
      UNROLL
      for (int j = 0; j < KEYS; j++) {
        const float key_weight = simd_shuffle(weight[i], subgroup * LANES + j * 4);
        UNROLL
        for (int v = 0; v < VECTORS; v++) {
          acc[i][v] = fma(float4(key_weight), float4(chunk[j * VECTORS + v]), acc[i][v]);
        }
      }
    }
  }

  // Load the values of the next chunk.
  UNROLL
  for (int n = 0; n < LOADS; n++) {
    const int index = lane_in_stream + n * LOADERS;
    const int next = next_begin + index / ROW_VECTORS;
    value_loads[n] =
        values.load(next_block_id, next, index % ROW_VECTORS, index < CHUNK_SIZE * ROW_VECTORS);
  }
  chunk_begin = next_begin;
}

// Sum over the lanes that held different keys.
UNROLL
for (int i = 0; i < ROWS; i++) {
  sum[i] = sum_over_quads(sum[i]);
  UNROLL
  for (int v = 0; v < VECTORS; v++) {
    UNROLL
    for (int distance = LANES; distance < SIMD_SIZE; distance *= 2) {
      UNROLL
      for (int e = 0; e < 4; e++) {
        acc[i][v][e] += simd_shuffle_xor(acc[i][v][e], distance);
      }
    }
  }
}

// Combine the streams row by row, each row by another stream, in two turns of shared memory.
threadgroup float stream_highest[STREAM_ROWS * ROWS + 1], stream_sum[STREAM_ROWS * ROWS + 1];
if (SHARED && STREAMS > 1) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
UNROLL
for (int i = 0; i < ROWS; i++) {
  const int turn = i % 2 * STREAM_ROWS;
  if (STREAMS > 1) {
    const int mine = stream * ROW_SPLITS + split;
    if (lane == 0) {
      stream_highest[mine * ROWS + i] = highest[i];
      stream_sum[mine * ROWS + i] = sum[i];
    }
    if (subgroup == 0) {
      UNROLL
      for (int v = 0; v < VECTORS; v++) {
        scratch[(turn + mine) * ROW_VECTORS + column + v * SIMD_SIZE] = acc[i][v];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (stream == i % STREAMS && i < num_rows) {
    if (STREAMS > 1) {
      UNROLL
      for (int s = 0; s < STREAMS; s++) {
        highest[i] = max(highest[i], stream_highest[(s * ROW_SPLITS + split) * ROWS + i]);
      }
      sum[i] = 0;
      UNROLL
      for (int v = 0; v < VECTORS; v++) {
        acc[i][v] = float4(0);
      }
      UNROLL
      for (int s = 0; s < STREAMS; s++) {
        const int other = s * ROW_SPLITS + split;
        const float share = fast::exp(stream_highest[other * ROWS + i] - highest[i]);
        sum[i] = fma(stream_sum[other * ROWS + i], share, sum[i]);
        UNROLL
        for (int v = 0; v < VECTORS; v++) {
          const float4 part = scratch[(turn + other) * ROW_VECTORS + column + v * SIMD_SIZE];
          acc[i][v] = fma(part, float4(share), acc[i][v]);
        }
      }
    }

    // Store the row, or its partial.
    const int row = split * ROWS + i;
    const int head = kv_head * GROUP + row % GROUP;
    const int out_row = work[WORK_FIRST_OUT_ROW] + row / GROUP;
    constexpr int OUT_WIDTH = PARTIAL ? HEAD_DIM + 4 : HEAD_DIM;
    device vec<Out, 4>* to =
        (device vec<Out, 4>*)(out + packed_row<OUT_WIDTH>(out_row, head, num_heads));
    const float norm = PARTIAL ? 1 : softmax_norm(highest[i], sum[i], sinks[head]);
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
      const int c = column + v * SIMD_SIZE;
      if (subgroup == 0 && c < HEAD_DIM / 4) {
        to[c] = vec<Out, 4>(acc[i][v] * norm);
      }
    }
    if (PARTIAL && lane == 0) {
      to[HEAD_DIM / 4] = vec<Out, 4>(float4(highest[i], sum[i], 0, 0));
    }
  }
}

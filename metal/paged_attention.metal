// Attention of decodes and short query runs over block tables: one threadgroup per (partition of a
// sequence, KV head), or several where the KV head has more query rows than one holds.
//
// A query row is one query head of the group for one token of the run. A simdgroup keeps up to four
// rows in registers and walks chunks of keys; the simdgroups of a threadgroup take other chunks
// (streams) or other rows of the same chunk (row splits), which come from the cache. The newest K/V
// rows come from the inputs and are written into their slots, so that no dispatch reads a slot that
// it writes. Online softmax in float and base 2 (Milakov and Gimelshein, 2018), cut into partitions
// as in Flash-Decoding (Dao et al., 2023).
//
// template   T (element), Out (T, or float for partials), HEAD_DIM, BLOCK_SIZE,
//            GROUP (query heads per KV head), RUN (query tokens per sequence, at most),
//            STREAMS (simdgroups that walk different chunks),
//            ROW_SPLITS (simdgroups that walk the same chunks for different rows),
//            ROW_PARTS (threadgroups that do),
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
//                                  [num_partial_rows, num_heads, HEAD_DIM + 4]: values, highest score
//                                  in base 2, sum, 0, 0
//            fence_out             int [8]
// grid       (SIMD_SIZE * STREAMS * ROW_SPLITS, num_kv_heads * ROW_PARTS, num_partitions),
//            threadgroup (all of the first, 1, 1)

using Elements = Packed<T>;
using Load = typename Elements::Load;
// A row lies over LANES lanes, LOADS loads in each; the last lanes have none of it where it is not
// EVEN.
constexpr int PARTS = 4 / sizeof(T);  // float4s of a load
constexpr int ROW_LOADS = HEAD_DIM / (4 * PARTS);
constexpr int LANES = ROW_LOADS > 16 ? 32 : ROW_LOADS > 8 ? 16 : ROW_LOADS > 4 ? 8 : 4;
constexpr int LOADS = (ROW_LOADS + LANES - 1) / LANES;
constexpr bool EVEN = LOADS * LANES == ROW_LOADS;
constexpr int UNITS = LOADS * PARTS;  // float4s of a row in each lane
// A chunk is a step or several of one key per subgroup of LANES lanes, and lies in one block.
constexpr int SUBGROUPS = SIMD_SIZE / LANES;
constexpr int STEPS = BLOCK_SIZE / SUBGROUPS > 4 ? 4 : BLOCK_SIZE / SUBGROUPS;
constexpr int CHUNK_SIZE = STEPS * SUBGROUPS;
constexpr int SIMDGROUP_ROWS =
    (RUN * GROUP + ROW_SPLITS * ROW_PARTS - 1) / (ROW_SPLITS * ROW_PARTS);
constexpr int THREADGROUP_ROWS = ROW_SPLITS * SIMDGROUP_ROWS;

const int lane = thread_index_in_simdgroup;
const int stream = simdgroup_index_in_threadgroup / ROW_SPLITS;
const int split = simdgroup_index_in_threadgroup % ROW_SPLITS;
const int column = lane % LANES;
const int subgroup = lane / LANES;
// Register s of a lane holds the key of step s ^ turn: only load addresses differ between lanes,
// and reductions and their way back shuffle fixed registers by fixed distances.
const int turn = column / (LANES / STEPS);
const int kv_head = threadgroup_position_in_grid.y / ROW_PARTS;
const int row_part = threadgroup_position_in_grid.y % ROW_PARTS;
const int num_kv_heads = threadgroups_per_grid.y / ROW_PARTS;
const int num_heads = num_kv_heads * GROUP;

if (threadgroup_position_in_grid.y == 0 && threadgroup_position_in_grid.z == 0) {
  pass_fence(fence_in, fence_out, thread_index_in_threadgroup);
}

// Read the plan.
const int window = plan[PLAN_WINDOW];
const bool has_rows = plan[PLAN_HAS_ROWS];
const device int* work = plan + PLAN_WORK + threadgroup_position_in_grid.z * WORK_FIELDS;
const int context_len = work[WORK_CONTEXT_LEN];
const int query_len = RUN == 1 ? 1 : work[WORK_QUERY_LEN];
const int first_out_row = work[WORK_FIRST_OUT_ROW];
const int first_token = work[WORK_FIRST_ROW];
const int block_table = work[WORK_BLOCKS];
const int first_query = context_len - query_len;
const int begin = max(work[WORK_BEGIN], first_query - window + 1);
const int end = min(work[WORK_END], context_len);
// Row r is head r % GROUP of the group for query token r / GROUP of the run.
const int num_rows = query_len * GROUP;
const int first_row = (row_part * ROW_SPLITS + split) * SIMDGROUP_ROWS;

// Load the queries. Rows that are not there repeat the last one, and are not stored.
Load query[SIMDGROUP_ROWS][LOADS];
float4 acc[SIMDGROUP_ROWS][UNITS];
float scale[SIMDGROUP_ROWS], highest[SIMDGROUP_ROWS], sum[SIMDGROUP_ROWS];
UNROLL
for (int i = 0; i < SIMDGROUP_ROWS; i++) {
  const int row = min(first_row + i, num_rows - 1);
  const size_t from =
      packed_row<HEAD_DIM>(first_token + row / GROUP, kv_head * GROUP + row % GROUP, num_heads);
  UNROLL
  for (int n = 0; n < LOADS; n++) {
    const int c = column + n * LANES;
    const Load loaded = ((const device Load*)(queries + from))[EVEN ? c : min(c, ROW_LOADS - 1)];
    query[i][n] = EVEN || c < ROW_LOADS ? loaded : Load(0);
  }
  scale[i] = Elements::template prepare_query<LANES>(query[i]) * (softmax_scale * LOG2_E);
  UNROLL
  for (int u = 0; u < UNITS; u++) {
    acc[i][u] = float4(0);
  }
  highest[i] = NOTHING_SEEN;
  sum[i] = 0;
}

// The newest keys, those of the queries: one for each subgroup at a time.
constexpr int NEW_KEYS = STREAMS * SUBGROUPS;
constexpr int NEW_TURNS = (RUN + NEW_KEYS - 1) / NEW_KEYS;
const int first_new = max(begin, first_query) + stream * SUBGROUPS;
for (int n = 0; n < NEW_TURNS && first_new + n * NEW_KEYS < end; n++) {
  const int position = first_new + n * NEW_KEYS + subgroup;
  const int readable = min(position, end - 1);
  const size_t slot = slab_row<BLOCK_SIZE, HEAD_DIM>(
      plan[block_table + readable / BLOCK_SIZE], readable % BLOCK_SIZE, kv_head, num_kv_heads);
  const size_t row =
      packed_row<HEAD_DIM>(first_token + readable - first_query, kv_head, num_kv_heads);
  const device Load* key_from = (const device Load*)(has_rows ? key_rows + row : key_slab + slot);
  const device Load* value_from =
      (const device Load*)(has_rows ? value_rows + row : value_slab + slot);
  Load key[LOADS], value[LOADS];
  UNROLL
  for (int n = 0; n < LOADS; n++) {
    const int c = EVEN ? column + n * LANES : min(column + n * LANES, ROW_LOADS - 1);
    key[n] = key_from[c];
    value[n] = value_from[c];
  }
  if (has_rows && row_part == 0 && split == 0 && position < end) {
    UNROLL
    for (int n = 0; n < LOADS; n++) {
      const int c = column + n * LANES;
      if (EVEN || c < ROW_LOADS) {
        ((device Load*)(in_place(key_slab) + slot))[c] = key[n];
        ((device Load*)(in_place(value_slab) + slot))[c] = value[n];
      }
    }
  }
  UNROLL
  for (int i = 0; i < SIMDGROUP_ROWS; i++) {
    float score = 0;
    UNROLL
    for (int u = 0; u < UNITS; u++) {
      score = multiply_add(Elements::query_floats(query[i][u / PARTS], u % PARTS),
                           Elements::floats(key[u / PARTS], u % PARTS), score);
    }
    score = sum_over_lanes<1, LANES>(score) * scale[i];
    bool visible = position < end;
    if (RUN > 1) {
      const int query_position = first_query + (first_row + i) / GROUP;
      visible = visible && position <= query_position && position > query_position - window;
    }
    const float seen = visible ? score : LOWEST;
    const float top = max(highest[i], seen);
    const float factor = fast::exp2(highest[i] - top);
    const float weight = fast::exp2(seen - top);
    // The lanes of a turn hold one sum; here all of them have the same key.
    sum[i] = fma(sum[i], factor, turn == 0 ? weight : 0);
    highest[i] = top;
    UNROLL
    for (int u = 0; u < UNITS; u++) {
      acc[i][u] = fma(float4(weight), Elements::floats(value[u / PARTS], u % PARTS),
                      acc[i][u] * factor);
    }
  }
}

// Walk the chunks of older keys. There may be none: in a window of new keys, and for simdgroups
// whose rows lie behind those of a short run.
const int old_end = min(end, first_query);
const bool walks = begin < old_end && first_row < num_rows;
int chunk_begin = walks ? (begin / CHUNK_SIZE + stream) * CHUNK_SIZE : old_end;
uint block_id = plan[block_table + uint(max(min(chunk_begin, old_end - 1), 0)) / BLOCK_SIZE];
for (; chunk_begin < old_end; chunk_begin += STREAMS * CHUNK_SIZE) {
  // Keys that may not be read are left to the nearest that may, and masked.
  const int in_block = uint(chunk_begin) % BLOCK_SIZE;
  const int lowest_key = in_block + begin - chunk_begin;
  const int highest_key = in_block + old_end - 1 - chunk_begin;
  const int first_key = in_block + turn * SUBGROUPS + subgroup;
  const size_t block = slab_row<BLOCK_SIZE, HEAD_DIM>(block_id, 0, kv_head, num_kv_heads);
  const device Load* keys_from = (const device Load*)(key_slab + block);
  const device Load* values_from = (const device Load*)(value_slab + block);
  Load keys[STEPS][LOADS], values[STEPS][LOADS];
  uint at[STEPS];
  UNROLL
  for (int s = 0; s < STEPS; s++) {
    at[s] = uint(min(max(first_key ^ s * SUBGROUPS, lowest_key), highest_key)) * ROW_LOADS;
    UNROLL
    for (int n = 0; n < LOADS; n++) {
      const int c = EVEN ? column + n * LANES : min(column + n * LANES, ROW_LOADS - 1);
      keys[s][n] = keys_from[at[s] + c];
    }
  }
  UNROLL
  for (int s = 0; s < STEPS; s++) {
    UNROLL
    for (int n = 0; n < LOADS; n++) {
      const int c = EVEN ? column + n * LANES : min(column + n * LANES, ROW_LOADS - 1);
      values[s][n] = values_from[at[s] + c];
    }
  }
  const int next_begin = min(chunk_begin + STREAMS * CHUNK_SIZE, old_end - 1);
  block_id = plan[block_table + uint(next_begin) / BLOCK_SIZE];

  // Score the keys, each of them in floats once for all rows.
  float weight[SIMDGROUP_ROWS][STEPS];
  UNROLL
  for (int s = 0; s < STEPS; s++) {
    UNROLL
    for (int u = 0; u < UNITS; u++) {
      const float4 key = Elements::floats(keys[s][u / PARTS], u % PARTS);
      UNROLL
      for (int i = 0; i < SIMDGROUP_ROWS; i++) {
        weight[i][s] = multiply_add(Elements::query_floats(query[i][u / PARTS], u % PARTS), key,
                                    u == 0 ? 0 : weight[i][s]);
      }
    }
  }
  const bool readable = first_key >= lowest_key && first_key <= highest_key;
  UNROLL
  for (int i = 0; i < SIMDGROUP_ROWS; i++) {
    const float score = sum_turned<LANES, STEPS>(weight[i]) * scale[i];
    bool visible = readable;
    if (RUN > 1) {
      const int query_position = first_query + (first_row + i) / GROUP;
      visible = visible && chunk_begin - in_block + first_key > query_position - window;
    }

    // Update the maximum and the sum; what was accumulated so far shrinks by the factor.
    const float seen = visible ? score : LOWEST;
    const float top = max(highest[i], max_over_lanes<LANES / STEPS, LANES>(seen));
    const float factor = fast::exp2(highest[i] - top);
    const float mine = fast::exp2(seen - top);
    sum[i] = fma(sum[i], factor, mine);
    highest[i] = top;
    UNROLL
    for (int u = 0; u < UNITS; u++) {
      acc[i][u] *= factor;
    }
    weight[i][0] = mine;
    UNROLL
    for (int s = 1; s < STEPS; s++) {
      weight[i][s] = simd_shuffle_xor(mine, s * (LANES / STEPS));
    }
  }

  // Update the accumulators.
  UNROLL
  for (int s = 0; s < STEPS; s++) {
    UNROLL
    for (int u = 0; u < UNITS; u++) {
      const float4 value = Elements::floats(values[s][u / PARTS], u % PARTS);
      UNROLL
      for (int i = 0; i < SIMDGROUP_ROWS; i++) {
        acc[i][u] = fma(float4(weight[i][s]), value, acc[i][u]);
      }
    }
  }
}

// Combine the subgroups of each simdgroup, and leave its rows to the threadgroup.
constexpr int ROW_UNITS = HEAD_DIM / 4;
threadgroup float4 stream_acc[STREAMS * THREADGROUP_ROWS * ROW_UNITS];
threadgroup float stream_highest[STREAMS * THREADGROUP_ROWS];
threadgroup float stream_sum[STREAMS * THREADGROUP_ROWS];
UNROLL
for (int i = 0; i < SIMDGROUP_ROWS; i++) {
  const float top = max_over_lanes<LANES, SIMD_SIZE>(highest[i]);
  const float share = fast::exp2(highest[i] - top);
  const float total = sum_over_lanes<LANES / STEPS, SIMD_SIZE>(sum[i] * share);
  const int row = (stream * ROW_SPLITS + split) * SIMDGROUP_ROWS + i;
  if (lane == 0) {
    stream_highest[row] = top;
    stream_sum[row] = total;
  }
  UNROLL
  for (int u = 0; u < UNITS; u++) {
    float4 value = acc[i][u] * share;
    UNROLL
    for (int e = 0; e < 4; e++) {
      value[e] = sum_over_lanes<LANES, SIMD_SIZE>(value[e]);
    }
    const int c = (column + u / PARTS * LANES) * PARTS + u % PARTS;
    if (subgroup == 0 && (EVEN || c < ROW_UNITS)) {
      stream_acc[row * ROW_UNITS + c] = value;
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Combine the streams and store the rows, or their partials: each thread takes four elements.
constexpr int OUT_WIDTH = PARTIAL ? HEAD_DIM + 4 : HEAD_DIM;
constexpr int NUM_THREADS = SIMD_SIZE * STREAMS * ROW_SPLITS;
const int num_stored = min(THREADGROUP_ROWS, num_rows - row_part * THREADGROUP_ROWS);
for (int n = thread_index_in_threadgroup; n < num_stored * ROW_UNITS; n += NUM_THREADS) {
  const int row = n / ROW_UNITS;
  const int c = n % ROW_UNITS;
  float top = NOTHING_SEEN;
  UNROLL
  for (int s = 0; s < STREAMS; s++) {
    top = max(top, stream_highest[s * THREADGROUP_ROWS + row]);
  }
  float total = 0;
  float4 value = float4(0);
  UNROLL
  for (int s = 0; s < STREAMS; s++) {
    const int other = s * THREADGROUP_ROWS + row;
    const float share = fast::exp2(stream_highest[other] - top);
    total = fma(stream_sum[other], share, total);
    value = fma(stream_acc[other * ROW_UNITS + c], float4(share), value);
  }
  const int kv_row = row_part * THREADGROUP_ROWS + row;
  const int head = kv_head * GROUP + kv_row % GROUP;
  const int out_row = first_out_row + kv_row / GROUP;
  device vec<Out, 4>* to =
      (device vec<Out, 4>*)(out + packed_row<OUT_WIDTH>(out_row, head, num_heads));
  const float norm = PARTIAL ? 1 : softmax_norm(top, total, sinks[head]);
  to[c] = vec<Out, 4>(value * norm);
  if (PARTIAL && c == 0) {
    to[ROW_UNITS] = vec<Out, 4>(float4(top, total, 0, 0));
  }
}

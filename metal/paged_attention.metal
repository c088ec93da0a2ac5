// Attention of decodes and short query runs over block tables: one threadgroup per (partition of a
// sequence, KV head), or several if the KV head has more query rows than fit one.
//
// A query row is one query head of the group for one token of the run. A simdgroup keeps up to four
// rows in registers and iterates over chunks of keys; the simdgroups of a threadgroup take other
// chunks (streams) or other rows of the same chunk (row splits), which come from the cache. The
// newest K/V rows come from the inputs and are written into their slots, so that no dispatch reads
// a slot that it writes. Online softmax in float and base 2 (Milakov and Gimelshein, 2018), divided
// into partitions as in Flash-Decoding (Dao et al., 2023).
//
// The first part of the body defines the format of K and V: T, KeyFormat and ValueFormat
// (row_formats.h), key_slabs and value_slabs (written if rows come from inputs), TAKES_ROWS (whether
// they may), and new_keys and new_values (rows of num_tokens, or unused).
//
// template   Out (T, or float for partials), BLOCK_SIZE,
//            HOLDS_LATENTS (in place of K, and their rotated keys in place of V),
//            GROUP (query heads per KV head), RUN (query tokens per sequence, at most),
//            STREAMS (simdgroups that walk different chunks),
//            ROW_SPLITS (simdgroups that walk the same chunks for different rows),
//            ROW_PARTS (threadgroups that do),
//            PARTIAL (whether merge_partitions follows),
//            SOFTCAP (bits of the float that scores are capped at, 0 for none)
// inputs     queries               T [num_tokens, num_heads, Keys::QUERY_WIDTH]
//            plan                  int [...], laid out by ops/attention_plan.py
//            sinks                 float [max(num_heads, 8)], LOWEST for none
//            softmax_scale         float
//            fence_in              int [8]
// outputs    out                   T [num_tokens, num_heads, Values::WIDTH], or the partials: float
//                                  [num_partial_rows, num_heads, Values::WIDTH + 4]: values,
//                                  highest score in base 2, sum, 0, 0
//            fence_out             int [8]
// grid       (SIMDGROUP_LANES * STREAMS * ROW_SPLITS, num_kv_heads * ROW_PARTS, num_partitions),
//            threadgroup (all of the first, 1, 1)

using Formats = Attended<KeyFormat, ValueFormat, HOLDS_LATENTS>;
using Keys = typename Formats::Keys;
using Values = typename Formats::Values;
// Rows of K and V are spread over LANES lanes, as the wider one requires.
constexpr int PARTS = Keys::LOAD_SIZE / 4;  // float4s of a load
constexpr int KEY_WIDTH = Keys::WIDTH, VALUE_WIDTH = Values::WIDTH;
constexpr int ROW_LOADS = (KEY_WIDTH > VALUE_WIDTH ? KEY_WIDTH : VALUE_WIDTH) / Keys::LOAD_SIZE;
constexpr int LANES = ROW_LOADS > 16 ? 32 : ROW_LOADS > 8 ? 16 : ROW_LOADS > 4 ? 8 : 4;
using KeyRow = RowOverLanes<Keys, KEY_WIDTH, LANES>;
using ValueRow = RowOverLanes<Values, VALUE_WIDTH, LANES>;
constexpr int KEY_UNITS = KeyRow::LOADS * PARTS;  // float4s of a row in each lane
constexpr int VALUE_UNITS = ValueRow::LOADS * PARTS;
// A load of queries is sixteen bytes; one of keys or values may hold more elements.
constexpr int QUERY_LOADS = Keys::QUERY_LOADS;
constexpr int QUERY_PARTS = PARTS / QUERY_LOADS;
// Neighbouring lanes that share the rests of keys and of values.
constexpr int SHARERS = LeastOf<KeyRow::SHARERS, ValueRow::SHARERS>::value;
// A chunk is one step or more, each with one key per subgroup of LANES lanes, within one block.
constexpr int SUBGROUPS = SIMDGROUP_LANES / LANES;
constexpr int HELD_STEPS = Keys::CHUNK_LOADS / ((ROW_LOADS + LANES - 1) / LANES);
constexpr int MAX_STEPS = HELD_STEPS > 3 ? 4 : HELD_STEPS > 1 ? 2 : 1;
constexpr int STEPS = LeastOf<LeastOf<BLOCK_SIZE / SUBGROUPS, SHARERS>::value, MAX_STEPS>::value;
constexpr int CHUNK_SIZE = STEPS * SUBGROUPS;
constexpr int SIMDGROUP_ROWS =
    (RUN * GROUP + ROW_SPLITS * ROW_PARTS - 1) / (ROW_SPLITS * ROW_PARTS);
constexpr int THREADGROUP_ROWS = ROW_SPLITS * SIMDGROUP_ROWS;
// Whether all rows of a simdgroup belong to one query token, and so see the same older keys.
constexpr bool ONE_TOKEN = GROUP % SIMDGROUP_ROWS == 0;

const int lane = thread_index_in_simdgroup;
const int stream = simdgroup_index_in_threadgroup / ROW_SPLITS;
const int split = simdgroup_index_in_threadgroup % ROW_SPLITS;
const int column = lane % LANES;
const int subgroup = lane / LANES;
// Register s of a lane holds the key of step s ^ turn: only load addresses differ between lanes,
// and reductions and broadcasts shuffle fixed registers by fixed distances.
const int turn = column % SHARERS / (SHARERS / STEPS);
const int key_place = KeyRow::readable(column, 0);
const int value_place = ValueRow::readable(column, 0);
const int kv_head = threadgroup_position_in_grid.y / ROW_PARTS;
const int row_part = threadgroup_position_in_grid.y % ROW_PARTS;
const int num_kv_heads = threadgroups_per_grid.y / ROW_PARTS;
const int num_heads = num_kv_heads * GROUP;

if (threadgroup_position_in_grid.y == 0 && threadgroup_position_in_grid.z == 0) {
  pass_fence(fence_in, fence_out, thread_index_in_threadgroup);
}

// Read the plan.
const int window = plan[PLAN_WINDOW];
const bool has_rows = TAKES_ROWS && plan[PLAN_HAS_ROWS];
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
const typename Keys::Rows stored_keys = Formats::keys(key_slabs, value_slabs);
const typename Values::Rows stored_values = Formats::values(key_slabs, value_slabs);

// Load the queries. Missing rows repeat the last one, and are not stored.
uint4 query[SIMDGROUP_ROWS][KeyRow::LOADS * QUERY_LOADS];
float4 acc[SIMDGROUP_ROWS][VALUE_UNITS];
float scale[SIMDGROUP_ROWS], highest[SIMDGROUP_ROWS], sum[SIMDGROUP_ROWS];
typename Keys::QueryRest query_rest[SIMDGROUP_ROWS];
float bias_sum[SIMDGROUP_ROWS];  // for formats with a bias
UNROLL
for (int i = 0; i < SIMDGROUP_ROWS; i++) {
  const int row = min(first_row + i, num_rows - 1);
  const size_t from =
      packed_row<Keys::QUERY_WIDTH>(first_token + row / GROUP, kv_head * GROUP + row % GROUP, num_heads);
  UNROLL
  for (int n = 0; n < KeyRow::LOADS * QUERY_LOADS; n++) {
    const int at = KeyRow::readable(column, n / QUERY_LOADS) * QUERY_LOADS + n % QUERY_LOADS;
    const uint4 loaded = ((const device uint4*)(queries + from))[at];
    query[i][n] = KeyRow::is_there(column, n / QUERY_LOADS) ? loaded : uint4(0);
  }
  Keys::load_query_rest(queries + from, column, query_rest[i]);
  scale[i] =
      Keys::template prepare_query<LANES, SHARERS>(query[i], query_rest[i]) *
      (softmax_scale * LOG2_E);
  UNROLL
  for (int u = 0; u < VALUE_UNITS; u++) {
    acc[i][u] = float4(0);
  }
  highest[i] = NOTHING_SEEN;
  sum[i] = 0;
  bias_sum[i] = 0;
}

// Walk the newest keys, those of the query tokens: one per subgroup at a time.
constexpr int NEW_KEYS = STREAMS * SUBGROUPS;
constexpr int NEW_TURNS = (RUN + NEW_KEYS - 1) / NEW_KEYS;
const int first_new = max(begin, first_query) + stream * SUBGROUPS;
for (int n = 0; n < NEW_TURNS && first_new + n * NEW_KEYS < end; n++) {
  const int position = first_new + n * NEW_KEYS + subgroup;
  const int readable = min(position, end - 1);
  const int block_id = plan[block_table + readable / BLOCK_SIZE];
  const int offset = readable % BLOCK_SIZE;
  const int token = first_token + readable - first_query;
  const Index slot = slab_row<Index, BLOCK_SIZE>(block_id, offset, kv_head, num_kv_heads);
  const Index row = has_rows ? Index(token * num_kv_heads + kv_head) : slot;
  const typename Keys::Rows keys_from =
      Keys::newest(has_rows, Formats::keys(new_keys, new_values), stored_keys);
  const typename Values::Rows values_from =
      Values::newest(has_rows, Formats::values(new_keys, new_values), stored_values);
  typename Keys::Load key[KeyRow::LOADS];
  typename Values::Load value[ValueRow::LOADS];
  UNROLL
  for (int n = 0; n < KeyRow::LOADS; n++) {
    key[n] = Keys::load(keys_from, row, KeyRow::readable(column, n));
  }
  UNROLL
  for (int n = 0; n < ValueRow::LOADS; n++) {
    value[n] = Values::load(values_from, row, ValueRow::readable(column, n));
  }
  const typename Keys::Rest key_rest = Keys::rest(keys_from, row, key_place, column);
  const typename Values::Rest value_rest = Values::rest(values_from, row, value_place, column);
  if (has_rows && row_part == 0 && split == 0 && position < end) {
    UNROLL
    for (int n = 0; n < KeyRow::LOADS; n++) {
      if (KeyRow::is_there(column, n)) {
        Keys::store(stored_keys, slot, KeyRow::place(column, n), key[n]);
      }
    }
    Keys::store_rest(stored_keys, slot, column, key_rest);
    UNROLL
    for (int n = 0; n < ValueRow::LOADS && !HOLDS_LATENTS; n++) {
      if (ValueRow::is_there(column, n)) {
        Values::store(stored_values, slot, ValueRow::place(column, n), value[n]);
      }
    }
  }
  UNROLL
  for (int i = 0; i < SIMDGROUP_ROWS; i++) {
    float score = 0;
    UNROLL
    for (int u = 0; u < KEY_UNITS; u++) {
      score = multiply_add(Packed<T>::query_floats(query[i][u / QUERY_PARTS], u % QUERY_PARTS),
                           Keys::floats(key[u / PARTS], u % PARTS), score);
    }
    score = Keys::scaled(sum_over_lanes<1, SHARERS>(score), key_rest, query_rest[i]);
    score = capped<SOFTCAP>(sum_over_lanes<SHARERS, LANES>(score) * scale[i]);
    bool visible = position < end;
    if (RUN > 1) {
      const int query_position = first_query + (first_row + i) / GROUP;
      visible = visible && position <= query_position && position > query_position - window;
    }
    const float seen = visible ? score : LOWEST;
    const float top = max(highest[i], seen);
    const float factor = fast::exp2(highest[i] - top);
    const float weight = fast::exp2(seen - top);
    // Lanes with different turns have separate sums; here all of them have the same key.
    const float counted = turn == 0 ? weight : 0;
    sum[i] = fma(sum[i], factor, counted);
    bias_sum[i] = Values::add_bias(bias_sum[i], factor, counted, value_rest);
    highest[i] = top;
    const float weighed = Values::weighed(weight, value_rest);
    UNROLL
    for (int u = 0; u < VALUE_UNITS; u++) {
      acc[i][u] = fma(float4(weighed), Values::floats(value[u / PARTS], u % PARTS),
                      acc[i][u] * factor);
    }
  }
}

// Walk the chunks of older keys; rows of one token begin with its window. There may be none: if the
// window has only new keys, and for simdgroups whose rows are past the end of a short run.
const int old_end = min(end, first_query);
const int old_begin =
    RUN > 1 && ONE_TOKEN ? max(begin, first_query + first_row / GROUP - window + 1) : begin;
const bool walks = old_begin < old_end && first_row < num_rows;
int chunk_begin = walks ? (old_begin / CHUNK_SIZE + stream) * CHUNK_SIZE : old_end;
uint block_id = plan[block_table + uint(max(min(chunk_begin, old_end - 1), 0)) / BLOCK_SIZE];
for (; chunk_begin < old_end; chunk_begin += STREAMS * CHUNK_SIZE) {
  const int block_begin = chunk_begin - uint(chunk_begin) % BLOCK_SIZE;
  const int position = chunk_begin + turn * SUBGROUPS + subgroup;
  // The offset from a position in the block to its row.
  const Index to_row =
      slab_row<Index, BLOCK_SIZE>(block_id, 0, kv_head, num_kv_heads) - Index(block_begin);
  typename Keys::Load keys[STEPS][KeyRow::LOADS];
  typename Values::Load values[STEPS][ValueRow::LOADS];
  // Keys that may not be read are replaced by the nearest one that may, and masked.
  Index row_of_step[STEPS];
  UNROLL
  for (int s = 0; s < STEPS; s++) {
    const int wanted = position ^ s * SUBGROUPS;
    row_of_step[s] = to_row + Index(min(max(wanted, old_begin), old_end - 1));
    UNROLL
    for (int n = 0; n < KeyRow::LOADS; n++) {
      keys[s][n] = Keys::load(stored_keys, row_of_step[s], KeyRow::readable(column, n));
    }
  }
  UNROLL
  for (int s = 0; s < STEPS; s++) {
    UNROLL
    for (int n = 0; n < ValueRow::LOADS; n++) {
      values[s][n] = Values::load(stored_values, row_of_step[s], ValueRow::readable(column, n));
    }
  }
  // The rests of the key whose score this lane will have.
  const Index scored_row = row_of_step[0];
  const typename Keys::Rest key_rest = Keys::rest(stored_keys, scored_row, key_place, column);
  const typename Values::Rest value_rest =
      Values::rest(stored_values, scored_row, value_place, column);
  const int next_begin = min(chunk_begin + STREAMS * CHUNK_SIZE, old_end - 1);
  block_id = plan[block_table + uint(next_begin) / BLOCK_SIZE];

  // Score the keys, each converted to floats once for all rows.
  float weight[SIMDGROUP_ROWS][STEPS];
  UNROLL
  for (int s = 0; s < STEPS; s++) {
    UNROLL
    for (int u = 0; u < KEY_UNITS; u++) {
      const float4 key = Keys::floats(keys[s][u / PARTS], u % PARTS);
      UNROLL
      for (int i = 0; i < SIMDGROUP_ROWS; i++) {
        const float4 four = Packed<T>::query_floats(query[i][u / QUERY_PARTS], u % QUERY_PARTS);
        weight[i][s] = multiply_add(four, key, u == 0 ? 0 : weight[i][s]);
      }
    }
  }
  const bool readable = position >= old_begin && position < old_end;
  UNROLL
  for (int i = 0; i < SIMDGROUP_ROWS; i++) {
    const float product = sum_turned<SHARERS, STEPS>(weight[i]);
    const float sum_of_all =
        sum_over_lanes<SHARERS, LANES>(Keys::scaled(product, key_rest, query_rest[i]));
    const float score = capped<SOFTCAP>(sum_of_all * scale[i]);
    bool visible = readable;
    if (RUN > 1 && !ONE_TOKEN) {
      const int query_position = first_query + (first_row + i) / GROUP;
      visible = visible && position > query_position - window;
    }

    // Update the maximum and the sum; scale what was accumulated so far by the factor.
    const float seen = visible ? score : LOWEST;
    const float top = max(highest[i], max_over_lanes<SHARERS / STEPS, SHARERS>(seen));
    const float factor = fast::exp2(highest[i] - top);
    const float mine = fast::exp2(seen - top);
    sum[i] = fma(sum[i], factor, mine);
    bias_sum[i] = Values::add_bias(bias_sum[i], factor, mine, value_rest);
    highest[i] = top;
    UNROLL
    for (int u = 0; u < VALUE_UNITS; u++) {
      acc[i][u] *= factor;
    }
    weight[i][0] = Values::weighed(mine, value_rest);
    UNROLL
    for (int s = 1; s < STEPS; s++) {
      weight[i][s] = simd_shuffle_xor(weight[i][0], s * (SHARERS / STEPS));
    }
  }

  // Update the accumulators.
  UNROLL
  for (int s = 0; s < STEPS; s++) {
    UNROLL
    for (int u = 0; u < VALUE_UNITS; u++) {
      const float4 value = Values::floats(values[s][u / PARTS], u % PARTS);
      UNROLL
      for (int i = 0; i < SIMDGROUP_ROWS; i++) {
        acc[i][u] = fma(float4(weight[i][s]), value, acc[i][u]);
      }
    }
  }
}

// Combine the subgroups of each simdgroup, and store its rows for the threadgroup.
constexpr int ROW_UNITS = VALUE_WIDTH / 4;
threadgroup float4 stream_acc[STREAMS * THREADGROUP_ROWS * ROW_UNITS];
threadgroup float stream_highest[STREAMS * THREADGROUP_ROWS];
threadgroup float stream_sum[STREAMS * THREADGROUP_ROWS];
UNROLL
for (int i = 0; i < SIMDGROUP_ROWS; i++) {
  const float top = max_over_lanes<LANES, SIMDGROUP_LANES>(highest[i]);
  const float share = fast::exp2(highest[i] - top);
  // Lanes with the same turn hold the same sums.
  const float total = sum_over_lanes<LANES, SIMDGROUP_LANES>(
      sum_over_lanes<SHARERS / STEPS, SHARERS>(sum[i] * share));
  const float bias = sum_over_lanes<LANES, SIMDGROUP_LANES>(
      sum_over_lanes<SHARERS / STEPS, SHARERS>(bias_sum[i] * share));
  const int row = (stream * ROW_SPLITS + split) * SIMDGROUP_ROWS + i;
  if (lane == 0) {
    stream_highest[row] = top;
    stream_sum[row] = total;
  }
  UNROLL
  for (int u = 0; u < VALUE_UNITS; u++) {
    float4 value = acc[i][u] * share;
    UNROLL
    for (int e = 0; e < 4; e++) {
      value[e] = sum_over_lanes<LANES, SIMDGROUP_LANES>(value[e]);
    }
    if (subgroup == 0 && ValueRow::is_there(column, u / PARTS)) {
      const int c = ValueRow::place(column, u / PARTS) * PARTS + u % PARTS;
      stream_acc[row * ROW_UNITS + c] = Values::finished(value, bias);
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Combine the streams and store the rows, or their partials: each thread takes four elements.
constexpr int OUT_WIDTH = PARTIAL ? VALUE_WIDTH + 4 : VALUE_WIDTH;
constexpr int NUM_THREADS = SIMDGROUP_LANES * STREAMS * ROW_SPLITS;
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

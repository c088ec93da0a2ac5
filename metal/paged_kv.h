// What the kernels share: addressing of slabs, the fence that orders them, and the arithmetic of an
// online softmax.
//
// Vocabulary. The bodies use these names of Metal and no others, so that one header can map them to
// another language:
//   device constant threadgroup thread       address spaces
//   half bfloat float4 vec<T, 4>             element types (T comes in as a template parameter)
//   fma dot max min fast::exp                arithmetic
//   simd_shuffle simd_shuffle_xor simd_max   32 lanes of a simdgroup
//   threadgroup_barrier(mem_flags::mem_threadgroup)
//   thread_position_in_grid threads_per_grid threadgroup_position_in_grid threadgroups_per_grid
//   thread_index_in_threadgroup thread_index_in_simdgroup simdgroup_index_in_threadgroup
//
// A slab is [num_blocks, num_kv_heads, block_size, head_dim], row-contiguous; a slot is block_id *
// block_size + offset. Accumulators are float, offsets into slabs size_t.

#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr int SIMD_SIZE = 32;
// Positions whose attention one threadgroup computes. Boundaries lie at fixed positions, so that
// how a sequence is cut does not depend on what else is in the batch.
constant constexpr int PARTITION_SIZE = 256;
// Keys that a simdgroup scores at a time: the smallest block size, so a chunk lies in one block.
constant constexpr int CHUNK_SIZE = 8;
// Simdgroups that share the partitions of one row when they are merged.
constant constexpr int MERGE_STREAMS = 8;
// Below every score, and finite: fast::exp need not know infinities.
constant constexpr float LOWEST = -3.402823466e+38f;

// The plan of a step, as ops/attention_plan.py packs it: a head that says where the records begin,
// then the records.
constant constexpr int PLAN_SEQS = 0, PLAN_WORK = 1, PLAN_ROWS = 2, PLAN_WINDOW = 3,
                       PLAN_HAS_ROWS = 4;
// One per sequence; the blocks of its table begin at SEQ_BLOCKS of the plan.
constant constexpr int SEQ_CONTEXT_LEN = 0, SEQ_QUERY_LEN = 1, SEQ_FIRST_ROW = 2, SEQ_BLOCKS = 3,
                       SEQ_FIELDS = 4;
// One per partition of a sequence that any of its queries sees.
constant constexpr int WORK_SEQ = 0, WORK_PARTITION = 1, WORK_FIRST_OUT_ROW = 2, WORK_FIELDS = 3;
// One per query token: where its partials lie.
constant constexpr int ROW_FIRST_PARTIAL = 0, ROW_STRIDE = 1, ROW_NUM_PARTITIONS = 2,
                       ROW_FIELDS = 3;

// Slabs come in as const inputs, because an output would be a new array. A kernel that writes
// through this binds the fence of every earlier reader and writer, and emits the next one.
template <typename T>
device T* in_place(const device T* slab) {
  return (device T*)slab;
}

// Passes the fence on: each dispatch of a slab's chain reads the one before and writes the next,
// counting up.
inline void pass_fence(const device int* fence_in, device int* fence_out, uint index) {
  if (index < 8) {
    fence_out[index] = fence_in[index] + 1;
  }
}

// Where the row of one KV head of one slot begins.
template <int BLOCK_SIZE, int HEAD_DIM>
size_t slab_row(int block_id, int offset, int kv_head, int num_kv_heads) {
  return ((size_t(block_id) * num_kv_heads + kv_head) * BLOCK_SIZE + offset) * HEAD_DIM;
}

// Where the row of one head of one packed token begins, in [num_tokens, num_heads, head_dim].
template <int HEAD_DIM>
size_t packed_row(int token, int head, int num_heads) {
  return (size_t(token) * num_heads + head) * HEAD_DIM;
}

// Sums N values of each lane over a group of LANES lanes, N = LANES / 4. Each step sends half of
// the values away and adds what comes in to the other half, so that N sums cost N + 1 shuffles and
// not 5 N. Returns sum number (lane % LANES) / 4, the same in all four lanes of a quad.
template <int LANES>
float sum_over_lanes(thread float (&values)[LANES / 4], int lane) {
  UNROLL
  for (int distance = LANES / 2, half_count = LANES / 8; half_count > 0;
       distance /= 2, half_count /= 2) {
    const bool upper = lane & distance;
    UNROLL
    for (int i = 0; i < half_count; i++) {
      const float sent = upper ? values[i] : values[i + half_count];
      const float kept = upper ? values[i + half_count] : values[i];
      values[i] = kept + simd_shuffle_xor(sent, distance);
    }
  }
  const float pair = values[0] + simd_shuffle_xor(values[0], 2);
  return pair + simd_shuffle_xor(pair, 1);
}

// The largest of eight values that lie one to a quad.
inline float max_over_quads(float value) {
  value = max(value, simd_shuffle_xor(value, 4));
  value = max(value, simd_shuffle_xor(value, 8));
  return max(value, simd_shuffle_xor(value, 16));
}

inline float sum_over_quads(float value) {
  value += simd_shuffle_xor(value, 4);
  value += simd_shuffle_xor(value, 8);
  return value + simd_shuffle_xor(value, 16);
}

// What the accumulated values are multiplied with in the end. The sink is one more logit, without a
// value.
inline float softmax_norm(float highest, float sum, float sink) {
  const float finite_sink = max(sink, LOWEST);
  const float top = max(highest, finite_sink);
  const float share = fast::exp(highest - top);
  return share / fma(sum, share, fast::exp(finite_sink - top));
}

// The K or the V of one sequence: from its blocks, or from the step's own rows where they are newer
// than the slab.
template <typename T, int BLOCK_SIZE, int HEAD_DIM>
struct Source {
  const device T* slab;
  const device T* rows;
  int begin, end;  // positions that a query may see
  int first_new;   // position from which K/V come from the rows
  int first_row;   // where its rows begin
  int kv_head, num_kv_heads;

  // Four elements of a position, zeros where nothing may be read. A new row goes into its slot on
  // the way.
  vec<T, 4> load(int block_id, int position, int column, bool wanted) const {
    if (!wanted || position < begin || position >= end || column >= HEAD_DIM / 4) {
      return vec<T, 4>(T(0));
    }
    const size_t slot =
        slab_row<BLOCK_SIZE, HEAD_DIM>(block_id, position % BLOCK_SIZE, kv_head, num_kv_heads);
    if (position < first_new) {
      return ((const device vec<T, 4>*)(slab + slot))[column];
    }
    const size_t row =
        packed_row<HEAD_DIM>(first_row + position - first_new, kv_head, num_kv_heads);
    const vec<T, 4> newest = ((const device vec<T, 4>*)(rows + row))[column];
    ((device vec<T, 4>*)(in_place(slab) + slot))[column] = newest;
    return newest;
  }
};

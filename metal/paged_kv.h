// Code that the kernels share: addressing of slabs, the fence that orders them, and the arithmetic
// of an online softmax.
//
// Vocabulary. The bodies use these names of Metal and no others, so that one header can map them to
// another language:
//   device constant threadgroup thread       address spaces
//   half half2 half4 bfloat float4 vec<T, 4> element types (T comes in as a template parameter)
//   uint2 uint4 as_type                      their bits
//   fma max min rint fast::exp2              arithmetic
//   simd_shuffle simd_shuffle_xor simd_max   32 lanes of a simdgroup
//   threadgroup_barrier(mem_flags::mem_threadgroup)
//   thread_position_in_grid threads_per_grid threadgroup_position_in_grid threadgroups_per_grid
//   thread_index_in_threadgroup thread_index_in_simdgroup simdgroup_index_in_threadgroup
//
// A slab is [num_blocks, num_kv_heads, block_size, width], row-contiguous; a slot is block_id *
// block_size + offset. Accumulators are float.

#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr int SIMDGROUP_LANES = 32;
// Simdgroups that share the partitions of one row when they are merged.
constant constexpr int MERGE_STREAMS = 8;
// Below every score, and finite: fast::exp2 need not support infinities.
constant constexpr float LOWEST = -3.402823466e+38f;
// The highest score before any key is seen: so far above LOWEST that masked keys have weight 0.
constant constexpr float NOTHING_SEEN = LOWEST / 2;
constant constexpr float LOG2_E = 1.44269504089f;

// The plan of a step, as ops/attention_plan.py packs it: a head; work records at PLAN_WORK, a
// constant that saves a load; records of the rows to merge at plan[PLAN_ROWS]; block tables.
constant constexpr int PLAN_ROWS = 0, PLAN_WINDOW = 1, PLAN_HAS_ROWS = 2, PLAN_WORK = 8;
// One per partition that any query of its sequence sees: positions WORK_BEGIN to WORK_END - 1, or
// fewer. The rows of the queries begin at WORK_FIRST_ROW, the block table at plan[WORK_BLOCKS]. A
// record with a WORK_CONTEXT_LEN of 0 is empty: it sees no key, and its partials belong to no row.
constant constexpr int WORK_BEGIN = 0, WORK_END = 1, WORK_CONTEXT_LEN = 2, WORK_QUERY_LEN = 3,
                       WORK_FIRST_ROW = 4, WORK_FIRST_OUT_ROW = 5, WORK_BLOCKS = 6,
                       WORK_FIELDS = 7;
// One per query token: the place of its partials.
constant constexpr int ROW_FIRST_PARTIAL = 0, ROW_STRIDE = 1, ROW_NUM_PARTITIONS = 2,
                       ROW_FIELDS = 3;

// Slabs are const inputs, because an output would be a new array. A kernel that writes through this
// pointer binds the fence of every earlier reader and writer, and returns the next one.
template <typename T>
device T* slab_to_write(const device T* slab) {
  return (device T*)slab;
}

// Each dispatch of a slab's chain reads the previous fence and writes the next, counting up.
inline void pass_fence(const device int* fence_in, device int* fence_out, uint index) {
  if (index < 8) {
    fence_out[index] = fence_in[index] + 1;
  }
}

// The index of the row of one KV head and slot. If the indices of its loads fit 32 bits, too, a
// load is addressed by a pointer that all threads share and a register.
template <typename Index, int BLOCK_SIZE>
Index slab_row(int block_id, int offset, int kv_head, int num_kv_heads) {
  return Index(block_id) * uint(num_kv_heads * BLOCK_SIZE) + uint(kv_head * BLOCK_SIZE + offset);
}

// Where the row of one head of one packed token begins, in [num_tokens, num_heads, width].
template <int WIDTH>
size_t packed_row(int token, int head, int num_heads) {
  return (size_t(token) * num_heads + head) * WIDTH;
}

// The token of one slot of the gathered blocks, by a plan that ops/gather_plan.py packs: 2 numbers
// per block (its id, its sequence), then 3 per sequence (its first block, first token, and length).
// The dense K and V have one sequence after another, heads first.
struct GatheredToken {
  int block_id;
  bool is_present;  // false for slots past the end of a sequence
  size_t row;     // of one head, in the dense arrays
};
template <int BLOCK_SIZE>
GatheredToken gathered_token(const device int* plan, int slot, int num_blocks, int kv_head,
                             int num_kv_heads) {
  const int index = slot / BLOCK_SIZE;
  const device int* block = plan + 2 * index;
  const device int* seq = plan + 2 * num_blocks + 3 * block[1];
  const int position = (index - seq[0]) * BLOCK_SIZE + slot % BLOCK_SIZE;
  const int num_tokens = seq[2];
  return {block[0], position < num_tokens,
          size_t(seq[1]) * num_kv_heads + size_t(kv_head) * num_tokens + position};
}

// The integer type of a piece of this many bytes, which a thread copies at a time.
template <int BYTES>
struct PieceOf;
template <>
struct PieceOf<2> {
  using type = ushort;
};
template <>
struct PieceOf<4> {
  using type = uint;
};
template <>
struct PieceOf<8> {
  using type = uint2;
};
template <>
struct PieceOf<16> {
  using type = uint4;
};

// Copies one piece between arrays of pieces, whatever their elements.
template <int BYTES, typename T>
void copy_piece(const device T* source, size_t from, device T* destination, size_t to) {
  using Piece = typename PieceOf<BYTES>::type;
  ((device Piece*)destination)[to] = ((const device Piece*)source)[from];
}

// Sums over the lanes whose indices differ in the bits FROM to TO / 2: FROM is 1 for neighbours, TO
// is SIMDGROUP_LANES for lanes LANES apart.
template <int FROM, int TO>
float sum_over_lanes(float value) {
  UNROLL
  for (int distance = FROM; distance < TO; distance *= 2) {
    value += simd_shuffle_xor(value, distance);
  }
  return value;
}

// The largest over the same lanes.
template <int FROM, int TO>
float max_over_lanes(float value) {
  UNROLL
  for (int distance = FROM; distance < TO; distance *= 2) {
    value = max(value, simd_shuffle_xor(value, distance));
  }
  return value;
}

// Sums COUNT values over groups of LANES lanes, where value i of a lane belongs to sum i ^ turn,
// turn = lane % LANES / (LANES / COUNT). Each step sends half of the values to another lane, and
// the turn makes it the same half in every lane. Returns sum number turn.
template <int LANES, int COUNT>
float sum_turned(thread float (&values)[COUNT]) {
  UNROLL
  for (int kept = COUNT / 2, distance = LANES / 2; kept > 0; kept /= 2, distance /= 2) {
    UNROLL
    for (int i = 0; i < kept; i++) {
      values[i] += simd_shuffle_xor(values[i + kept], distance);
    }
  }
  return sum_over_lanes<1, LANES / COUNT>(values[0]);
}

// Adds four products to a sum, in the order of the elements.
inline float multiply_add(float4 a, float4 b, float sum) {
  return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}

// Caps a score in base 2: cap * tanh(score / cap) (Gemma 2), where CAP_BITS are the bits of the
// cap, 0 for none. The exponent is limited to where tanh is 1 in a float.
template <int CAP_BITS>
float capped(float score) {
  if (CAP_BITS == 0) {
    return score;
  }
  const float cap = as_type<float>(CAP_BITS) * LOG2_E;
  const float power = fast::exp2(min(score * (2 * LOG2_E / cap), 32.0f));
  return cap - 2 * cap / (power + 1);
}

// The final factor of the accumulated values. The highest score is in base 2; the sink is one more
// logit, without a value.
inline float softmax_norm(float highest, float sum, float sink) {
  const float finite_sink = max(sink, LOWEST / 2) * LOG2_E;
  const float top = max(highest, finite_sink);
  const float share = fast::exp2(highest - top);
  return share / fma(sum, share, fast::exp2(finite_sink - top));
}

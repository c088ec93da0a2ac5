// Encodes K and V rows of a ragged batch in an affine format and writes them into their slots, and
// rotates queries where keys are rotated.
//
// It computes in float and in the order of ops/formats.py, so that slabs have the bits of plain
// MLX. No product is followed by a sum, which a compiler might fuse.
//
// template   BLOCK_SIZE, ROTATES (whether keys and queries are rotated)
// inputs     key_rows, value_rows  T [num_tokens, num_kv_heads, KEY_DIM or VALUE_DIM]
//            queries               T [num_queries, num_heads, KEY_DIM]; anything where none are
//                                  rotated, and num_queries is 0 below
//            slot_mapping          int [max(num_tokens, 8)]; a slot below 0 is padding, skipped
//            num_tokens            int
//            rotation_scale        float
//            fence_in              int [8]
// outputs    rotated               T, as queries; [8] zeros if there are none
//            fence_out             int [8]
// grid       (max(RowLoads<KEY_DIM>::LANES, RowLoads<VALUE_DIM>::LANES, 8), num_kv_heads,
//            2 * num_tokens + num_queries * num_heads / num_kv_heads): rows of keys, of values, of
//            queries

const int lane = thread_position_in_grid.x;
const int kv_head = thread_position_in_grid.y;
const int slice = thread_position_in_grid.z;
const int num_kv_heads = threads_per_grid.y;

if (kv_head == 0 && slice == 0) {
  pass_fence(fence_in, fence_out, lane);
  if (lane < 8 && threads_per_grid.z == 2 * uint(num_tokens)) {
    rotated[lane] = T(0);
  }
}

const bool is_key = slice < num_tokens;
const bool is_value = !is_key && slice < 2 * num_tokens;
const int token = is_key ? slice : is_value ? slice - num_tokens : slice - 2 * num_tokens;
const int slot = is_key || is_value ? slot_mapping[token] : 0;
const int block_id = slot / BLOCK_SIZE;
const int offset = slot % BLOCK_SIZE;
const Index stored = slab_row<Index, BLOCK_SIZE>(block_id, offset, kv_head, num_kv_heads);
if (is_value) {
  float row[RowLoads<VALUE_DIM>::LOADS * 8];
  load_floats<T, VALUE_DIM>(
      value_rows + packed_row<VALUE_DIM>(token, kv_head, num_kv_heads), lane, row);
  if (slot >= 0) {
    ValueFormat::encode(value_slabs, stored, row, lane);
  }
} else {
  const size_t from = packed_row<KEY_DIM>(token, kv_head, num_kv_heads);
  float row[RowLoads<KEY_DIM>::LOADS * 8];
  load_floats<T, KEY_DIM>((is_key ? key_rows : queries) + from, lane, row);
  if (ROTATES) {
    rotate_row<KEY_DIM>(row, lane, thread_index_in_simdgroup, rotation_scale);
  }
  if (!is_key) {
    store_floats<T, KEY_DIM>(rotated + from, lane, row);
  } else if (slot >= 0) {
    KeyFormat::encode(key_slabs, stored, row, lane);
  }
}

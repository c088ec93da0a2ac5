// Writes K and V rows of a ragged batch into their slots, in place.
//
// template   T (element), BLOCK_SIZE, HEAD_DIM
// inputs     key_rows, value_rows  T [num_tokens, num_kv_heads, HEAD_DIM]
//            key_slab, value_slab  T [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM], written
//            slot_mapping          int [max(num_tokens, 8)]; a slot below 0 is padding, skipped
//            fence_in              int [8]
// outputs    fence_out             int [8]
// grid       (HEAD_DIM / 4, num_tokens, num_kv_heads), a thread for each four elements of a row

const uint column = thread_position_in_grid.x;
const int row = thread_position_in_grid.y;
const int kv_head = thread_position_in_grid.z;
const int num_kv_heads = threads_per_grid.z;
using Vec = vec<T, 4>;

if (row == 0 && kv_head == 0) {
  pass_fence(fence_in, fence_out, column);
}

const int slot = slot_mapping[row];
if (slot >= 0) {
  const size_t from = packed_row<HEAD_DIM>(row, kv_head, num_kv_heads);
  const size_t to =
      slab_row<BLOCK_SIZE, HEAD_DIM>(slot / BLOCK_SIZE, slot % BLOCK_SIZE, kv_head, num_kv_heads);
  ((device Vec*)(in_place(key_slab) + to))[column] = ((const device Vec*)(key_rows + from))[column];
  ((device Vec*)(in_place(value_slab) + to))[column] =
      ((const device Vec*)(value_rows + from))[column];
}

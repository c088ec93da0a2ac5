// Writes one part of the K and V rows of a ragged batch into their slots, in place and bit for bit.
//
// template   PIECE (bytes that a thread copies), KEY_PIECES, VALUE_PIECES (of a row), BLOCK_SIZE
// inputs     key_rows, value_rows  [num_tokens, num_kv_heads, KEY_PIECES or VALUE_PIECES pieces]
//            key_slab, value_slab  [num_blocks, num_kv_heads, BLOCK_SIZE, the same], written
//            slot_mapping          int [max(num_tokens, 8)]; a slot below 0 is padding, skipped
//            fence_in              int [8]
// outputs    fence_out             int [8]
// grid       (max(KEY_PIECES, VALUE_PIECES, 8), num_tokens, num_kv_heads), a thread for each piece

const int piece = thread_position_in_grid.x;
const int row = thread_position_in_grid.y;
const int kv_head = thread_position_in_grid.z;
const int num_kv_heads = threads_per_grid.z;

if (row == 0 && kv_head == 0) {
  pass_fence(fence_in, fence_out, piece);
}

const int slot = slot_mapping[row];
if (slot >= 0) {
  const int block_id = slot / BLOCK_SIZE;
  const int offset = slot % BLOCK_SIZE;
  const size_t to = slab_row<size_t, BLOCK_SIZE>(block_id, offset, kv_head, num_kv_heads);
  if (piece < KEY_PIECES) {
    copy_piece<PIECE>(
        key_rows, packed_row<KEY_PIECES>(row, kv_head, num_kv_heads) + piece, slab_to_write(key_slab),
        to * KEY_PIECES + piece);
  }
  if (piece < VALUE_PIECES) {
    copy_piece<PIECE>(
        value_rows, packed_row<VALUE_PIECES>(row, kv_head, num_kv_heads) + piece,
        slab_to_write(value_slab),
        to * VALUE_PIECES + piece);
  }
}

// Copies the tokens of several block tables out of the slabs of one part, bit for bit: one sequence
// after another, heads first, as MLX's own attention reads them.
//
// template   PIECE (bytes that a thread copies), KEY_PIECES, VALUE_PIECES (of a row), BLOCK_SIZE
// inputs     key_slab, value_slab  [num_blocks, num_kv_heads, BLOCK_SIZE, KEY_PIECES or VALUE_PIECES
//                                  pieces]
//            plan                  int [...], laid out by ops/gather_plan.py
//            fence_in              int [8]
// outputs    keys, values          [num_tokens * num_kv_heads, KEY_PIECES or VALUE_PIECES pieces]: of
//                                  one sequence after another, [num_kv_heads, its tokens, ...] each
//            fence_out             int [8]
// grid       (max(KEY_PIECES, VALUE_PIECES, 8), BLOCK_SIZE * number of blocks in the tables,
//            num_kv_heads), a thread for each piece of a slot

const int piece = thread_position_in_grid.x;
const int slot = thread_position_in_grid.y;
const int kv_head = thread_position_in_grid.z;
const int num_kv_heads = threads_per_grid.z;

if (slot == 0 && kv_head == 0) {
  pass_fence(fence_in, fence_out, piece);
}

const GatheredToken token = gathered_token<BLOCK_SIZE>(plan, slot, threads_per_grid.y / BLOCK_SIZE,
                                                       kv_head, num_kv_heads);
if (token.is_present) {
  const int offset = slot % BLOCK_SIZE;
  const size_t row = slab_row<size_t, BLOCK_SIZE>(token.block_id, offset, kv_head, num_kv_heads);
  if (piece < KEY_PIECES) {
    copy_piece<PIECE>(key_slab, row * KEY_PIECES + piece, keys, token.row * KEY_PIECES + piece);
  }
  if (piece < VALUE_PIECES) {
    copy_piece<PIECE>(value_slab, row * VALUE_PIECES + piece, values,
                      token.row * VALUE_PIECES + piece);
  }
}

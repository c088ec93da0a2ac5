// Like gather_blocks for affine K and V, with dequantisation, for prefill. An element, scale *
// number + bias, is rounded once to float and once to T.
//
// template   BLOCK_SIZE
// inputs     plan                  int [...], laid out by ops/gather_plan.py
//            fence_in              int [8]
// outputs    keys, values          T [num_tokens * num_kv_heads, KEY_DIM or VALUE_DIM]: of one
//                                  sequence after another, [num_kv_heads, its tokens, ...] each
//            fence_out             int [8]
// grid       (max(KEY_DIM / 8, VALUE_DIM / 8, 8), BLOCK_SIZE * number of blocks in the tables,
//            num_kv_heads), a thread for each eight elements of a slot

const int load = thread_position_in_grid.x;
const int slot = thread_position_in_grid.y;
const int kv_head = thread_position_in_grid.z;
const int num_kv_heads = threads_per_grid.z;

if (slot == 0 && kv_head == 0) {
  pass_fence(fence_in, fence_out, load);
}

const GatheredToken token = gathered_token<BLOCK_SIZE>(plan, slot, threads_per_grid.y / BLOCK_SIZE,
                                                       kv_head, num_kv_heads);
const int offset = slot % BLOCK_SIZE;
const Index row = slab_row<Index, BLOCK_SIZE>(token.block_id, offset, kv_head, num_kv_heads);
if (token.is_present && load < KEY_DIM / 8) {
  dequantize_load<KeyFormat>(key_slabs, row, load, keys + token.row * KEY_DIM);
}
if (token.is_present && load < VALUE_DIM / 8) {
  dequantize_load<ValueFormat>(value_slabs, row, load, values + token.row * VALUE_DIM);
}

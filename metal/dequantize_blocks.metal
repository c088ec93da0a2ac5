// What gather_blocks does, of affine K and V and dequantised, for prefill. An element is rounded
// once to float and once to T, from scale * number + bias.
//
// template   BLOCK_SIZE
// inputs     plan                  int [...], laid out by ops/gather_plan.py
//            fence_in              int [8]
// outputs    keys, values          T [num_tokens * num_kv_heads, HEAD_DIM]: of one sequence after
//                                  another, [num_kv_heads, its tokens, HEAD_DIM] each
//            fence_out             int [8]
// grid       (max(HEAD_DIM / 8, 8), BLOCK_SIZE * number of blocks in the tables, num_kv_heads), a
//            thread for each eight elements of a slot

const int load = thread_position_in_grid.x;
const int slot = thread_position_in_grid.y;
const int kv_head = thread_position_in_grid.z;
const int num_kv_heads = threads_per_grid.z;

if (slot == 0 && kv_head == 0) {
  pass_fence(fence_in, fence_out, load);
}

const GatheredToken token = gathered_token<BLOCK_SIZE>(plan, slot, threads_per_grid.y / BLOCK_SIZE,
                                                       kv_head, num_kv_heads);
if (token.is_present && load < HEAD_DIM / 8) {
  const int offset = slot % BLOCK_SIZE;
  const int group = load / Keys::SCALE_LOADS;
  const typename Keys::Rows key = Keys::template block_rows<BLOCK_SIZE>(
      stored_keys, token.block_id, offset, kv_head, num_kv_heads);
  const typename Values::Rows value = Values::template block_rows<BLOCK_SIZE>(
      stored_values, token.block_id, offset, kv_head, num_kv_heads);
  const typename Keys::Scaling key_scaling = Keys::scaling(key, 0, group);
  const typename Values::Scaling value_scaling = Values::scaling(value, 0, group);
  device vec<T, 4>* keys_to = (device vec<T, 4>*)(keys + token.row * HEAD_DIM) + 2 * load;
  device vec<T, 4>* values_to = (device vec<T, 4>*)(values + token.row * HEAD_DIM) + 2 * load;
  UNROLL
  for (int part = 0; part < 2; part++) {
    keys_to[part] = vec<T, 4>(Keys::elements(Keys::load(key, 0, load, 0), part, key_scaling));
    values_to[part] = vec<T, 4>(Values::elements(Values::load(value, 0, load, 0), part, value_scaling));
  }
}

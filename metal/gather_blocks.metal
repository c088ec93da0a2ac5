// Copies the tokens of several block tables out of the slabs, each sequence's by itself and heads
// first, as MLX's own attention reads them.
//
// template   T (element), BLOCK_SIZE, HEAD_DIM
// inputs     key_slab, value_slab  T [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
//            plan                  int [...], laid out by ops/gather_plan.py
//            fence_in              int [8]
// outputs    keys, values          T [num_tokens * num_kv_heads, HEAD_DIM]: of one sequence after
//                                  another, [num_kv_heads, its tokens, HEAD_DIM] each
//            fence_out             int [8]
// grid       (HEAD_DIM / 4, BLOCK_SIZE * number of blocks in the tables, num_kv_heads), a thread
//            for each four elements of a slot

const uint column = thread_position_in_grid.x;
const int slot = thread_position_in_grid.y;
const int kv_head = thread_position_in_grid.z;
const int num_gathered_blocks = threads_per_grid.y / BLOCK_SIZE;
const int num_kv_heads = threads_per_grid.z;
using Vec = vec<T, 4>;

if (slot == 0 && kv_head == 0) {
  pass_fence(fence_in, fence_out, column);
}

// Read the plan: a block's id and its sequence; the sequence's first block, first token and length.
const int index = slot / BLOCK_SIZE;
const device int* block = plan + 2 * index;
const device int* seq = plan + 2 * num_gathered_blocks + 3 * block[1];
const int position = (index - seq[0]) * BLOCK_SIZE + slot % BLOCK_SIZE;
const int num_tokens = seq[2];

if (position < num_tokens) {
  const size_t from =
      slab_row<BLOCK_SIZE, HEAD_DIM>(block[0], slot % BLOCK_SIZE, kv_head, num_kv_heads);
  const size_t to =
      (size_t(seq[1]) * num_kv_heads + size_t(kv_head) * num_tokens + position) * HEAD_DIM;
  ((device Vec*)(keys + to))[column] = ((const device Vec*)(key_slab + from))[column];
  ((device Vec*)(values + to))[column] = ((const device Vec*)(value_slab + from))[column];
}

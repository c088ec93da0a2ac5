// Copies the tokens of one block table out of the slabs, heads first, as MLX's own attention reads
// them.
//
// template   T (element), BLOCK_SIZE, HEAD_DIM
// inputs     key_slab, value_slab  T [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
//            block_table           int [max(num_blocks of the table, 8)]
//            fence_in              int [8]
// outputs    keys, values          T [num_kv_heads, num_tokens, HEAD_DIM]
//            fence_out             int [8]
// grid       (HEAD_DIM / 4, num_tokens, num_kv_heads), a thread for each four elements of a row

const uint column = thread_position_in_grid.x;
const int position = thread_position_in_grid.y;
const int kv_head = thread_position_in_grid.z;
const int num_tokens = threads_per_grid.y;
const int num_kv_heads = threads_per_grid.z;
using Vec = vec<T, 4>;

if (position == 0 && kv_head == 0) {
  pass_fence(fence_in, fence_out, column);
}

const int block_id = block_table[position / BLOCK_SIZE];
const size_t from =
    slab_row<BLOCK_SIZE, HEAD_DIM>(block_id, position % BLOCK_SIZE, kv_head, num_kv_heads);
const size_t to = (size_t(kv_head) * num_tokens + position) * HEAD_DIM;
((device Vec*)(keys + to))[column] = ((const device Vec*)(key_slab + from))[column];
((device Vec*)(values + to))[column] = ((const device Vec*)(value_slab + from))[column];

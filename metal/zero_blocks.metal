// Fills whole blocks of the slabs with zeros, in place.
//
// template   T (element)
// inputs     key_slab, value_slab  T [num_blocks, num_kv_heads, block_size, head_dim], written
//            block_ids             int [max(number of blocks, 8)]
//            fence_in              int [8]
// outputs    fence_out             int [8]
// grid       (elements of a block / 4, number of blocks, 1), a thread for each four elements

const uint column = thread_position_in_grid.x;
const int row = thread_position_in_grid.y;
const size_t block_length = threads_per_grid.x;
using Vec = vec<T, 4>;

if (row == 0) {
  pass_fence(fence_in, fence_out, column);
}

const size_t to = block_ids[row] * block_length + column;
((device Vec*)in_place(key_slab))[to] = Vec(T(0));
((device Vec*)in_place(value_slab))[to] = Vec(T(0));

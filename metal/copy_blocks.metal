// Copies whole blocks within the slabs, in place: copy-on-write.
//
// template   T (element)
// inputs     key_slab, value_slab  T [num_blocks, num_kv_heads, block_size, head_dim], written
//            src_dst_pairs         int [max(num_pairs, 4), 2]; no block is both a source and a
//                                  destination
//            fence_in              int [8]
// outputs    fence_out             int [8]
// grid       (elements of a block / 4, num_pairs, 1), a thread for each four elements

const uint column = thread_position_in_grid.x;
const int pair = thread_position_in_grid.y;
const size_t block_length = threads_per_grid.x;
using Vec = vec<T, 4>;

if (pair == 0) {
  pass_fence(fence_in, fence_out, column);
}

const size_t from = src_dst_pairs[2 * pair] * block_length + column;
const size_t to = src_dst_pairs[2 * pair + 1] * block_length + column;
((device Vec*)in_place(key_slab))[to] = ((const device Vec*)key_slab)[from];
((device Vec*)in_place(value_slab))[to] = ((const device Vec*)value_slab)[from];

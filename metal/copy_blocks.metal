// Copies whole blocks within the slabs of one part, in place and bit for bit: copy-on-write.
//
// template   PIECE (bytes that a thread copies), KEY_PIECES, VALUE_PIECES (of a row)
// inputs     key_slab, value_slab  [num_blocks, num_kv_heads, block_size, KEY_PIECES or VALUE_PIECES
//                                  pieces], written
//            src_dst_pairs         int [max(num_pairs, 4), 2]; no block is both a source and a
//                                  destination
//            fence_in              int [8]
// outputs    fence_out             int [8]
// grid       (rows of a block * max(KEY_PIECES, VALUE_PIECES), num_pairs, 1), a thread for each piece

const uint piece = thread_position_in_grid.x;
const int pair = thread_position_in_grid.y;
const uint num_rows = threads_per_grid.x / uint(max(KEY_PIECES, VALUE_PIECES));

if (pair == 0) {
  pass_fence(fence_in, fence_out, piece);
}

const size_t source = src_dst_pairs[2 * pair];
const size_t destination = src_dst_pairs[2 * pair + 1];
const uint num_key_pieces = num_rows * KEY_PIECES;
const uint num_value_pieces = num_rows * VALUE_PIECES;
if (piece < num_key_pieces) {
  copy_piece<PIECE>(key_slab, source * num_key_pieces + piece, slab_to_write(key_slab),
                    destination * num_key_pieces + piece);
}
if (piece < num_value_pieces) {
  copy_piece<PIECE>(value_slab, source * num_value_pieces + piece, slab_to_write(value_slab),
                    destination * num_value_pieces + piece);
}

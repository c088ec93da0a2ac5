// In front of a body that reads slabs of affine K and V.
//
// template   T (element of scales and biases), HEAD_DIM, KEY_BITS, VALUE_BITS,
//            SCALE_GROUP (numbers of a row that share a scale and a bias)
// inputs     key_slab              uint [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM * KEY_BITS /
//                                  32]
//            key_scales, key_biases  T [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM /
//                                  SCALE_GROUP]
//            value_slab, value_scales, value_biases  the same with VALUE_BITS

constexpr int KEY_DIM = HEAD_DIM, VALUE_DIM = HEAD_DIM;
using Keys = Affine<T, HEAD_DIM, KEY_BITS, SCALE_GROUP>;
using Values = Affine<T, HEAD_DIM, VALUE_BITS, SCALE_GROUP>;
const typename Keys::Rows stored_keys = {key_slab, key_scales, key_biases, 0};
const typename Values::Rows stored_values = {value_slab, value_scales, value_biases, 0};
// New rows are encoded into their slots before anything reads them.
constexpr bool TAKES_ROWS = false, STORES_VALUES = true;
const typename Keys::Rows new_keys = stored_keys;
const typename Values::Rows new_values = stored_values;

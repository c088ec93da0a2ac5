// The first part of a body that reads slabs of affine K and V.
//
// template   T (element of scales and biases), Index (of rows of slabs and of their loads), KEY_DIM,
//            VALUE_DIM, KEY_BITS, VALUE_BITS,
//            KEY_GROUP, VALUE_GROUP (numbers of a row that share a scale and a bias)
// inputs     key_slab              uint [num_blocks, num_kv_heads, BLOCK_SIZE, KEY_DIM * KEY_BITS /
//                                  32]
//            key_scales, key_biases  T [num_blocks, num_kv_heads, BLOCK_SIZE, KEY_DIM / KEY_GROUP]
//            value_slab, value_scales, value_biases  the same of VALUE_DIM numbers

using KeyFormat = Affine<T, KEY_DIM, KEY_BITS, KEY_GROUP>;
using ValueFormat = Affine<T, VALUE_DIM, VALUE_BITS, VALUE_GROUP>;
const typename KeyFormat::Rows key_slabs = {key_slab, key_scales, key_biases};
const typename ValueFormat::Rows value_slabs = {value_slab, value_scales, value_biases};
// New rows are encoded into their slots before anything reads them.
constexpr bool TAKES_ROWS = false;
const typename KeyFormat::Rows new_keys = key_slabs;
const typename ValueFormat::Rows new_values = value_slabs;

// The first part of a body that reads dense K and V, and takes new rows and writes them.
//
// template   T (element), Index (of rows of slabs and of their loads), KEY_DIM, VALUE_DIM
// inputs     key_slab, value_slab  T [num_blocks, num_kv_heads, BLOCK_SIZE, KEY_DIM or VALUE_DIM],
//                                  written
//            key_rows, value_rows  T [num_tokens, num_kv_heads, KEY_DIM or VALUE_DIM]

using KeyFormat = Dense<T, KEY_DIM>;
using ValueFormat = Dense<T, VALUE_DIM>;
const typename KeyFormat::Rows key_slabs = {key_slab}, new_keys = {key_rows};
const typename ValueFormat::Rows value_slabs = {value_slab}, new_values = {value_rows};
constexpr bool TAKES_ROWS = true;

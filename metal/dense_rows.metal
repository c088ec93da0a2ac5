// In front of a body that reads dense K and V, takes new rows and writes them.
//
// template   T (element), KEY_DIM, VALUE_DIM
// inputs     key_slab, value_slab  T [num_blocks, num_kv_heads, BLOCK_SIZE, KEY_DIM or VALUE_DIM],
//                                  written
//            key_rows, value_rows  T [num_tokens, num_kv_heads, KEY_DIM or VALUE_DIM]

using Keys = Dense<T, KEY_DIM>;
using Values = Dense<T, VALUE_DIM>;
const typename Keys::Rows stored_keys = {key_slab};
const typename Values::Rows stored_values = {value_slab};
constexpr bool TAKES_ROWS = true, STORES_VALUES = true;
const typename Keys::Rows new_keys = {key_rows};
const typename Values::Rows new_values = {value_rows};

// Behind affine_slabs.metal, in front of a body that takes new rows and writes them.
//
// inputs     key_rows, key_row_scales, key_row_biases  [num_tokens, num_kv_heads, ...] of the widths
//                                  of the slabs
//            value_rows, value_row_scales, value_row_biases  the same

const typename Keys::Rows new_keys = {key_rows, key_row_scales, key_row_biases, 0};
const typename Values::Rows new_values = {value_rows, value_row_scales, value_row_biases, 0};

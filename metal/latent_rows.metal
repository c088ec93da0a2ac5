// In front of a body that reads latents in the place of keys and their rotated keys in that of
// values, takes new rows of both and writes them.
//
// template   T (element), LATENT_DIM, ROPE_DIM
// inputs     key_slab, value_slab  T [num_blocks, 1, BLOCK_SIZE, LATENT_DIM or ROPE_DIM], written
//            key_rows, value_rows  T [num_tokens, 1, LATENT_DIM or ROPE_DIM]

constexpr int KEY_DIM = LATENT_DIM + ROPE_DIM, VALUE_DIM = LATENT_DIM;
using Keys = Latents<T, LATENT_DIM, ROPE_DIM>;
using Values = Dense<T, LATENT_DIM>;
const typename Keys::Rows stored_keys = {{key_slab}, {value_slab}};
const typename Values::Rows stored_values = {key_slab};
constexpr bool TAKES_ROWS = true, STORES_VALUES = false;
const typename Keys::Rows new_keys = {{key_rows}, {value_rows}};
const typename Values::Rows new_values = {key_rows};

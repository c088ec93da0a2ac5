// Multiplies a few rows by the transposed weight of a linear layer. A simdgroup decodes COLUMNS
// rows of the weight, which are columns of the result, once for ROWS rows of x.
//
// A lane takes the same chunks of K in the same order whatever ROWS, COLUMNS and num_rows are, and
// lanes and simdgroups are added up as one tree. So the bits of a row depend on itself, the weight
// and the number of simdgroups that share K. ops/rows_matmul.py has the same order in plain MLX.
//
// template   T (element of x), MODE, BITS (both of metal/weight_formats.h), ROWS, COLUMNS
// inputs     x                     T [..., K]
//            weight                uint [N, K * BITS / 32], or T [N, K] if dense
//            scales, biases        T or uchar [N, K / group size]; anything where there are none
//            num_rows              int, of x
//            log2_group_size       int
// outputs    out                   T [..., N]
// grid       (32 * ceil(num_rows / ROWS), splits, ceil(N / COLUMNS), rounded up to whole
//            threadgroups), threadgroup (32, splits, blocks), of MAX_SIMDGROUPS or fewer

using Weights = WeightFormat<T, MODE, BITS>;
constexpr int CHUNK = Weights::CHUNK, MAX_SIMDGROUPS = 8;

const int lane = thread_index_in_simdgroup;
const int simdgroup = simdgroup_index_in_threadgroup;
const int split = thread_position_in_grid.y;
const int splits = threads_per_grid.y;
const int num_columns = weight_shape[0];
const int row_chunks = weight_shape[1] / Weights::SIZE;
const int row_groups = row_chunks * CHUNK >> log2_group_size;
// Where fewer rows or columns are left, some before them are computed again, and not stored.
const int first_new_row = threadgroup_position_in_grid.x * ROWS;
const int first_new_column = thread_position_in_grid.z * COLUMNS;
const int first_row = min(first_new_row, num_rows - ROWS);
const int first_column = min(first_new_column, num_columns - COLUMNS);

float sums[ROWS][COLUMNS];
UNROLL
for (int r = 0; r < ROWS; r++) {
  UNROLL
  for (int c = 0; c < COLUMNS; c++) {
    sums[r][c] = 0;
  }
}
for (int chunk = split * SIMDGROUP_LANES + lane; chunk < row_chunks;
     chunk += splits * SIMDGROUP_LANES) {
  const int weight_chunk = first_column * row_chunks + chunk;
  const int group = first_column * row_groups + (chunk * CHUNK >> log2_group_size);
  typename Weights::Load loads[COLUMNS];
  UNROLL
  for (int c = 0; c < COLUMNS; c++) {
    Weights::load(weight, weight_chunk + c * row_chunks, scales, biases, group + c * row_groups,
                  loads[c]);
  }
  UNROLL
  for (int first = 0; first < CHUNK; first += 8) {
    const int eight = (first_row * row_chunks + chunk) * (CHUNK / 8) + first / 8;
    float inputs[ROWS][8];
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      load_eight<T>(x, eight + r * row_chunks * (CHUNK / 8), inputs[r]);
    }
    UNROLL
    for (int c = 0; c < COLUMNS; c++) {
      UNROLL
      for (int i = 0; i < 8; i++) {
        const float factor = Weights::weight(loads[c], first + i);
        UNROLL
        for (int r = 0; r < ROWS; r++) {
          sums[r][c] = fma(factor, inputs[r][i], sums[r][c]);
        }
      }
    }
  }
}

// Add up the lanes, those 16 apart first. While a lane has several columns, it keeps half of them
// and sends the others. Each column ends up in SIMDGROUP_LANES / COLUMNS lanes.
threadgroup float split_sums[MAX_SIMDGROUPS * ROWS * COLUMNS];
UNROLL
for (int r = 0; r < ROWS; r++) {
  int column = 0;
  UNROLL
  for (int distance = SIMDGROUP_LANES / 2, kept = COLUMNS / 2; distance > 0;
       distance /= 2, kept /= 2) {
    const bool is_upper = (lane & distance) != 0;
    UNROLL
    for (int c = 0; c < kept; c++) {
      const float lower = sums[r][c], upper = sums[r][c + kept];
      sums[r][c] = (is_upper ? upper : lower) +
                   simd_shuffle_xor(is_upper ? lower : upper, distance);
    }
    if (kept == 0) {
      sums[r][0] += simd_shuffle_xor(sums[r][0], distance);
    }
    column += is_upper ? kept : 0;
  }
  if (lane % (SIMDGROUP_LANES / COLUMNS) == 0) {
    split_sums[(simdgroup * ROWS + r) * COLUMNS + column] = sums[r][0];
  }
}

// The first of the simdgroups that share columns adds up the others, and stores the result.
threadgroup_barrier(mem_flags::mem_threadgroup);
if (split == 0) {
  for (int i = lane; i < ROWS * COLUMNS; i += SIMDGROUP_LANES) {
    const int at = simdgroup * ROWS * COLUMNS + i;
    float sum = split_sums[at];
    for (int other = 1; other < splits; other++) {
      sum += split_sums[at + other * ROWS * COLUMNS];
    }
    const int row = first_row + i / COLUMNS, column = first_column + i % COLUMNS;
    if (row >= first_new_row && column >= first_new_column) {
      out[uint(row) * uint(num_columns) + uint(column)] = T(sum);
    }
  }
}

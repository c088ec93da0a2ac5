// Rows that are encoded: how they lie over lanes as floats, and their rotation.

// How a row of WIDTH numbers is spread over the LANES lanes that encode it: LOADS loads of eight
// numbers in each, LANES apart. Lanes past its end have a copy of its last load.
template <int WIDTH>
struct RowLoads {
  static constant constexpr int LANES =
      WIDTH > 128 ? 32 : WIDTH > 64 ? 16 : WIDTH > 32 ? 8 : 4;
  static constant constexpr int LOADS = (WIDTH / 8 + LANES - 1) / LANES;
};

template <typename T, int WIDTH>
void load_floats(const device T* from, int lane,
                 thread float (&row)[RowLoads<WIDTH>::LOADS * 8]) {
  UNROLL
  for (int n = 0; n < RowLoads<WIDTH>::LOADS; n++) {
    const int at = min(lane + n * RowLoads<WIDTH>::LANES, WIDTH / 8 - 1);
    UNROLL
    for (int part = 0; part < 2; part++) {
      constexpr bool IS_ONE_LOAD = sizeof(T) == 2;
      const uint4 load = ((const device uint4*)from)[IS_ONE_LOAD ? at : 2 * at + part];
      const float4 four = Packed<T>::floats(load, IS_ONE_LOAD ? part : 0);
      UNROLL
      for (int i = 0; i < 4; i++) {
        row[n * 8 + part * 4 + i] = four[i];
      }
    }
  }
}

template <typename T, int WIDTH>
void store_floats(device T* to, int lane, thread float (&row)[RowLoads<WIDTH>::LOADS * 8]) {
  UNROLL
  for (int n = 0; n < RowLoads<WIDTH>::LOADS; n++) {
    const int at = lane + n * RowLoads<WIDTH>::LANES;
    UNROLL
    for (int part = 0; part < 2; part++) {
      const thread float* four = row + n * 8 + part * 4;
      if (at < WIDTH / 8) {
        ((device vec<T, 4>*)to)[2 * at + part] =
            vec<T, 4>(float4(four[0], four[1], four[2], four[3]));
      }
    }
  }
}

// Which elements of each row of MLX's Hadamard matrix of 12 are -1, from the lowest bit on.
constant constexpr ushort NEGATIVE_OF_12[12] = {0x002, 0xaab, 0x3c8, 0x96e, 0xf20, 0x5ba,
                                                0xc8c, 0x6e6, 0x23c, 0xb96, 0x8f0, 0xe5a};

// Multiplies a row by the normalised Hadamard matrix, in the order of mx.hadamard_transform on a
// CPU: sums and differences of elements 1, 2, 4 and so on apart; if the width is 12 times a power
// of two, this is done in each of twelve parts, followed by signed sums over the parts.
template <int WIDTH>
void rotate_row(thread float (&row)[RowLoads<WIDTH>::LOADS * 8], int lane, int lane_of_32,
                float scale) {
  constexpr int LANES = RowLoads<WIDTH>::LANES, LOADS = RowLoads<WIDTH>::LOADS;
  constexpr int NUM_PARTS = WIDTH % 3 == 0 ? 12 : 1;
  constexpr int PART_LANES = NUM_PARTS > 1 ? WIDTH / NUM_PARTS / 8 : LANES;
  UNROLL
  for (int n = 0; n < LOADS * 8; n += 8) {
    UNROLL
    for (int distance = 1; distance < 8; distance *= 2) {
      UNROLL
      for (int i = 0; i < 8; i++) {
        if ((i & distance) == 0) {
          const float first = row[n + i], second = row[n + i + distance];
          row[n + i] = first + second;
          row[n + i + distance] = first - second;
        }
      }
    }
  }
  UNROLL
  for (int distance = 1; distance < PART_LANES; distance *= 2) {
    UNROLL
    for (int i = 0; i < LOADS * 8; i++) {
      const float other = simd_shuffle_xor(row[i], distance);
      row[i] = (lane & distance) == 0 ? row[i] + other : other - row[i];
    }
  }
  if (NUM_PARTS > 1) {
    const uint negative = NEGATIVE_OF_12[min(lane / PART_LANES, 11)];
    UNROLL
    for (int i = 0; i < 8; i++) {
      float sum = 0;
      for (int part = 0; part < 12; part++) {
        const int from = lane_of_32 - lane + part * PART_LANES + lane % PART_LANES;
        const float other = simd_shuffle(row[i], ushort(from));
        sum = (negative >> part & 1) != 0 ? sum - other : sum + other;
      }
      row[i] = sum;
    }
  } else {
    UNROLL
    for (int i = 0; i < LOADS * 8 / 2 && LOADS == 2; i++) {
      const float first = row[i], second = row[i + 8];
      row[i] = first + second;
      row[i + 8] = first - second;
    }
  }
  UNROLL
  for (int i = 0; i < LOADS * 8; i++) {
    row[i] *= scale;
  }
}

// How rows of queries, keys and values lie in memory, and what lanes make of them: the only place
// that knows. A format is a struct; paged_attention.metal is written once for all of them.
//
// Dense    elements of T, sixteen bytes to a load
// Affine   unsigned numbers of BITS bits, packed into words from the lowest bit on, with a scale
//          and a bias of T for each SCALE_GROUP of them, as mx.quantize leaves them: an element is
//          scale * number + bias. Eight numbers are a load.
//
// Nothing is dequantised in the inner loop. Numbers become floats by a mask alone: a half whose
// lower bits are n is the denormal n * 2^-24, which a float holds exactly. (A device that flushes
// denormal halves fails the check at start-up.) Scale and bias are folded into sums over the lanes
// that share them: q . k = scale * (q . numbers) + bias * sum(q), and over keys the weighted values
// are sum((weight * scale) * numbers) + sum(weight * bias).
//
// Where a lane has several loads of a row, those of a dense one lie LANES apart, so that lanes load
// side by side, and those of an affine one are neighbours, so that they share a scaling.
//
// What a format has:
//   Rows                   where rows lie, from one on
//   Load, LOAD_SIZE        what a lane loads at a time, and how many elements that is
//   SCALE_LOADS            loads of a row that share a scaling
//   NEIGHBOURS             whether the loads of a lane are neighbours
//   CHUNK_LOADS            loads of keys, and of values, that registers hold beside rows of queries
//   Scaling                what makes elements of numbers
//   block_rows, scaling    memory
//   load, store            load n of a lane, in its place of a row
//   newest               where the row of a new token is: among rows, or in its slot
//   encode               (Affine) stores a row of floats
//   floats                 elements 4 * part to 4 * part + 3 of a load: numbers without scaling
//   prepare_query          what queries become before they meet floats of keys
//   scaled                 a product of queries and floats of keys, scaled
//   weighed, add_bias      what a key's weight becomes before it meets floats of values
//   finished               a sum of weighed floats of values, made elements

// Sixteen bytes of a row of T, and its elements as floats.
//   floats           elements 4 * part to 4 * part + 3 of a load of keys or values
//   query_floats     the same of a load of queries, after prepare_query
//   query_times      a load of prepared queries, each four of them times a factor
//   prepare_query    for a query row that lies over LANES lanes; returns a factor for its scores
template <typename T>
struct Packed;

template <typename T, int LANES, int LOADS>
float queries_to_halves(thread uint4 (&query)[LOADS]);

template <>
struct Packed<float> {
  static constant constexpr int CHUNK_LOADS = 8;
  static float4 floats(uint4 load, int) {
    return as_type<float4>(load);
  }
  static float4 query_floats(uint4 load, int) {
    return as_type<float4>(load);
  }
  static uint4 query_times(uint4 load, float4 factor) {
    return as_type<uint4>(as_type<float4>(load) * factor);
  }
  template <int LANES, int LOADS>
  static float prepare_query(thread uint4 (&query)[LOADS]) {
    return 1;
  }
};

template <>
struct Packed<half> {
  static constant constexpr int CHUNK_LOADS = 8;
  static float4 floats(uint4 load, int part) {
    return float4(as_type<half4>(part == 0 ? load.xy : load.zw));
  }
  static float4 query_floats(uint4 load, int part) {
    return floats(load, part);
  }
  static uint4 query_times(uint4 load, float4 factor) {
    return uint4(as_type<uint2>(half4(floats(load, 0) * factor)),
                 as_type<uint2>(half4(floats(load, 1) * factor)));
  }
  template <int LANES, int LOADS>
  static float prepare_query(thread uint4 (&query)[LOADS]) {
    return 1;
  }
};

template <>
struct Packed<bfloat> {
  // Widened once for all rows, an element takes two registers.
  static constant constexpr int CHUNK_LOADS = 4;
  // A bfloat is the upper half of a float: a shift for even elements, a mask for odd ones.
  static float4 floats(uint4 load, int part) {
    const uint2 bits = part == 0 ? load.xy : load.zw;
    return float4(as_type<float>(bits.x << 16), as_type<float>(bits.x & 0xffff0000u),
                  as_type<float>(bits.y << 16), as_type<float>(bits.y & 0xffff0000u));
  }
  static float4 query_floats(uint4 load, int part) {
    return Packed<half>::floats(load, part);
  }
  static uint4 query_times(uint4 load, float4 factor) {
    return Packed<half>::query_times(load, factor);
  }
  template <int LANES, int LOADS>
  static float prepare_query(thread uint4 (&query)[LOADS]) {
    return queries_to_halves<bfloat, LANES>(query);
  }
};

// Queries are used once per key and row, and the multiplier takes a half as it is. So they become
// halves, times a power of two that puts the largest of a row between 2^14 and 2^15. Then all down
// to 2^-28 of it are exact: a half has more bits than a bfloat. Returns the inverse of the power.
template <typename T, int LANES, int LOADS>
float queries_to_halves(thread uint4 (&query)[LOADS]) {
  float4 largest = float4(1e-30f);
  UNROLL
  for (int n = 0; n < LOADS; n++) {
    const float4 low = Packed<T>::floats(query[n], 0), high = Packed<T>::floats(query[n], 1);
    largest = max(largest, max(max(low, -low), max(high, -high)));
  }
  const float size =
      max_over_lanes<1, LANES>(max(max(largest.x, largest.y), max(largest.z, largest.w)));
  const float power = as_type<float>(as_type<uint>(size) & 0x7f800000u) * (1.0f / 16384);
  const float inverse = 1 / power;
  UNROLL
  for (int n = 0; n < LOADS; n++) {
    query[n] = uint4(as_type<uint2>(half4(Packed<T>::floats(query[n], 0) * inverse)),
                     as_type<uint2>(half4(Packed<T>::floats(query[n], 1) * inverse)));
  }
  return power;
}

// How a row of WIDTH elements lies over LANES lanes, LOADS loads in each: load n of column c, of
// ROW_LOADS, is number place(c, n). Past the end of a row nothing is there, and lanes read its last
// load again. SHARERS neighbours hold what shares a scaling.
template <typename Format, int WIDTH, int LANES>
struct RowOverLanes {
  static constant constexpr int ROW_LOADS = WIDTH / Format::LOAD_SIZE;
  static constant constexpr int LOADS = (ROW_LOADS + LANES - 1) / LANES;
  static constant constexpr bool EVEN = LOADS * LANES == ROW_LOADS;
  static constant constexpr int SCALE_LANES = Format::SCALE_LOADS / LOADS;
  static constant constexpr int SHARERS = int(SCALE_LANES) > LANES ? LANES : int(SCALE_LANES);

  static int place(int column, int n) {
    return Format::NEIGHBOURS ? column * LOADS + n : column + n * LANES;
  }
  static bool is_there(int column, int n) {
    return EVEN || place(column, n) < ROW_LOADS;
  }
  static int readable(int column, int n) {
    const int last = ROW_LOADS - 1;
    return EVEN ? place(column, n) : min(place(column, n), last);
  }
};

template <typename T, int WIDTH>
struct Dense {
  struct Rows {
    const device T* elements;
  };
  using Load = uint4;
  static constant constexpr int LOAD_SIZE = 16 / sizeof(T);
  static constant constexpr int SCALE_LOADS = WIDTH;  // all share none
  static constant constexpr bool NEIGHBOURS = false;
  static constant constexpr int CHUNK_LOADS = Packed<T>::CHUNK_LOADS;
  struct Scaling {
    float none;
  };

  template <int BLOCK_SIZE>
  static Rows block_rows(Rows slab, int block_id, int offset, int kv_head, int num_kv_heads) {
    Rows rows;
    rows.elements =
        slab.elements + slab_row<BLOCK_SIZE, WIDTH>(block_id, offset, kv_head, num_kv_heads);
    return rows;
  }
  static Rows newest(bool has_rows, Rows rows, int token, int kv_head, int num_kv_heads,
                     Rows slot) {
    const device T* row = rows.elements + packed_row<WIDTH>(token, kv_head, num_kv_heads);
    rows.elements = has_rows ? row : slot.elements;
    return rows;
  }
  static Load load(Rows rows, uint row, int place, int) {
    return ((const device Load*)rows.elements)[row * (WIDTH / LOAD_SIZE) + place];
  }
  static void store(Rows rows, int place, int, Load value) {
    ((device Load*)slab_to_write(rows.elements))[place] = value;
  }
  static Scaling scaling(Rows, uint, int) {
    return {0};
  }

  static float4 floats(Load load, int part) {
    return Packed<T>::floats(load, part);
  }
  template <int LANES, int SHARERS, int LOADS>
  static float prepare_query(thread uint4 (&query)[LOADS], thread float&) {
    return Packed<T>::template prepare_query<LANES>(query);
  }
  static float scaled(float product, Scaling, float) {
    return product;
  }
  static float weighed(float weight, Scaling) {
    return weight;
  }
  static float add_bias(float, float, float, Scaling) {
    return 0;
  }
  static float4 finished(float4 sum, float) {
    return sum;
  }
};

// Latents, and behind them the rotated keys that all heads share, which lie in a slab of their own
// (multi-head latent attention, DeepSeek-V2, 2024). Values are the latents again, a Dense row: their
// loads are those of the keys, which the compiler makes once.
template <typename T, int LATENT_DIM, int ROPE_DIM>
struct Latents {
  using Latent = Dense<T, LATENT_DIM>;
  using Rope = Dense<T, ROPE_DIM>;
  struct Rows {
    typename Latent::Rows latents;
    typename Rope::Rows rope_keys;
  };
  using Load = uint4;
  using Scaling = typename Latent::Scaling;
  static constant constexpr int LOAD_SIZE = Latent::LOAD_SIZE;
  static constant constexpr int SCALE_LOADS = LATENT_DIM + ROPE_DIM;
  static constant constexpr bool NEIGHBOURS = false;
  static constant constexpr int CHUNK_LOADS = 6;
  // A row lies over all lanes: the first loads of each are of latents, the last is of rotated keys.
  static constant constexpr int LATENT_LOADS = LATENT_DIM / LOAD_SIZE;

  template <int BLOCK_SIZE>
  static Rows block_rows(Rows slab, int block_id, int offset, int kv_head, int num_kv_heads) {
    Rows rows;
    rows.latents = Latent::template block_rows<BLOCK_SIZE>(slab.latents, block_id, offset, kv_head,
                                                           num_kv_heads);
    rows.rope_keys = Rope::template block_rows<BLOCK_SIZE>(slab.rope_keys, block_id, offset,
                                                           kv_head, num_kv_heads);
    return rows;
  }
  static Rows newest(bool has_rows, Rows rows, int token, int kv_head, int num_kv_heads,
                     Rows slot) {
    rows.latents =
        Latent::newest(has_rows, rows.latents, token, kv_head, num_kv_heads, slot.latents);
    rows.rope_keys =
        Rope::newest(has_rows, rows.rope_keys, token, kv_head, num_kv_heads, slot.rope_keys);
    return rows;
  }
  static Load load(Rows rows, uint row, int place, int n) {
    if (n * SIMDGROUP_LANES < LATENT_LOADS) {
      return Latent::load(rows.latents, row, place, n);
    }
    return Rope::load(rows.rope_keys, row, place - LATENT_LOADS, n);
  }
  static void store(Rows rows, int place, int n, Load value) {
    if (n * SIMDGROUP_LANES < LATENT_LOADS) {
      Latent::store(rows.latents, place, n, value);
    } else {
      Rope::store(rows.rope_keys, place - LATENT_LOADS, n, value);
    }
  }
  static Scaling scaling(Rows, uint, int) {
    return {0};
  }
  static float4 floats(Load load, int part) {
    return Latent::floats(load, part);
  }
  template <int LANES, int SHARERS, int LOADS>
  static float prepare_query(thread uint4 (&query)[LOADS], thread float&) {
    return Packed<T>::template prepare_query<LANES>(query);
  }
  static float scaled(float product, Scaling, float) {
    return product;
  }
};

// The least half: a half whose lower bits are n is n times as large.
constant constexpr float LEAST_HALF = 1.0f / 16777216;

// What numbers of a group count: the first one stands for the bias.
struct Steps {
  float scale;
  float bias;
};

// Eight numbers of BITS bits as floats, times LEAST_HALF; those in odd places are ODD times as large
// again. Back, they are packed, and steps says what they count between the ends of a range.
template <int BITS>
struct Numbers;

template <>
struct Numbers<8> {
  using Load = uint2;
  static constant constexpr int ODD = 1;
  static float4 floats(Load load, int part) {
    const uint word = part == 0 ? load.x : load.y;
    const half2 even = as_type<half2>(word & 0x00ff00ffu);
    const half2 odd = as_type<half2>(word >> 8 & 0x00ff00ffu);
    return float4(float(even.x), float(odd.x), float(even.y), float(odd.y));
  }
  static Load pack(thread uint (&n)[8]) {
    return uint2(n[0] | n[1] << 8 | n[2] << 16 | n[3] << 24,
                 n[4] | n[5] << 8 | n[6] << 16 | n[7] << 24);
  }
  // From the end of the range that is farther from zero, in steps of which zero is one.
  static Steps steps(float low, float high) {
    const bool from_low = max(low, -low) > max(high, -high);
    const float end = from_low ? low : high;
    const float least = max((high - low) / 255, 1e-7f);
    const float step = from_low ? least : -least;
    const float zero = rint(end / step);
    const float whole = end / (zero == 0 ? 1 : zero);
    return {zero == 0 ? step : whole, zero == 0 ? 0 : end};
  }
};

template <>
struct Numbers<4> {
  using Load = uint;
  static constant constexpr int ODD = 16;
  static float4 floats(Load load, int part) {
    const half2 a = as_type<half2>(load & 0x000f000fu);
    const half2 b = as_type<half2>(load & 0x00f000f0u);
    const half2 c = as_type<half2>(load >> 8 & 0x000f000fu);
    const half2 d = as_type<half2>(load >> 8 & 0x00f000f0u);
    return part == 0 ? float4(float(a.x), float(b.x), float(c.x), float(d.x))
                     : float4(float(a.y), float(b.y), float(c.y), float(d.y));
  }
  static Load pack(thread uint (&n)[8]) {
    return n[0] | n[1] << 4 | n[2] << 8 | n[3] << 12 | n[4] << 16 | n[5] << 20 | n[6] << 24 |
           n[7] << 28;
  }
  // From the upper end. Of so few steps, one to reach zero would be much.
  static Steps steps(float low, float high) {
    return {(low - high) / 15, high};
  }
};

// A row of WIDTH numbers over the LANES lanes that encode it, LOADS loads of eight in each, LANES
// apart. Lanes past its end have a copy of its last load.
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
// CPU: sums and differences of neighbours, then of what lies 2, 4 and so on apart; where the width is
// 12 times a power of two, of its twelve parts, sums of all, each by its sign.
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

template <typename T, int WIDTH, int BITS, int SCALE_GROUP>
struct Affine {
  // A slab has fewer than 2^32 scales, so one number says where those of a row are.
  struct Rows {
    const device uint* numbers;
    const device T* scales;
    const device T* biases;
    uint first_scale;
  };
  using Load = typename Numbers<BITS>::Load;
  static constant constexpr int LOAD_SIZE = 8;
  static constant constexpr int SCALE_LOADS = SCALE_GROUP / LOAD_SIZE;
  static constant constexpr bool NEIGHBOURS = true;
  static constant constexpr int CHUNK_LOADS = 8;
  static constant constexpr int ROW_BYTES = WIDTH * BITS / 8;
  static constant constexpr int ROW_SCALES = WIDTH / SCALE_GROUP;
  static constant constexpr int ODD = Numbers<BITS>::ODD;
  struct Scaling {
    float scale;  // of floats
    float bias;
  };

  template <int BLOCK_SIZE>
  static Rows block_rows(Rows slab, int block_id, int offset, int kv_head, int num_kv_heads) {
    const size_t at = slab_row<BLOCK_SIZE, ROW_BYTES>(block_id, offset, kv_head, num_kv_heads);
    const uint row = (uint(block_id) * uint(num_kv_heads) + kv_head) * BLOCK_SIZE + offset;
    slab.numbers = (const device uint*)((const device uchar*)slab.numbers + at);
    slab.first_scale = row * ROW_SCALES;
    return slab;
  }
  static Rows newest(bool, Rows, int, int, int, Rows slot) {
    return slot;
  }
  static Load load(Rows rows, uint row, int place, int) {
    return ((const device Load*)rows.numbers)[row * (WIDTH / LOAD_SIZE) + place];
  }
  static void store(Rows rows, int place, int, Load value) {
    ((device Load*)slab_to_write(rows.numbers))[place] = value;
  }
  static Scaling scaling(Rows rows, uint row, int group) {
    const uint at = rows.first_scale + row * ROW_SCALES + group;
    return {float(rows.scales[at]) * (1 / LEAST_HALF), float(rows.biases[at])};
  }

  // Stores a row of floats.
  static void encode(Rows slot, thread float (&row)[RowLoads<WIDTH>::LOADS * 8], int lane) {
    UNROLL
    for (int n = 0; n < RowLoads<WIDTH>::LOADS; n++) {
      float low = row[n * 8], high = row[n * 8];
      UNROLL
      for (int i = 1; i < 8; i++) {
        low = min(low, row[n * 8 + i]);
        high = max(high, row[n * 8 + i]);
      }
      high = max_over_lanes<1, SCALE_LOADS>(high);
      low = -max_over_lanes<1, SCALE_LOADS>(-low);
      const Steps steps = Numbers<BITS>::steps(low, high);
      const float divisor = steps.scale == 0 ? 1 : steps.scale;
      uint numbers[8];
      UNROLL
      for (int i = 0; i < 8; i++) {
        const float number = rint((row[n * 8 + i] - steps.bias) / divisor);
        numbers[i] = uint(min(max(number, 0.0f), float((1 << BITS) - 1)));
      }
      const int at = lane + n * RowLoads<WIDTH>::LANES;
      if (at < WIDTH / 8) {
        store(slot, at, n, Numbers<BITS>::pack(numbers));
        if (at % SCALE_LOADS == 0) {
          const uint group = slot.first_scale + at / SCALE_LOADS;
          slab_to_write(slot.scales)[group] = T(steps.scale);
          slab_to_write(slot.biases)[group] = T(steps.bias);
        }
      }
    }
  }

  static float4 floats(Load load, int part) {
    return Numbers<BITS>::floats(load, part);
  }
  static float4 elements(Load load, int part, Scaling scaling) {
    const float4 numbers = finished(floats(load, part), 0);
    return fma(numbers, float4(scaling.scale), float4(scaling.bias));
  }
  // Queries in odd places make up for keys in odd places that are too large. As halves they need
  // room for that.
  template <int LANES, int SHARERS, int LOADS>
  static float prepare_query(thread uint4 (&query)[LOADS], thread float& sum) {
    constexpr bool IS_HALF = sizeof(T) == 2;
    const float factor = IS_HALF && ODD > 1
                             ? queries_to_halves<T, LANES>(query)
                             : Packed<T>::template prepare_query<LANES>(query);
    float4 sums = float4(0);
    UNROLL
    for (int n = 0; n < LOADS; n++) {
      sums += Packed<T>::query_floats(query[n], 0);
      if (IS_HALF) {
        sums += Packed<T>::query_floats(query[n], 1);
      }
      if (ODD > 1) {
        query[n] = Packed<T>::query_times(query[n], float4(1, 1.0f / ODD, 1, 1.0f / ODD));
      }
    }
    sum = sum_over_lanes<1, SHARERS>(sums.x + sums.y + (sums.z + sums.w));
    return factor;
  }
  static float scaled(float product, Scaling scaling, float query_sum) {
    return fma(product, scaling.scale, scaling.bias * query_sum);
  }
  static float weighed(float weight, Scaling scaling) {
    return weight * scaling.scale;
  }
  static float add_bias(float sum, float factor, float weight, Scaling scaling) {
    return fma(sum, factor, weight * scaling.bias);
  }
  static float4 finished(float4 sum, float bias) {
    return fma(sum, float4(1, 1.0f / ODD, 1, 1.0f / ODD), float4(bias));
  }
};

// Affine rows: unsigned numbers, with a scale and a bias for each group of them.
//
// A mask alone converts numbers to floats: a half whose lower bits are n is the denormal n * 2^-24,
// which a float represents exactly. (A device that flushes denormal halves fails the start-up
// check.) Scale and bias are folded into sums over the lanes that share them: q . k = scale * (q .
// numbers) + bias * sum(q), and over keys the weighted values are sum((weight * scale) * numbers) +
// sum(weight * bias).

// The smallest positive half: a half whose lower bits are n is n times as large.
constant constexpr float LEAST_HALF = 1.0f / 16777216;

// The quantisation steps of a group: number 0 is the bias.
struct Steps {
  float scale;
  float bias;
};

// Eight numbers of BITS bits as floats, times LEAST_HALF; those in odd places are another factor of
// ODD too large. pack is the inverse, and steps returns the quantisation steps of a range.
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
  // From the end of the range that is farther from zero, with zero as one of the steps.
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
  // From the upper end. With 15 steps, shifting the range to include zero would cost too much.
  static Steps steps(float low, float high) {
    return {(low - high) / 15, high};
  }
};

template <typename T, int ROW_WIDTH, int BITS, int SCALE_GROUP>
struct Affine {
  struct Rows {
    const device uint* numbers;
    const device T* scales;
    const device T* biases;
  };
  using Element = T;
  using Load = typename Numbers<BITS>::Load;
  static constant constexpr int WIDTH = ROW_WIDTH, QUERY_WIDTH = ROW_WIDTH;
  static constant constexpr int LOAD_SIZE = 8, QUERY_LOADS = 8 * sizeof(T) / 16;
  static constant constexpr int REST_LOADS = SCALE_GROUP / LOAD_SIZE, MAX_SHARERS = SIMDGROUP_LANES;
  static constant constexpr bool NEIGHBOURS = true;
  static constant constexpr int CHUNK_LOADS = 8, LATENT_CHUNK_LOADS = 4;
  static constant constexpr int ROW_SCALES = WIDTH / SCALE_GROUP;
  static constant constexpr int ODD = Numbers<BITS>::ODD;
  struct Rest {
    float scale;  // of floats
    float bias;
  };
  struct QueryRest {
    float sum;  // over the lanes that share a rest
  };

  static Rows newest(bool, Rows, Rows slab) {
    return slab;
  }
  template <typename Index>
  static Load load(Rows rows, Index row, int place) {
    return ((const device Load*)rows.numbers)[row * (WIDTH / LOAD_SIZE) + place];
  }
  template <typename Index>
  static void store(Rows rows, Index row, int place, Load value) {
    ((device Load*)slab_to_write(rows.numbers))[row * (WIDTH / LOAD_SIZE) + place] = value;
  }
  template <typename Index>
  static Rest rest(Rows rows, Index row, int place, int) {
    const Index at = row * ROW_SCALES + place / REST_LOADS;
    return {float(rows.scales[at]) * (1 / LEAST_HALF), float(rows.biases[at])};
  }

  template <typename Index>
  static void store_rest(Rows, Index, int, Rest) {}
  // Stores floats as a row.
  template <typename Index>
  static void encode(Rows rows, Index row, thread float (&values)[RowLoads<WIDTH>::LOADS * 8],
                     int lane) {
    UNROLL
    for (int n = 0; n < RowLoads<WIDTH>::LOADS; n++) {
      float low = values[n * 8], high = values[n * 8];
      UNROLL
      for (int i = 1; i < 8; i++) {
        low = min(low, values[n * 8 + i]);
        high = max(high, values[n * 8 + i]);
      }
      high = max_over_lanes<1, REST_LOADS>(high);
      low = -max_over_lanes<1, REST_LOADS>(-low);
      const Steps steps = Numbers<BITS>::steps(low, high);
      const float divisor = steps.scale == 0 ? 1 : steps.scale;
      uint numbers[8];
      UNROLL
      for (int i = 0; i < 8; i++) {
        const float number = rint((values[n * 8 + i] - steps.bias) / divisor);
        numbers[i] = uint(min(max(number, 0.0f), float((1 << BITS) - 1)));
      }
      const int at = lane + n * RowLoads<WIDTH>::LANES;
      if (at < WIDTH / 8) {
        store(rows, row, at, Numbers<BITS>::pack(numbers));
        if (at % REST_LOADS == 0) {
          const Index group = row * ROW_SCALES + at / REST_LOADS;
          slab_to_write(rows.scales)[group] = T(steps.scale);
          slab_to_write(rows.biases)[group] = T(steps.bias);
        }
      }
    }
  }

  static float4 floats(Load load, int part) {
    return Numbers<BITS>::floats(load, part);
  }
  static float4 query_floats(uint4 load, int part) {
    return Packed<T>::query_floats(load, part);
  }
  static float4 elements(Load load, int part, Rest rest) {
    const float4 numbers = finished(floats(load, part), 0);
    return fma(numbers, float4(rest.scale), float4(rest.bias));
  }
  static void load_query_rest(const device T*, int, thread QueryRest&) {}
  // Queries in odd places are scaled down, since keys in odd places are too large. Half-precision
  // queries are scaled up first, so that they lose no bits.
  template <int LANES, int SHARERS, int LOADS>
  static float prepare_query(thread uint4 (&query)[LOADS], thread QueryRest& rest) {
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
    rest.sum = sum_over_lanes<1, SHARERS>(sums.x + sums.y + (sums.z + sums.w));
    return factor;
  }
  static float scaled(float product, Rest rest, const thread QueryRest& query_rest) {
    return fma(product, rest.scale, rest.bias * query_rest.sum);
  }
  static float weighed(float weight, Rest rest) {
    return weight * rest.scale;
  }
  static float add_bias(float sum, float factor, float weight, Rest rest) {
    return fma(sum, factor, weight * rest.bias);
  }
  static float4 finished(float4 sum, float bias) {
    return fma(sum, float4(1, 1.0f / ODD, 1, 1.0f / ODD), float4(bias));
  }
};

// Writes the eight elements of one load of a row, rounded once to float and once to T.
template <typename Format, typename Index, typename T>
void dequantize_load(typename Format::Rows rows, Index row, int place, device T* to) {
  const typename Format::Rest rest = Format::rest(rows, row, place, 0);
  const typename Format::Load load = Format::load(rows, row, place);
  UNROLL
  for (int part = 0; part < 2; part++) {
    ((device vec<T, 4>*)to)[2 * place + part] = vec<T, 4>(Format::elements(load, part, rest));
  }
}

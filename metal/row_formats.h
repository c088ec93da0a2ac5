// How rows of queries, keys and values are stored and decoded. Only this file and the two below
// depend on it. A format is a struct; paged_attention.metal is written once for all of them.
//
// Dense    elements of T, sixteen bytes to a load
// Affine   (affine_rows.h) unsigned numbers of BITS bits, packed into words from the lowest bit on,
//          with a scale and a bias of T for each SCALE_GROUP of them, as by mx.quantize: an element
//          is scale * number + bias. Eight numbers are a load.
// Latents  (latent_rows.h) two rows of either, one of which is keys and values
//
// Nothing is dequantised in the inner loop: scale and bias are folded into sums over the lanes that
// share them. The data of a row outside its loads, which neighbouring lanes share, is its rest.
//
// If a lane has several loads of a row, those of a dense row are LANES apart, so that loads of
// neighbouring lanes are adjacent, and those of an affine row are adjacent, so that they share a
// rest.
//
// Members of a format:
//   Rows                   pointers to rows
//   WIDTH, QUERY_WIDTH     elements of a row over the lanes, and of a query
//   Load, LOAD_SIZE        what a lane loads at a time, and its number of elements
//   QUERY_LOADS            loads of queries, sixteen bytes each, per load of keys
//   REST_LOADS, MAX_SHARERS  loads of a row that share a rest, and the most lanes that do
//   NEIGHBOURS             whether the loads of a lane are adjacent
//   CHUNK_LOADS            loads of keys, and of values, that fit registers next to query rows
//   LATENT_CHUNK_LOADS     the same for keys that are also values and stay floats in between
//   Rest, QueryRest        of a row of keys or values, and of one of queries
//   load, store            a load, by the index of a row and its place in it
//   rest                   loads the rest of a row
//   newest                 where the rows of new tokens are: in the inputs, or in their slots
//   store_rest             stores the data of a new row outside its loads
//   encode                 (Affine) stores floats as a row
//   floats                 elements 4 * part to 4 * part + 3 of a load: numbers without scaling
//   load_query_rest        loads the data of a query outside its loads
//   prepare_query          prepares queries to be multiplied by floats of keys
//   scaled                 applies the rest to a product of queries and floats of keys
//   weighed, add_bias      apply the rest of values to a key's weight
//   finished               converts a sum of weighted floats of values to elements

// Sixteen bytes of a row of T, and its elements as floats.
//   floats           elements 4 * part to 4 * part + 3 of a load of keys or values
//   query_floats     the same of a load of queries, after prepare_query
//   query_times      a load of prepared queries, each four elements times a factor
//   prepare_query    for a query row over LANES lanes; returns a factor for its scores
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
  // An element, widened once for all query rows, takes two registers.
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

// Converts queries, which are used once per key and row, to halves, which the multiplier takes
// without conversion. They are scaled by a power of two that puts the largest of a row between 2^14
// and 2^15. Then all elements down to 2^-28 of it are exact, since a half has more bits than a
// bfloat. Returns the inverse of the power.
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

template <int A, int B>
struct LeastOf {
  static constant constexpr int value = A < B ? A : B;
};

// How a row of WIDTH elements is spread over LANES lanes, LOADS loads in each: load n of column c
// is load place(c, n) of the row's ROW_LOADS. Lanes past the end of a row read its last load.
// SHARERS neighbouring lanes share a rest.
template <typename Format, int WIDTH, int LANES>
struct RowOverLanes {
  static constant constexpr int ROW_LOADS = WIDTH / Format::LOAD_SIZE;
  static constant constexpr int LOADS = (ROW_LOADS + LANES - 1) / LANES;
  static constant constexpr bool EVEN = LOADS * LANES == ROW_LOADS;
  static constant constexpr int MAX_SHARERS = LeastOf<LANES, Format::MAX_SHARERS>::value;
  static constant constexpr int SHARERS = LeastOf<Format::REST_LOADS / LOADS, MAX_SHARERS>::value;

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

template <typename T, int ROW_WIDTH>
struct Dense {
  struct Rows {
    const device T* elements;
  };
  using Element = T;
  using Load = uint4;
  static constant constexpr int WIDTH = ROW_WIDTH, QUERY_WIDTH = ROW_WIDTH;
  static constant constexpr int LOAD_SIZE = 16 / sizeof(T), QUERY_LOADS = 1;
  // The rest is empty, so all lanes share it.
  static constant constexpr int REST_LOADS = ROW_WIDTH, MAX_SHARERS = SIMDGROUP_LANES;
  static constant constexpr bool NEIGHBOURS = false;
  static constant constexpr int CHUNK_LOADS = Packed<T>::CHUNK_LOADS;
  static constant constexpr int LATENT_CHUNK_LOADS = CHUNK_LOADS;
  struct Rest {
    float none;
  };
  using QueryRest = Rest;

  static Rows newest(bool has_rows, Rows rows, Rows slab) {
    rows.elements = has_rows ? rows.elements : slab.elements;
    return rows;
  }
  template <typename Index>
  static Load load(Rows rows, Index row, int place) {
    return ((const device Load*)rows.elements)[row * (WIDTH / LOAD_SIZE) + place];
  }
  template <typename Index>
  static void store(Rows rows, Index row, int place, Load value) {
    ((device Load*)slab_to_write(rows.elements))[row * (WIDTH / LOAD_SIZE) + place] = value;
  }
  template <typename Index>
  static Rest rest(Rows, Index, int, int) {
    return {0};
  }
  template <typename Index>
  static void store_rest(Rows, Index, int, Rest) {}

  static float4 floats(Load load, int part) {
    return Packed<T>::floats(load, part);
  }
  static float4 query_floats(uint4 load, int part) {
    return Packed<T>::query_floats(load, part);
  }
  static void load_query_rest(const device T*, int, thread QueryRest&) {}
  template <int LANES, int SHARERS, int LOADS>
  static float prepare_query(thread uint4 (&query)[LOADS], thread QueryRest&) {
    return Packed<T>::template prepare_query<LANES>(query);
  }
  static float scaled(float product, Rest, const thread QueryRest&) {
    return product;
  }
  static float weighed(float weight, Rest) {
    return weight;
  }
  static float add_bias(float, float, float, Rest) {
    return 0;
  }
  static float4 finished(float4 sum, float) {
    return sum;
  }
};

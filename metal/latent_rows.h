// Latents, and the rotated keys that all heads share, in a separate slab (multi-head latent
// attention, DeepSeek-V2, 2024). Queries have a part for each, and the values are the latents:
// their loads are those of the keys.
//
// The latents are spread over all lanes. Of the rotated keys a lane holds one load, that of the key
// whose score it will have: the rest of that key. Its product is added where the products of all
// lanes are summed, so that no lane multiplies missing elements.
template <typename Latent, typename Rope>
struct Latents {
  struct Rows {
    typename Latent::Rows latents;
    typename Rope::Rows rope_keys;
  };
  using Element = typename Latent::Element;
  using Load = typename Latent::Load;
  static constant constexpr int WIDTH = Latent::WIDTH;
  static constant constexpr int QUERY_WIDTH = Latent::WIDTH + Rope::WIDTH;
  static constant constexpr int LOAD_SIZE = Latent::LOAD_SIZE, QUERY_LOADS = Latent::QUERY_LOADS;
  static constant constexpr int ROPE_LOADS = Rope::WIDTH / Rope::LOAD_SIZE;
  static constant constexpr int REST_LOADS = Latent::REST_LOADS;
  static constant constexpr int MAX_SHARERS = SIMDGROUP_LANES / ROPE_LOADS;
  static constant constexpr bool NEIGHBOURS = Latent::NEIGHBOURS;
  static constant constexpr int CHUNK_LOADS = Latent::LATENT_CHUNK_LOADS;
  struct Rest {
    typename Latent::Rest latent;
    typename Rope::Load rope_load;
    typename Rope::Rest rope;
  };
  struct QueryRest {
    typename Latent::QueryRest latent;
    uint4 rope_loads[Rope::QUERY_LOADS];
    typename Rope::QueryRest rope;
    float rope_factor;
  };

  static Rows newest(bool has_rows, Rows rows, Rows slab) {
    rows.latents = Latent::newest(has_rows, rows.latents, slab.latents);
    rows.rope_keys = Rope::newest(has_rows, rows.rope_keys, slab.rope_keys);
    return rows;
  }
  template <typename Index>
  static Load load(Rows rows, Index row, int place) {
    return Latent::load(rows.latents, row, place);
  }
  template <typename Index>
  static void store(Rows rows, Index row, int place, Load value) {
    Latent::store(rows.latents, row, place, value);
  }
  template <typename Index>
  static Rest rest(Rows rows, Index row, int place, int lane) {
    Rest rest;
    const int rope_place = lane / MAX_SHARERS;
    rest.latent = Latent::rest(rows.latents, row, place, lane);
    rest.rope_load = Rope::load(rows.rope_keys, row, rope_place);
    rest.rope = Rope::rest(rows.rope_keys, row, rope_place, lane);
    return rest;
  }
  template <typename Index>
  static void store_rest(Rows rows, Index row, int lane, Rest rest) {
    if (lane % MAX_SHARERS == 0) {
      Rope::store(rows.rope_keys, row, lane / MAX_SHARERS, rest.rope_load);
    }
  }

  static float4 floats(Load load, int part) {
    return Latent::floats(load, part);
  }
  static void load_query_rest(const device Element* query, int lane, thread QueryRest& rest) {
    const device uint4* from = (const device uint4*)(query + Latent::WIDTH);
    UNROLL
    for (int n = 0; n < Rope::QUERY_LOADS; n++) {
      rest.rope_loads[n] = from[lane / MAX_SHARERS * Rope::QUERY_LOADS + n];
    }
  }
  template <int LANES, int SHARERS, int LOADS>
  static float prepare_query(thread uint4 (&query)[LOADS], thread QueryRest& rest) {
    const float factor = Latent::template prepare_query<LANES, SHARERS>(query, rest.latent);
    rest.rope_factor = Rope::template prepare_query<LANES, 1>(rest.rope_loads, rest.rope) / factor;
    return factor;
  }
  static float scaled(float product, Rest rest, const thread QueryRest& query_rest) {
    constexpr int PARTS = Rope::LOAD_SIZE / 4, QUERY_PARTS = PARTS / Rope::QUERY_LOADS;
    float rope = 0;
    UNROLL
    for (int part = 0; part < PARTS; part++) {
      const uint4 four = query_rest.rope_loads[part / QUERY_PARTS];
      rope = multiply_add(Rope::query_floats(four, part % QUERY_PARTS),
                          Rope::floats(rest.rope_load, part), rope);
    }
    return fma(Rope::scaled(rope, rest.rope, query_rest.rope), query_rest.rope_factor,
               Latent::scaled(product, rest.latent, query_rest.latent));
  }
};

// What attention reads: keys and values as stored, or latents in place of both.
template <typename Key, typename Value, bool HOLDS_LATENTS>
struct Attended {
  using Keys = Key;
  using Values = Value;
  static typename Keys::Rows keys(typename Key::Rows rows, typename Value::Rows) {
    return rows;
  }
  static typename Values::Rows values(typename Key::Rows, typename Value::Rows rows) {
    return rows;
  }
};
template <typename Key, typename Value>
struct Attended<Key, Value, true> {
  using Keys = Latents<Key, Value>;
  using Values = Key;
  static typename Keys::Rows keys(typename Key::Rows latents, typename Value::Rows rope_keys) {
    typename Keys::Rows rows;
    rows.latents = latents;
    rows.rope_keys = rope_keys;
    return rows;
  }
  static typename Values::Rows values(typename Key::Rows latents, typename Value::Rows) {
    return latents;
  }
};

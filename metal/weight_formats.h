// How weights of a linear layer are stored and decoded, for rows_matmul.metal.
//
// DENSE    elements of T
// AFFINE   unsigned numbers of 2, 3, 4, 5, 6 or 8 bits: a weight is scale * number + bias
// MXFP     floats of 4 (e2m1) or 8 bits (e4m3), with a power of two for each group (e8m0)
// NVFP     floats of 4 bits, with a scale of 8 bits for each group (e4m3)
//
// Numbers are packed into words from the lowest bit on, as by mx.quantize. A format is a struct:
//   CHUNK     neighbouring weights of a row that a lane loads at a time
//   SIZE      elements of the weight array that hold them
//   Load      what it loads
//   load      loads a chunk, by its index among all rows, and the scale and bias of its group
//   weight    weight i of a load, rounded once to float

constant constexpr int DENSE = 0, AFFINE = 1, MXFP = 2, NVFP = 3;

// Eight elements as floats, by their index among all eights.
template <typename T>
void load_eight(const device T* from, int index, thread float (&to)[8]) {
  UNROLL
  for (int part = 0; part < 2; part++) {
    constexpr bool IS_ONE_LOAD = sizeof(T) == 2;
    const uint4 load = ((const device uint4*)from)[IS_ONE_LOAD ? index : 2 * index + part];
    const float4 four = Packed<T>::floats(load, IS_ONE_LOAD ? part : 0);
    UNROLL
    for (int i = 0; i < 4; i++) {
      to[part * 4 + i] = four[i];
    }
  }
}

// How numbers are packed:
//   number   number i of a load as a half
//   unit     what it has to be multiplied by

// One of 2, 4 or 8 bits in the lower or upper half of 16 bits is, masked, a denormal half: an AND
// converts it, and its unit makes up for its place. One of 3, 5 or 6 bits is shifted to the lowest
// bits first. (A device that flushes denormal halves fails the check of the kernel.)
template <int BITS>
struct Integers {
  static constant constexpr bool IS_ALIGNED = 16 % BITS == 0;
  static half number(thread const ushort* parts, int i) {
    const int bit = i * BITS, place = bit % 16;
    const ushort mask = (1 << BITS) - 1;
    ushort part = parts[bit / 16];
    if (IS_ALIGNED) {
      part = place < 8 ? part : ushort(part >> 8);
      return as_type<half>(ushort(part & ushort(mask << place % 8)));
    }
    part = part >> place;
    if (place + BITS > 16) {
      part |= ushort(parts[bit / 16 + 1] << (16 - place));
    }
    return as_type<half>(ushort(part & mask));
  }
  static float unit(int i) {
    return float(1 << (24 - (IS_ALIGNED ? i * BITS % 8 : 0)));
  }
};

// Exponent and mantissa of a small float are shifted to where a half has them, and the sign to its
// place. For 4 bits this is done in two numbers at once, which halves the shifts; for 8 bits, which
// memory bounds anyway, that would take more registers.
template <int BITS>
struct Floats {
  static half number(thread const ushort* parts, int i) {
    const ushort bits = parts[i / 2] >> (i % 2 * 8);
    return as_type<half>(ushort((bits & 127) << 7 | (bits & 128) << 8));
  }
  static float unit(int) {
    return 256;
  }
};
template <>
struct Floats<4> {
  static half number(thread const ushort* parts, int i) {
    const int place = i % 4 * 4, first = i / 8 * 2;
    const uint word = as_type<uint>(ushort2(parts[first], parts[first + 1]));
    const uint numbers = place < 9 ? word << (9 - place) : word >> (place - 9);
    const uint signs = word << (12 - place);
    const half2 two = as_type<half2>((numbers & 0x0e000e00u) | (signs & 0x80008000u));
    return i % 8 < 4 ? two.x : two.y;
  }
  static float unit(int) {
    return 16384;
  }
};

template <int MODE, int BITS>
struct NumberOf {
  using type = Floats<BITS>;
};
template <int BITS>
struct NumberOf<AFFINE, BITS> {
  using type = Integers<BITS>;
};

// The scale of a group as a float.
template <int MODE, typename T>
struct GroupScale {
  using Stored = T;
  static float of(T stored) {
    return float(stored);
  }
};
template <typename T>
struct GroupScale<MXFP, T> {
  using Stored = uchar;
  static float of(uchar stored) {
    return as_type<float>(uint(stored) << 23);
  }
};
template <typename T>
struct GroupScale<NVFP, T> {
  using Stored = uchar;
  static float of(uchar stored) {
    return float(as_type<half>(ushort((stored & 127) << 7))) * 256;
  }
};

template <typename T, int MODE, int BITS>
struct WeightFormat {
  using Scale = typename GroupScale<MODE, T>::Stored;
  using Number = typename NumberOf<MODE, BITS>::type;
  static constant constexpr int CHUNK = BITS == 3 || BITS == 5 ? 32 : 16;
  static constant constexpr int SIZE = CHUNK * BITS / 32;
  struct Load {
    ushort parts[2 * SIZE];
    Scale scale, bias;
  };

  static void load(const device uint* weight, int chunk, const device Scale* scales,
                   const device Scale* biases, int group, thread Load& to) {
    const device uint* from = weight + chunk * SIZE;
    if (SIZE % 2 == 0) {
      UNROLL
      for (int i = 0; i < SIZE / 2; i++) {
        const ushort4 four = ((const device ushort4*)from)[i];
        to.parts[4 * i] = four.x;
        to.parts[4 * i + 1] = four.y;
        to.parts[4 * i + 2] = four.z;
        to.parts[4 * i + 3] = four.w;
      }
    } else {
      UNROLL
      for (int i = 0; i < SIZE; i++) {
        const ushort2 two = ((const device ushort2*)from)[i];
        to.parts[2 * i] = two.x;
        to.parts[2 * i + 1] = two.y;
      }
    }
    to.scale = scales[group];
    if (MODE == AFFINE) {
      to.bias = biases[group];
    }
  }
  static float weight(thread const Load& load, int i) {
    const float number = float(Number::number(load.parts, i));
    const float step = GroupScale<MODE, T>::of(load.scale) * Number::unit(i);
    return MODE == AFFINE ? fma(number, step, float(load.bias)) : number * step;
  }
};

template <typename T, int BITS>
struct WeightFormat<T, DENSE, BITS> {
  static constant constexpr int CHUNK = 8, SIZE = 8, LOADS = sizeof(T) / 2;
  struct Load {
    uint4 bits[LOADS];
  };

  static void load(const device T* weight, int chunk, const device T*, const device T*, int,
                   thread Load& to) {
    UNROLL
    for (int i = 0; i < LOADS; i++) {
      to.bits[i] = ((const device uint4*)weight)[chunk * LOADS + i];
    }
  }
  static float weight(thread const Load& load, int i) {
    return Packed<T>::floats(load.bits[LOADS == 1 ? 0 : i / 4], LOADS == 1 ? i / 4 : 0)[i % 4];
  }
};

// metal::numeric_limits and the constants of <metal_math>.
#pragma once
#include "base.h"

namespace metal {

template <typename T>
struct numeric_limits;

#define INTEGER_LIMITS(T, IS_SIGNED)                                         \
  template <>                                                                \
  struct numeric_limits<T> {                                                 \
    static constexpr bool is_signed = IS_SIGNED;                             \
    static constexpr int digits = 8 * sizeof(T) - IS_SIGNED;                 \
    static constexpr T max() { return T(~ulong(0) >> (64 - digits)); }       \
    static constexpr T lowest() { return IS_SIGNED ? T(-max() - 1) : T(0); } \
    static constexpr T min() { return lowest(); }                            \
  };
INTEGER_LIMITS(char, true)
INTEGER_LIMITS(schar, true)
INTEGER_LIMITS(short, true)
INTEGER_LIMITS(int, true)
INTEGER_LIMITS(long, true)
INTEGER_LIMITS(uchar, false)
INTEGER_LIMITS(ushort, false)
INTEGER_LIMITS(uint, false)
INTEGER_LIMITS(ulong, false)

#define FLOAT_LIMITS(T, MAX, MIN, EPSILON)                           \
  template <>                                                        \
  struct numeric_limits<T> {                                         \
    static constexpr bool is_signed = true;                          \
    static constexpr T max() { return T(MAX); }                      \
    static constexpr T min() { return T(MIN); }                      \
    static constexpr T lowest() { return T(-(MAX)); }                \
    static constexpr T epsilon() { return T(EPSILON); }              \
    static constexpr T infinity() { return T(__builtin_inff()); }    \
    static constexpr T quiet_NaN() { return T(__builtin_nanf("")); } \
  };
FLOAT_LIMITS(float, __FLT_MAX__, __FLT_MIN__, __FLT_EPSILON__)
FLOAT_LIMITS(half, 65504.0f, 0x1p-14f, 0x1p-10f)
FLOAT_LIMITS(bfloat, 0x1.fep127f, 0x1p-126f, 0x1p-7f)

#undef INTEGER_LIMITS
#undef FLOAT_LIMITS

} // namespace metal

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX half(65504.0f)
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_SQRT1_2_F 0.707106781186547524401f

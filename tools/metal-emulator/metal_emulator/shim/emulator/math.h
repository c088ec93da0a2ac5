// The functions of <metal_math>, <metal_common>, <metal_integer> and <metal_geometric> that
// attention kernels use.
//
// Overloads per type rather than templates, so that a mixed call such as max(1, 2u) is as ambiguous
// as on a Mac. Half and bfloat go through float and are rounded once. Contraction is off in the
// build, so a * b + c is two roundings; a Mac in safe mode may fuse it.
#pragma once
#include "limits.h"
#include "vec.h"

// The float builtins of the compiler call these; there is no C library header in a kernel.
extern "C" {
float expf(float);
float exp2f(float);
float logf(float);
float log2f(float);
float log10f(float);
float log1pf(float);
float expm1f(float);
float sinf(float);
float cosf(float);
float tanf(float);
float tanhf(float);
float sinhf(float);
float coshf(float);
float asinf(float);
float acosf(float);
float atanf(float);
float powf(float, float);
float atan2f(float, float);
float fmodf(float, float);
float erff(float);
}

namespace metal {

#define FLOAT_TYPES(X) X(float) X(half) X(bfloat)
#define INTEGER_TYPES(X) \
  X(char) X(schar) X(uchar) X(short) X(ushort) X(int) X(uint) X(long) X(ulong)

#define PUT_OF_ONE(e, NAME) result.e = NAME(a.e);
#define PUT_OF_TWO(e, NAME) a.e = NAME(a.e, b.e);
#define PUT_OF_THREE(e, NAME) a.e = NAME(a.e, b.e, c.e);

// A function of vectors is the function of each element. Behind a vector, a scalar stands for one
// with that element.
#define VEC1(NAME)                                   \
  template <typename T, int N>                       \
  METAL_FUNC auto NAME(vec<T, N> a) {                \
    vec<remove_cv_t<decltype(NAME(a.x))>, N> result; \
    EACH_OF_N(PUT_OF_ONE, NAME)                      \
    return result;                                   \
  }
#define VEC2(NAME)                                               \
  template <typename T, int N>                                   \
  METAL_FUNC vec<T, N> NAME(vec<T, N> a, same_as<vec<T, N>> b) { \
    EACH_OF_N(PUT_OF_TWO, NAME)                                  \
    return a;                                                    \
  }
#define VEC3(NAME)                                                                     \
  template <typename T, int N>                                                         \
  METAL_FUNC vec<T, N> NAME(vec<T, N> a, same_as<vec<T, N>> b, same_as<vec<T, N>> c) { \
    EACH_OF_N(PUT_OF_THREE, NAME)                                                      \
    return a;                                                                          \
  }

// One argument, by way of float.
#define MATH1(NAME, EXPRESSION)                                       \
  METAL_FUNC float NAME(float x) { return EXPRESSION; }               \
  METAL_FUNC half NAME(half x) { return half(NAME(float(x))); }       \
  METAL_FUNC bfloat NAME(bfloat x) { return bfloat(NAME(float(x))); } \
  VEC1(NAME)
#define MATH2(NAME, EXPRESSION)                                                           \
  METAL_FUNC float NAME(float x, float y) { return EXPRESSION; }                          \
  METAL_FUNC half NAME(half x, half y) { return half(NAME(float(x), float(y))); }         \
  METAL_FUNC bfloat NAME(bfloat x, bfloat y) { return bfloat(NAME(float(x), float(y))); } \
  VEC2(NAME)
#define TEST1(NAME, EXPRESSION)                             \
  METAL_FUNC bool NAME(float x) { return EXPRESSION; }      \
  METAL_FUNC bool NAME(half x) { return NAME(float(x)); }   \
  METAL_FUNC bool NAME(bfloat x) { return NAME(float(x)); } \
  VEC1(NAME)

// Each of these exists in metal::, metal::fast:: and metal::precise::. All three are the CPU's
// precise function here.
#define ELEMENTARY                        \
  MATH1(exp, ::expf(x))                   \
  MATH1(exp2, ::exp2f(x))                 \
  MATH1(exp10, ::powf(10.0f, x))          \
  MATH1(log, ::logf(x))                   \
  MATH1(log2, ::log2f(x))                 \
  MATH1(log10, ::log10f(x))               \
  MATH1(sqrt, __builtin_sqrtf(x))         \
  MATH1(rsqrt, 1.0f / __builtin_sqrtf(x)) \
  MATH1(sin, ::sinf(x))                   \
  MATH1(cos, ::cosf(x))                   \
  MATH1(tan, ::tanf(x))                   \
  MATH1(tanh, ::tanhf(x))                 \
  MATH1(sinh, ::sinhf(x))                 \
  MATH1(cosh, ::coshf(x))                 \
  MATH1(asin, ::asinf(x))                 \
  MATH1(acos, ::acosf(x))                 \
  MATH1(atan, ::atanf(x))                 \
  MATH2(pow, ::powf(x, y))                \
  MATH2(powr, ::powf(x, y))               \
  MATH2(atan2, ::atan2f(x, y))            \
  MATH2(fmod, ::fmodf(x, y))              \
  MATH1(fabs, __builtin_fabsf(x))         \
  MATH1(floor, __builtin_floorf(x))       \
  MATH1(ceil, __builtin_ceilf(x))         \
  MATH1(trunc, __builtin_truncf(x))       \
  MATH1(rint, __builtin_rintf(x))         \
  MATH1(round, __builtin_roundf(x))       \
  MATH1(fract, x - __builtin_floorf(x))   \
  MATH2(fmax, __builtin_fmaxf(x, y))      \
  MATH2(fmin, __builtin_fminf(x, y))      \
  MATH2(divide, x / y)

inline namespace common {
ELEMENTARY
}
namespace fast {
ELEMENTARY
}
namespace precise {
ELEMENTARY
}

MATH1(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : x)
MATH1(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
MATH2(copysign, __builtin_copysignf(x, y))
TEST1(isnan, __builtin_isnan(x))
TEST1(isinf, __builtin_isinf(x))
TEST1(isfinite, __builtin_isfinite(x))
TEST1(signbit, __builtin_signbit(x))

#define FLOAT_MIN_MAX(T)                                                                      \
  METAL_FUNC T max(T a, T b) { return T(__builtin_fmaxf(float(a), float(b))); }               \
  METAL_FUNC T min(T a, T b) { return T(__builtin_fminf(float(a), float(b))); }               \
  METAL_FUNC T abs(T a) { return T(__builtin_fabsf(float(a))); }                              \
  METAL_FUNC T fma(T a, T b, T c) { return T(__builtin_fmaf(float(a), float(b), float(c))); } \
  METAL_FUNC T mad(T a, T b, T c) { return fma(a, b, c); }                                    \
  METAL_FUNC T mix(T a, T b, T t) { return a + (b - a) * t; }                                 \
  METAL_FUNC T ldexp(T a, int e) { return T(__builtin_ldexpf(float(a), e)); }
FLOAT_TYPES(FLOAT_MIN_MAX)
#define INTEGER_MIN_MAX(T)                             \
  METAL_FUNC T max(T a, T b) { return a < b ? b : a; } \
  METAL_FUNC T min(T a, T b) { return b < a ? b : a; } \
  METAL_FUNC T abs(T a) { return a < T(0) ? T(-a) : a; }
INTEGER_TYPES(INTEGER_MIN_MAX)
VEC2(max)
VEC2(min)
VEC1(abs)
VEC3(fma)
VEC3(mad)
VEC3(mix)

#define THREE_WAY(T)                                                        \
  METAL_FUNC T clamp(T x, T low, T high) { return min(max(x, low), high); } \
  METAL_FUNC T max3(T a, T b, T c) { return max(a, max(b, c)); }            \
  METAL_FUNC T min3(T a, T b, T c) { return min(a, min(b, c)); }            \
  METAL_FUNC T select(T a, T b, bool choose_b) { return choose_b ? b : a; }
FLOAT_TYPES(THREE_WAY)
INTEGER_TYPES(THREE_WAY)
VEC3(clamp)
VEC3(max3)
VEC3(min3)

template <typename T, int N>
METAL_FUNC vec<T, N> select(vec<T, N> a, same_as<vec<T, N>> b, vec<bool, N> choose_b) {
  for (int i = 0; i < N; i++) a[i] = choose_b[i] ? b[i] : a[i];
  return a;
}

template <typename T, int N>
METAL_FUNC T dot(vec<T, N> a, same_as<vec<T, N>> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += T(a[i] * b[i]);
  return sum;
}
template <typename T, int N>
METAL_FUNC T length_squared(vec<T, N> a) {
  return dot(a, a);
}
template <typename T, int N>
METAL_FUNC T length(vec<T, N> a) {
  return sqrt(dot(a, a));
}

METAL_FUNC bool all(bool a) { return a; }
METAL_FUNC bool any(bool a) { return a; }
template <int N>
METAL_FUNC bool all(vec<bool, N> a) {
  for (int i = 0; i < N; i++)
    if (!a[i]) return false;
  return true;
}
template <int N>
METAL_FUNC bool any(vec<bool, N> a) {
  return !all(!a);
}

METAL_FUNC uint popcount(uint x) { return __builtin_popcount(x); }
METAL_FUNC int popcount(int x) { return __builtin_popcount(uint(x)); }
METAL_FUNC uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
METAL_FUNC int clz(int x) { return int(clz(uint(x))); }
METAL_FUNC uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
METAL_FUNC int ctz(int x) { return int(ctz(uint(x))); }
METAL_FUNC uint extract_bits(uint x, uint offset, uint bits) {
  return bits ? x << (32 - bits - offset) >> (32 - bits) : 0;
}
METAL_FUNC int extract_bits(int x, uint offset, uint bits) {
  return bits ? int(uint(x) << (32 - bits - offset)) >> (32 - bits) : 0;
}
METAL_FUNC uint mulhi(uint a, uint b) { return uint(ulong(a) * b >> 32); }

#undef FLOAT_TYPES
#undef INTEGER_TYPES
#undef EACH_OF_2
#undef EACH_OF_3
#undef EACH_OF_4
#undef EACH_OF_N
#undef PUT_OF_ONE
#undef PUT_OF_TWO
#undef PUT_OF_THREE
#undef VEC1
#undef VEC2
#undef VEC3
#undef MATH1
#undef MATH2
#undef TEST1
#undef ELEMENTARY
#undef FLOAT_MIN_MAX
#undef INTEGER_MIN_MAX
#undef THREE_WAY

} // namespace metal

// Address spaces and scalar types.
#pragma once
#include <stddef.h>

// As <stdint.h> has them, which needs the headers of a C library.
typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __UINTPTR_TYPE__ uintptr_t;

// Numbered address spaces are plain memory to the CPU, but pointers to different ones don't convert
// into each other: a wrong one is a compile error, as on a Mac. The thread address space is the
// default one.
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread

// Without lines of its own, so that what it does is at the caller's line.
#define METAL_FUNC inline __attribute__((always_inline, nodebug))
// What runs between threads, at many places of a kernel. Its loads and stores are no thread's.
#define OUTLINED_FUNC inline __attribute__((noinline, nodebug, no_sanitize("coverage")))
#define METAL_EMULATOR 1

// The compiler calls this to round a float to bfloat, to the nearest, ties to even; few systems'
// libraries have it yet.
extern "C" __attribute__((visibility("hidden"), used)) inline __bf16 __truncsfbf2(float value) {
  uint32_t bits = __builtin_bit_cast(uint32_t, value);
  bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  bits = is_nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
  return __builtin_bit_cast(__bf16, uint16_t(bits >> 16));
}

namespace metal {

using half = _Float16;
using bfloat = __bf16;
using schar = signed char; // what int8_t is here; on a Mac it is char
using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;

template <typename A, typename B>
inline constexpr bool is_same_v = false;
template <typename A>
inline constexpr bool is_same_v<A, A> = true;

template <bool Condition, typename Then, typename Else>
struct conditional {
  using type = Then;
};
template <typename Then, typename Else>
struct conditional<false, Then, Else> {
  using type = Else;
};
template <bool Condition, typename Then, typename Else>
using conditional_t = typename conditional<Condition, Then, Else>::type;

template <bool Condition, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  using type = T;
};
template <bool Condition, typename T = void>
using enable_if_t = typename enable_if<Condition, T>::type;

// A parameter of this type converts its argument instead of deciding what T is.
template <typename T>
struct type_identity {
  using type = T;
};
template <typename T>
using same_as = typename type_identity<T>::type;

template <typename T>
using remove_cv_t = __remove_cv(T);

template <typename T>
inline constexpr bool is_floating_point_v =
    is_same_v<remove_cv_t<T>, float> || is_same_v<remove_cv_t<T>, half> ||
    is_same_v<remove_cv_t<T>, bfloat>;
template <typename T>
inline constexpr bool is_integral_v = __is_integral(T);
template <typename T>
inline constexpr bool is_scalar_v = is_floating_point_v<T> || is_integral_v<T>;

// The bits of one type read as another.
template <typename To, typename From>
METAL_FUNC To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of the same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

} // namespace metal

using namespace metal;

inline namespace literals {
constexpr half operator""h(long double value) { return half(value); }
} // namespace literals

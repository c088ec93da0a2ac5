// Vectors of two to four elements: vec<T, N>, float4, half2, ...
#pragma once
#include "base.h"

namespace metal {

template <typename T, int N>
struct vec;

namespace vec_detail {

template <typename T>
inline constexpr int count = 1;
template <typename T, int N>
inline constexpr int count<vec<T, N>> = N;

template <typename T>
inline constexpr bool is_vec = false;
template <typename T, int N>
inline constexpr bool is_vec<vec<T, N>> = true;

// C++ has no conversion between half and bfloat, only by way of float.
template <typename T, typename U>
METAL_FUNC T convert(U value) {
  if constexpr (is_floating_point_v<T> && is_floating_point_v<U>)
    return T(float(value));
  else
    return T(value);
}

// A vector in memory lies at a multiple of its size. (The detour keeps the compiler from taking
// that for granted.) A device touches all of it, whichever elements are used.
inline void watch_vector(uintptr_t address, int bytes, bool is_store);
template <int Alignment, int Bytes>
METAL_FUNC void check_vector(uintptr_t address, bool is_store) {
  asm("" : "+r"(address));
  if (address % Alignment) __builtin_trap();
#if defined(EMULATOR_WATCHES_ACCESSES)
  watch_vector(address, Bytes, is_store);
#endif
}

// The index of an element; undefined.h has what happens to others.
inline void outside_vector(int index, int count);
METAL_FUNC int checked(int index, int count) {
  if (uint(index) >= uint(count)) outside_vector(index, count);
  return index;
}

} // namespace vec_detail

// DO for each element of a vector of two, of three, of four, and of N in a template, with the rest of
// the arguments. A loop would be unrolled at each of the hundreds of uses in a kernel, which takes a
// sixth of the time that a kernel takes to compile.
#define EACH_OF_2(DO, ...) DO(x __VA_OPT__(, ) __VA_ARGS__) DO(y __VA_OPT__(, ) __VA_ARGS__)
#define EACH_OF_3(DO, ...) EACH_OF_2(DO, __VA_ARGS__) DO(z __VA_OPT__(, ) __VA_ARGS__)
#define EACH_OF_4(DO, ...) EACH_OF_3(DO, __VA_ARGS__) DO(w __VA_OPT__(, ) __VA_ARGS__)
#define EACH_OF_N(DO, ...)                                  \
  EACH_OF_2(DO, __VA_ARGS__)                                \
  if constexpr (N > 2) { DO(z __VA_OPT__(, ) __VA_ARGS__) } \
  if constexpr (N > 3) { DO(w __VA_OPT__(, ) __VA_ARGS__) }

#define PUT_VALUE(e) this->e = value;
#define PUT_OTHER(e) this->e = other.e;
#define PUT_CONVERTED(e) this->e = vec_detail::convert<T>(other.e);
#define STORE_OTHER(e) self.e = other.e;
#define PUT_OPERATION(e, op) a.e = T(a.e op b.e);
#define PUT_COMPARISON(e, op) result.e = a.e op b.e;
#define PUT_PREFIXED(e, op, R) result.e = R(op a.e);

// The copy operations are written out once per address space, because C++ makes only those of the
// default one; explicit object parameters ("this device vec& self") are what lets a member live in
// another address space.
#define VEC_LOAD(SPACE)                                                              \
  METAL_FUNC vec(const SPACE vec& other) {                                           \
    vec_detail::check_vector<alignof(vec), N * sizeof(T)>((uintptr_t)&other, false); \
    EACH(PUT_OTHER)                                                                  \
  }
#define VEC_STORE(SPACE)                                                           \
  METAL_FUNC SPACE vec& operator=(this SPACE vec& self, vec other) {               \
    vec_detail::check_vector<alignof(vec), N * sizeof(T)>((uintptr_t)&self, true); \
    EACH(STORE_OTHER)                                                              \
    return self;                                                                   \
  }

// A swizzle is a property: it reads and writes through these two functions and takes no room.
#define SWIZZLE2(a, b)                                                                     \
  METAL_FUNC vec<T, 2> get_##a##b(this const auto& self) { return {self.a, self.b}; }      \
  METAL_FUNC void put_##a##b(this auto& self, vec<T, 2> v) { self.a = v.x, self.b = v.y; } \
  __declspec(property(get = get_##a##b, put = put_##a##b)) vec<T, 2> a##b;
#define SWIZZLE3(a, b, c)                                                                        \
  METAL_FUNC vec<T, 3> get_##a##b##c(this const auto& self) { return {self.a, self.b, self.c}; } \
  METAL_FUNC void put_##a##b##c(this auto& self, vec<T, 3> v) {                                  \
    self.a = v.x, self.b = v.y, self.c = v.z;                                                    \
  }                                                                                              \
  __declspec(property(get = get_##a##b##c, put = put_##a##b##c)) vec<T, 3> a##b##c;
#define SWIZZLE4(a, b, c, d)                                       \
  METAL_FUNC vec<T, 4> get_##a##b##c##d(this const auto& self) {   \
    return {self.a, self.b, self.c, self.d};                       \
  }                                                                \
  METAL_FUNC void put_##a##b##c##d(this auto& self, vec<T, 4> v) { \
    self.a = v.x, self.b = v.y, self.c = v.z, self.d = v.w;        \
  }                                                                \
  __declspec(property(get = get_##a##b##c##d, put = put_##a##b##c##d)) vec<T, 4> a##b##c##d;
#define COLOUR(colour, axis)                                                    \
  METAL_FUNC T get_##colour(this const auto& self) { return self.axis; }        \
  METAL_FUNC void put_##colour(this auto& self, T value) { self.axis = value; } \
  __declspec(property(get = get_##colour, put = put_##colour)) T colour;

#define VEC_MEMBERS(COUNT)                                                                 \
  static constexpr int N = COUNT;                                                          \
  vec() = default;                                                                         \
  METAL_FUNC vec(T value) {                                                                \
    EACH(PUT_VALUE)                                                                        \
  }                                                                                        \
  template <typename U>                                                                    \
  METAL_FUNC explicit vec(vec<U, N> other) {                                               \
    EACH(PUT_CONVERTED)                                                                    \
  }                                                                                        \
  /* Scalars and shorter vectors one after another, as in float4(position.xy, 0, 1). */    \
  template <typename A, typename B, typename... Rest>                                      \
  METAL_FUNC vec(A a, B b, Rest... rest) {                                                 \
    constexpr int total =                                                                  \
        vec_detail::count<A> + vec_detail::count<B> + (0 + ... + vec_detail::count<Rest>); \
    static_assert(total == N, "the arguments don't add up to the elements of the vector"); \
    put<0>(a, b, rest...);                                                                 \
  }                                                                                        \
  METAL_FUNC vec(const vec& other) {                                                       \
    EACH(PUT_OTHER)                                                                        \
  }                                                                                        \
  METAL_FUNC vec& operator=(vec other) {                                                   \
    EACH(PUT_OTHER)                                                                        \
    return *this;                                                                          \
  }                                                                                        \
  VEC_LOAD(device)                                                                         \
  VEC_LOAD(constant)                                                                       \
  VEC_LOAD(threadgroup)                                                                    \
  VEC_STORE(device)                                                                        \
  VEC_STORE(threadgroup)                                                                   \
  METAL_FUNC auto& operator[](this auto& self, int i) {                                    \
    return (&self.x)[vec_detail::checked(i, N)];                                           \
  }                                                                                        \
  METAL_FUNC T operator[](this vec&& self, int i) {                                        \
    return (&self.x)[vec_detail::checked(i, N)];                                           \
  }                                                                                        \
                                                                                           \
 private:                                                                                  \
  template <int AT, typename A, typename... Rest>                                          \
  METAL_FUNC void put(const A& a, const Rest&... rest) {                                   \
    if constexpr (vec_detail::is_vec<A>) {                                                 \
      for (int i = 0; i < A::N; i++) (&x)[AT + i] = vec_detail::convert<T>(a[i]);          \
    } else {                                                                               \
      (&x)[AT] = vec_detail::convert<T>(a);                                                \
    }                                                                                      \
    if constexpr (sizeof...(Rest) > 0) put<AT + vec_detail::count<A>>(rest...);            \
  }                                                                                        \
                                                                                           \
 public:                                                                                   \
  VEC_OPERATOR(+)                                                                          \
  VEC_OPERATOR(-)                                                                          \
  VEC_OPERATOR(*)                                                                          \
  VEC_OPERATOR(/)                                                                          \
  VEC_OPERATOR(%)                                                                          \
  VEC_OPERATOR(&)                                                                          \
  VEC_OPERATOR(|)                                                                          \
  VEC_OPERATOR(^)                                                                          \
  VEC_OPERATOR(<<)                                                                         \
  VEC_OPERATOR(>>)                                                                         \
  VEC_COMPARISON(==)                                                                       \
  VEC_COMPARISON(!=)                                                                       \
  VEC_COMPARISON(<)                                                                        \
  VEC_COMPARISON(<=)                                                                       \
  VEC_COMPARISON(>)                                                                        \
  VEC_COMPARISON(>=)                                                                       \
  VEC_COMPARISON(&&)                                                                       \
  VEC_COMPARISON(||)                                                                       \
  VEC_PREFIX(-, T)                                                                         \
  VEC_PREFIX(~, T)                                                                         \
  VEC_PREFIX(!, bool)

// Friends by value: an operand in any address space converts, and so does a scalar on either side.
#define VEC_OPERATOR(op)                                          \
  friend METAL_FUNC vec operator op(vec a, vec b) {               \
    EACH(PUT_OPERATION, op)                                       \
    return a;                                                     \
  }                                                               \
  METAL_FUNC auto& operator op## = (this auto& self, vec other) { \
    self = vec(self) op other;                                    \
    return self;                                                  \
  }
#define VEC_COMPARISON(op)                                   \
  friend METAL_FUNC vec<bool, N> operator op(vec a, vec b) { \
    vec<bool, N> result;                                     \
    EACH(PUT_COMPARISON, op)                                 \
    return result;                                           \
  }
#define VEC_PREFIX(op, R)                          \
  friend METAL_FUNC vec<R, N> operator op(vec a) { \
    vec<R, N> result;                              \
    EACH(PUT_PREFIXED, op, R)                      \
    return result;                                 \
  }

#define EACH EACH_OF_2
template <typename T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  VEC_MEMBERS(2)
  COLOUR(r, x)
  COLOUR(g, y)
  SWIZZLE2(x, x)
  SWIZZLE2(x, y)
  SWIZZLE2(y, x)
  SWIZZLE2(y, y)
};

#undef EACH
#define EACH EACH_OF_3
// Three elements take the room of four.
template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  VEC_MEMBERS(3)
  COLOUR(r, x)
  COLOUR(g, y)
  COLOUR(b, z)
  SWIZZLE2(x, x)
  SWIZZLE2(x, y)
  SWIZZLE2(x, z)
  SWIZZLE2(y, x)
  SWIZZLE2(y, y)
  SWIZZLE2(y, z)
  SWIZZLE2(z, x)
  SWIZZLE2(z, y)
  SWIZZLE2(z, z)
  SWIZZLE3(x, y, z)
  SWIZZLE3(z, y, x)
};

#undef EACH
#define EACH EACH_OF_4
template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  VEC_MEMBERS(4)
  COLOUR(r, x)
  COLOUR(g, y)
  COLOUR(b, z)
  COLOUR(a, w)
  SWIZZLE2(x, x)
  SWIZZLE2(x, y)
  SWIZZLE2(x, z)
  SWIZZLE2(x, w)
  SWIZZLE2(y, x)
  SWIZZLE2(y, y)
  SWIZZLE2(y, z)
  SWIZZLE2(y, w)
  SWIZZLE2(z, x)
  SWIZZLE2(z, y)
  SWIZZLE2(z, z)
  SWIZZLE2(z, w)
  SWIZZLE2(w, x)
  SWIZZLE2(w, y)
  SWIZZLE2(w, z)
  SWIZZLE2(w, w)
  SWIZZLE3(x, y, z)
  SWIZZLE3(y, z, w)
  SWIZZLE3(z, y, x)
  SWIZZLE4(x, y, z, w)
  SWIZZLE4(w, z, y, x)
  SWIZZLE4(y, x, w, z)
  SWIZZLE4(z, w, x, y)
  SWIZZLE4(x, x, x, x)
  SWIZZLE4(y, y, y, y)
  SWIZZLE4(z, z, z, z)
  SWIZZLE4(w, w, w, w)
  SWIZZLE4(x, x, y, y)
  SWIZZLE4(z, z, w, w)
  SWIZZLE4(x, y, x, y)
  SWIZZLE4(z, w, z, w)
};

#define VEC_NAMES(T)      \
  using T##2 = vec<T, 2>; \
  using T##3 = vec<T, 3>; \
  using T##4 = vec<T, 4>;
VEC_NAMES(bool)
VEC_NAMES(char)
VEC_NAMES(uchar)
VEC_NAMES(short)
VEC_NAMES(ushort)
VEC_NAMES(int)
VEC_NAMES(uint)
VEC_NAMES(long)
VEC_NAMES(ulong)
VEC_NAMES(half)
VEC_NAMES(bfloat)
VEC_NAMES(float)

#undef VEC_NAMES
#undef EACH
#undef PUT_VALUE
#undef PUT_OTHER
#undef PUT_CONVERTED
#undef STORE_OTHER
#undef PUT_OPERATION
#undef PUT_COMPARISON
#undef PUT_PREFIXED
#undef VEC_LOAD
#undef VEC_STORE
#undef VEC_MEMBERS
#undef VEC_OPERATOR
#undef VEC_COMPARISON
#undef VEC_PREFIX
#undef SWIZZLE2
#undef SWIZZLE3
#undef SWIZZLE4
#undef COLOUR

} // namespace metal

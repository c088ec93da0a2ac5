// What MLX puts in front of every kernel, as far as kernels outside MLX may use it: type names,
// limits, indexing.
#pragma once
#include "math.h"

using bfloat16_t = bfloat;
using float16_t = half;

#define MLX_MTL_CONST static constant constexpr const
#define MLX_MTL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")
#define MLX_MTL_LOOP_UNROLL _Pragma("clang loop unroll(full)")

template <typename T>
struct Limits {
  static constexpr T max = metal::numeric_limits<T>::max();
  static constexpr T min = metal::numeric_limits<T>::min();
  static constexpr T finite_max = max;
  static constexpr T finite_min = min;
};
template <typename T>
  requires metal::is_floating_point_v<T>
struct Limits<T> {
  static constexpr T max = metal::numeric_limits<T>::infinity();
  static constexpr T min = -metal::numeric_limits<T>::infinity();
  static constexpr T finite_max = metal::numeric_limits<T>::max();
  static constexpr T finite_min = metal::numeric_limits<T>::lowest();
};

// Where an element lies, given its number in row-major order.
template <typename Index = int64_t>
METAL_FUNC Index elem_to_loc(Index element, constant const int* shape,
                             constant const int64_t* strides, int ndim) {
  Index location = 0;
  for (int axis = ndim - 1; axis >= 0; axis--) {
    location += element % shape[axis] * Index(strides[axis]);
    element /= shape[axis];
  }
  return location;
}

template <typename T, typename U>
METAL_FUNC T ceildiv(T n, U m) {
  return (n + m - 1) / m;
}

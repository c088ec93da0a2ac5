// What threads do together: barriers, simdgroup operations, threadgroup memory.
#pragma once
#include "../../runtime/interface.h"
#include "math.h"

// Defaults of these are taken at the caller: the place in the kernel's source.
#define EMULATOR_SITE int line = __builtin_LINE(), int column = __builtin_COLUMN()

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_device_and_threadgroup = 3,
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

static_assert(1u << emulator::kDeviceMemory == uint(mem_flags::mem_device));
static_assert(1u << emulator::kThreadgroupMemory == uint(mem_flags::mem_threadgroup));

METAL_FUNC void threadgroup_barrier(mem_flags flags, EMULATOR_SITE) {
  auto& context = emulator::current();
  context.calls->threadgroup_barrier(context, {"threadgroup_barrier", line, column}, uint(flags));
}

METAL_FUNC void simdgroup_barrier(mem_flags flags, EMULATOR_SITE) {
  auto& context = emulator::current();
  context.calls->simdgroup_operation(context, {"simdgroup_barrier", line, column}, nullptr,
                                     uint(flags));
  context.next_exchange ^= 1;
}

namespace simd_detail {

// Gives a value to the other lanes and returns when all have given theirs.
template <typename T>
METAL_FUNC const emulator::Lanes& exchange(const char* name, T value, int line, int column,
                                           emulator::Reduction reduction) {
  static_assert(sizeof(T) <= emulator::kMaxLaneBytes);
  auto& context = emulator::current();
  auto& lanes = context.exchanges[context.next_exchange];
  __builtin_memcpy(lanes.values[context.thread_index_in_simdgroup], &value, sizeof(T));
  context.calls->simdgroup_operation(context, {name, line, column}, reduction, 0);
  context.next_exchange ^= 1;
  return lanes;
}

// What a device gives for a lane that isn't there is undefined. If the source is outside of the
// simdgroup, a lane that keeps its value gets that.
template <typename T>
OUTLINED_FUNC T from_lane(T value, int source, bool keeps, emulator::Site site) {
  auto& lanes = exchange(site.operation, value, site.line, site.column, nullptr);
  bool is_within = uint(source) < uint(emulator::kSimdWidth);
  if (keeps && !is_within) return value;
  if (!is_within || !(lanes.active >> source & 1)) {
    auto& context = emulator::current();
    context.calls->missing_lane(context, site, source);
  }
  return lanes.template value<T>(source);
}

// Halves of the simdgroup are combined, then halves of these: the order that shuffles by 16, 8, 4,
// 2, 1 have. A device may take another one. Runs between threads, so its loads are no thread's and
// must not be counted.
template <typename T, typename Combine>
__attribute__((no_sanitize("coverage"))) void reduce(emulator::Lanes& lanes) {
  T values[emulator::kSimdWidth];
  uint present = lanes.active;
  for (int i = 0; i < emulator::kSimdWidth; i++)
    if (present >> i & 1) values[i] = lanes.value<T>(i);
  for (int step = emulator::kSimdWidth / 2; step; step /= 2)
    for (int i = 0; i < step; i++) {
      if (!(present >> (i + step) & 1)) continue;
      values[i] = present >> i & 1 ? Combine()(values[i], values[i + step]) : values[i + step];
      present |= 1u << i;
    }
  __builtin_memcpy(lanes.result, &values[0], sizeof(T));
}

template <typename Combine, typename T>
OUTLINED_FUNC T reduced(const char* name, T value, int line, int column) {
  return *reinterpret_cast<const T*>(
      exchange(name, value, line, column, reduce<T, Combine>).result);
}

struct Sum {
  template <typename T>
  T operator()(T a, T b) {
    return T(a + b);
  }
};
struct Product {
  template <typename T>
  T operator()(T a, T b) {
    return T(a * b);
  }
};
struct Max {
  template <typename T>
  T operator()(T a, T b) {
    return max(a, b);
  }
};
struct Min {
  template <typename T>
  T operator()(T a, T b) {
    return min(a, b);
  }
};
struct And {
  template <typename T>
  T operator()(T a, T b) {
    return T(a & b);
  }
};
struct Or {
  template <typename T>
  T operator()(T a, T b) {
    return T(a | b);
  }
};
struct Xor {
  template <typename T>
  T operator()(T a, T b) {
    return T(a ^ b);
  }
};

} // namespace simd_detail

#define SIMD_REDUCTION(NAME, COMBINE)                                              \
  template <typename T>                                                            \
  METAL_FUNC T NAME(T value, EMULATOR_SITE) {                                      \
    return simd_detail::reduced<simd_detail::COMBINE>(#NAME, value, line, column); \
  }
SIMD_REDUCTION(simd_sum, Sum)
SIMD_REDUCTION(simd_product, Product)
SIMD_REDUCTION(simd_max, Max)
SIMD_REDUCTION(simd_min, Min)
SIMD_REDUCTION(simd_and, And)
SIMD_REDUCTION(simd_or, Or)
SIMD_REDUCTION(simd_xor, Xor)
#undef SIMD_REDUCTION

METAL_FUNC bool simd_all(bool value, EMULATOR_SITE) {
  return simd_detail::reduced<simd_detail::And>("simd_all", value, line, column);
}
METAL_FUNC bool simd_any(bool value, EMULATOR_SITE) {
  return simd_detail::reduced<simd_detail::Or>("simd_any", value, line, column);
}

// SOURCE is the lane to read from, given `lane`, the own one. Where it lies behind either end of
// the simdgroup and KEEPS is true, a lane keeps its value, as Metal says.
#define SIMD_SHUFFLE(NAME, ARGUMENT, SOURCE, KEEPS)                                       \
  template <typename T>                                                                   \
  METAL_FUNC T NAME(T value, ARGUMENT, EMULATOR_SITE) {                                   \
    constexpr int width = emulator::kSimdWidth;                                           \
    [[maybe_unused]] const int lane = int(emulator::current().thread_index_in_simdgroup); \
    return simd_detail::from_lane(value, SOURCE, KEEPS, {#NAME, line, column});           \
  }
SIMD_SHUFFLE(simd_shuffle, ushort from, int(from), false)
SIMD_SHUFFLE(simd_broadcast, ushort from, int(from), false)
SIMD_SHUFFLE(simd_shuffle_xor, ushort mask, lane ^ int(mask), false)
SIMD_SHUFFLE(simd_shuffle_down, ushort delta, lane + int(delta), true)
SIMD_SHUFFLE(simd_shuffle_up, ushort delta, lane - int(delta), true)
SIMD_SHUFFLE(simd_shuffle_rotate_down, ushort delta, (lane + int(delta)) % width, false)
SIMD_SHUFFLE(simd_shuffle_rotate_up, ushort delta, (lane - int(delta) % width + width) % width,
             false)
#undef SIMD_SHUFFLE

template <typename T>
METAL_FUNC T simd_broadcast_first(T value, EMULATOR_SITE) {
  auto& lanes = simd_detail::exchange("simd_broadcast_first", value, line, column, nullptr);
  return lanes.template value<T>(__builtin_ctz(lanes.active));
}

METAL_FUNC bool simd_is_first(EMULATOR_SITE) {
  auto& lanes = simd_detail::exchange("simd_is_first", 0, line, column, nullptr);
  return __builtin_ctz(lanes.active) == int(emulator::current().thread_index_in_simdgroup);
}

// Sums of the lanes below, without or with the own one.
template <typename T>
METAL_FUNC T simd_prefix_exclusive_sum(T value, EMULATOR_SITE) {
  auto& lanes = simd_detail::exchange("simd_prefix_exclusive_sum", value, line, column, nullptr);
  T sum = T(0);
  for (uint i = 0; i < emulator::current().thread_index_in_simdgroup; i++)
    if (lanes.active >> i & 1) sum = T(sum + lanes.template value<T>(int(i)));
  return sum;
}
template <typename T>
METAL_FUNC T simd_prefix_inclusive_sum(T value, EMULATOR_SITE) {
  return T(simd_prefix_exclusive_sum(value, line, column) + value);
}

class simd_vote {
 public:
  explicit simd_vote(ulong bits) : bits_(bits) {}
  explicit operator ulong() const { return bits_; }

 private:
  ulong bits_;
};
METAL_FUNC simd_vote simd_ballot(bool value, EMULATOR_SITE) {
  auto& lanes = simd_detail::exchange("simd_ballot", value, line, column, nullptr);
  ulong bits = 0;
  for (int i = 0; i < emulator::kSimdWidth; i++)
    if (lanes.active >> i & 1 && lanes.value<bool>(i)) bits |= ulong(1) << i;
  return simd_vote(bits);
}

} // namespace metal

namespace emulator {

template <typename T>
struct innermost {
  using type = T;
};
template <typename T, size_t N>
struct innermost<T[N]> : innermost<T> {};
template <typename T, int N>
struct innermost<metal::vec<T, N>> : innermost<T> {};

// A variable that all threads of a threadgroup share. The tool puts this in the place of a
// declaration such as `threadgroup float row[32];`, because C++ has no such storage.
template <typename T>
METAL_FUNC threadgroup T* threadgroup_variable(int index, const char* name) {
  // A pointer, since the compiler takes for granted that it may read what a reference refers to.
  Context& context = current();
  return (threadgroup T*)context.calls->threadgroup_memory(
      context, index, name, sizeof(T), sizeof(typename innermost<T>::type));
}

METAL_FUNC metal::uint3 to_uint3(Size3 size) { return {size.x, size.y, size.z}; }

} // namespace emulator

// What compiled kernels and the runtime know of each other. Kernels aren't linked against the
// runtime: each GPU thread finds its Context at the top of its own stack, and the runtime's
// functions in there.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace emulator {

constexpr size_t kStackBytes = 128 << 10; // also the alignment of a stack
constexpr int kSimdWidth = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kMaxThreadgroupBytes = 32 << 10;
constexpr size_t kMaxLaneBytes = 64; // the largest value that a lane can exchange

struct Size3 {
  uint32_t x, y, z;
};

// Where threads wait for each other, and what for. All that take part must be at the same one.
struct Site {
  const char* operation;
  int line, column;
};

// What the lanes of a simdgroup gave to one exchange.
struct Lanes {
  alignas(64) char values[kSimdWidth][kMaxLaneBytes];
  char result[kMaxLaneBytes]; // what the reduction, if there was one, made of the values
  uint32_t active;            // one bit for each lane that took part

  template <typename T>
  const T& value(int lane) const {
    return *reinterpret_cast<const T*>(values[lane]);
  }
};

using Reduction = void (*)(Lanes&);

// Memory that threads share. The bit of a barrier's flags that stands for it, too.
enum MemoryKind : uint8_t { kDeviceMemory, kThreadgroupMemory, kNumMemoryKinds };

// One load or store of a thread.
struct Access {
  const char* address;
  uint32_t bytes;
  bool is_store, is_atomic;
  bool is_whole; // a vector, whose elements come one by one besides: only its bounds matter
  const char* code; // of the instruction behind it
};

struct Context;

struct Calls {
  void (*threadgroup_barrier)(Context&, Site, uint32_t flags);
  void (*simdgroup_operation)(Context&, Site, Reduction, uint32_t flags);
  char* (*threadgroup_memory)(Context&, int index, const char* name, size_t bytes,
                              size_t element_bytes);
  void (*access)(Context&, const Access&); // in watched builds only
  // The thread did what has no defined result; these don't return.
  void (*missing_lane)(Context&, Site, int lane);
  void (*outside_array)(Context&, const char* code, const char* type, int64_t index);
  void (*outside_integer)(Context&, const char* code, const char* type, double value);
};

// One GPU thread, as the kernel sees it.
struct Context {
  const Calls* calls;
  void* fiber; // the runtime's own record
  // Two exchanges take turns: a lane can be one ahead of another, and no more.
  Lanes* exchanges;
  uint32_t next_exchange;
  void* const* buffers;
  Size3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  Size3 threads_per_grid, threadgroups_per_grid, threads_per_threadgroup,
      dispatch_threads_per_threadgroup;
  uint32_t thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  uint32_t simdgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup;
};

// Stacks start at different distances from their ends: they would compete for the same few cache
// lines otherwise.
inline __attribute__((always_inline)) Context& context_on_stack(uintptr_t address) {
  constexpr size_t context_bytes = (sizeof(Context) + 63) / 64 * 64;
  uintptr_t end = (address & ~(kStackBytes - 1)) + kStackBytes;
  size_t distance = context_bytes + address / kStackBytes % 16 * 256;
  return *reinterpret_cast<Context*>(end - distance);
}

inline __attribute__((always_inline)) Context& current() {
  return context_on_stack(reinterpret_cast<uintptr_t>(__builtin_frame_address(0)));
}

using Kernel = void (*)(const Context&);

} // namespace emulator

// One threadgroup at a time, on one CPU core: its threads are fibers that run until they wait for
// each other or end.
#pragma once
#include <setjmp.h>
#include <stdio.h>
#include <string.h>

#include "launch.h"
#include "memory.h"
#include "shadow.h"

namespace emulator {

enum class State : uint8_t { kRunnable, kAtExchange, kAtBarrier, kReturned };

struct Worker;

struct Thread {
  Worker* worker;
  Context* context;
  void* stack;
  State state;
  Site site; // where it waits, or waited last
  Reduction reduction;
  uint32_t flags; // of the barrier
};

inline uint32_t trace_index(const Thread& thread) {
  return thread.context->thread_index_in_threadgroup;
}

struct ThreadgroupArray {
  const char* name = nullptr;
  Mapping mapping{};
  size_t bytes = 0; // 0: not asked for yet by this threadgroup
};

constexpr int kMaxThreadgroupArrays = 32;

// The order in which threads, or simdgroups, take their turns.
struct Turns {
  uint32_t count;
  uint16_t turns[kMaxThreads];
};

// Plain C++ without its library: nothing but a compiler is needed to build it.
struct Worker {
  const Launch* launch = nullptr;
  Report report{};
  const bool* stop = nullptr; // set by another worker that failed
  uint32_t num_threads = 0, num_simdgroups = 0;
  Thread threads[kMaxThreads];
  Lanes exchanges[kMaxThreads / kSimdWidth][2];
  Turns simdgroup_order{}, lane_order{};
  ThreadgroupArray arrays[kMaxThreadgroupArrays];
  // For counting builds: the last threadgroup that loaded each word of a buffer, by its number.
  uint32_t* last_loads[kMaxBuffers];
  uint32_t number = 0;
  char* stacks = nullptr;
  int num_stacks = 0;
  void* scheduler_stack = nullptr;
  Thread* running = nullptr;         // read by the signal handler
  uint32_t first_lane = 0, turn = 0; // of the simdgroup that runs
  sigjmp_buf escape;
  uint64_t random = 0;
  Size3 position{};

  // Of watched launches.
  uint32_t time = 0; // goes on at each barrier and each threadgroup
  uint32_t launch_begin = 0, threadgroup_begin = 0;
  uint32_t barrier_time[kNumMemoryKinds];
  uint32_t simdgroup_barrier_time[kMaxThreads / kSimdWidth][kNumMemoryKinds];
  Region regions[kMaxBuffers + kMaxThreadgroupArrays];
  int num_regions = 0, num_buffer_regions = 0, last_region = 0;
  Shadow buffer_shadows[kMaxBuffers], array_shadows[kMaxThreadgroupArrays];

  bool run(Size3 threadgroup_position); // false: the launch has failed, see report
  void begin(Size3 threadgroup_position);
  void run_simdgroup(uint32_t index);
  bool release_exchange(uint32_t index);
  bool release_barrier();
  Thread* next_lane();
  void wait(Thread& thread, State state, Site site);
  char* array(int index, const char* name, size_t bytes, size_t element_bytes);

  void count_access(const Access& access);
  void count_distinct(int buffer, const char* address, uint32_t bytes);
  void forget_loads();
  void begin_watching();
  void watch_array(const ThreadgroupArray& array, int index, size_t element_bytes);
  void watch_access(Thread& thread, const Access& access);
  void check_cell(Thread& thread, const Access& access, const Region& region, Cell& cell,
                  const Trace& trace);
  void pass_barrier(uint32_t flags);
  void pass_simdgroup_barrier(uint32_t simdgroup, uint32_t flags);
  Region* region_of(const char* address);
  bool is_old(const Trace& trace, MemoryKind kind) const;
  bool is_ordered(const Trace& trace, uint32_t thread, MemoryKind kind) const;
  void note(Trace& trace, const Trace& access, MemoryKind kind) const;

  bool fail(Outcome outcome, const Thread* thread);
  // These leave the thread for good.
  void fail_at(Outcome outcome, Thread& thread, const char* code);
  void fail_outside(Thread& thread, const Access& access, const Region& region);
  void fail_race(Thread& thread, const Access& access, const Region& region, const Trace& other,
                 const char* other_did);
  void fail_unwritten(Thread& thread, const Access& access, const Region& region);
  void describe_waits(char* text, size_t room) const;
  void order(Turns& turns, uint32_t count);
  uint32_t lanes_of(uint32_t simdgroup) const {
    uint32_t left = num_threads - simdgroup * kSimdWidth;
    return left < kSimdWidth ? left : kSimdWidth;
  }
  bool stopped() const { return __atomic_load_n(stop, __ATOMIC_RELAXED); }
};

extern const Calls kCalls;

} // namespace emulator

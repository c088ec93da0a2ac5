// One threadgroup at a time, on one CPU core: its threads are fibers that run until they wait for
// each other or end.
#pragma once
#include <setjmp.h>
#include <stdio.h>
#include <string.h>

#include "launch.h"
#include "memory.h"

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
};

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

  bool run(Size3 threadgroup_position); // false: the launch has failed, see report
  void begin(Size3 threadgroup_position);
  void run_simdgroup(uint32_t index);
  bool release_exchange(uint32_t index);
  bool release_barrier();
  Thread* next_lane();
  void wait(Thread& thread, State state, Site site);
  char* array(int index, const char* name, size_t bytes);
  void count_distinct(int buffer, const char* address, uint32_t bytes);
  void forget_loads();

  bool fail(Outcome outcome, const Thread* thread);
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

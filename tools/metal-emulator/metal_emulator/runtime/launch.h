// What Python hands in and gets back; mirrored by the ctypes structures of launch.py.
#pragma once
#include "interface.h"

namespace emulator {

enum Outcome : int32_t {
  kDone,
  kFault, // by a signal
  kDivergence,
  kTooMuchMemory,
  kTimeLimit,
  kNoMemory,
  kMemoryFault, // by a check
  kRace,
  kUnwrittenRead,
  kUndefined
};
enum Order : int32_t { kAscending, kDescending, kRandom };

constexpr int kMaxBuffers = 31; // what a Mac has, too

// Bytes that threads loaded and stored, by buffer; threadgroup memory comes last. Distinct are
// those of the words of four bytes that a threadgroup loaded, each once per threadgroup.
struct Traffic {
  uint64_t loaded[kMaxBuffers + 1], stored[kMaxBuffers + 1], distinct[kMaxBuffers + 1];
};

struct Range {
  const char* begin;
  const char* end;
  const char* mapping_begin; // with the guards around it
  const char* mapping_end;
  const char* name;
  int32_t element_bytes;
  int32_t is_writable;
};

struct Launch {
  Kernel kernel;
  void* const* buffers;
  const Range* ranges; // of the buffers
  int32_t num_buffers;
  Size3 grid, threadgroup;
  Order order;
  uint32_t seed;
  uint32_t poison; // fills threadgroup memory
  int32_t num_workers;
  int32_t start_aligned; // threadgroup arrays begin, rather than end, at a guard page
  int32_t counts_accesses, watches_accesses; // only builds that report accesses can do so
  double time_limit_s;
};

// How it ended; filled by the first thread that fails.
struct Report {
  Outcome outcome;
  int32_t signal;
  int32_t is_write; // -1: not known
  uint64_t address;
  Size3 threadgroup, thread; // positions in the grid and in the threadgroup
  int32_t last_line; // of the last barrier or simdgroup operation that the thread passed; 0: none
  // Where in the library, relative to the kernel's entry, and the other access of a race.
  int64_t code, other_code;
  int32_t has_code;
  uint64_t barriers, exchanges,
      threadgroup_bytes; // summed over the launch; the last is the largest
  Traffic traffic;
  char message[1024];
};

// A buffer between two runs of memory that fault.
struct Mapping {
  char* base;
  size_t total;
  char* data;
  char* pages; // the accessible part
  size_t pages_bytes;
};

} // namespace emulator

// What each byte of shared memory has seen: who wrote and read it last, and whether a barrier came
// since.
//
// A barrier orders what all threads did before it with what they do after it, in the memory that
// its flags name; a simdgroup barrier does so for one simdgroup. So a time that goes on at each
// barrier, and the time of the last barrier of each kind, say whether two accesses are ordered.
#pragma once
#include "launch.h"

namespace emulator {

// Who made an access; several unordered ones are kept as the latest and how far they are spread.
enum Spread : uint8_t { kOneThread, kOneSimdgroup, kOneThreadgroup, kSeveralThreadgroups };

struct Trace {
  uint32_t time; // 0: never
  uint32_t code; // where in the kernel's library, relative to its entry
  uint16_t thread;
  Spread spread;
  bool is_atomic;
};

struct Cell {
  Trace write, read;
};

// The cells of one buffer or threadgroup array. Times never repeat, so what an earlier launch left
// in them is seen to be old and they are never cleared.
struct Shadow {
  Cell* cells;
  size_t reserved_bytes;
  int shift; // a cell stands for 1 << shift bytes; halved when an access is smaller

  bool cover(size_t bytes, int element_shift);
  void refine(size_t bytes, int to_shift);
};

// Memory that threads share, with what surrounds it.
struct Region {
  const char* name;
  const char *base, *end; // with the guards
  const char* data;
  size_t bytes;
  Shadow* shadow; // nullptr: nobody can write it, or it is too large
  MemoryKind kind;
  bool is_array;
};

} // namespace emulator

// Counting builds: the compiler calls these at every load and store that is left after
// optimisation.
#pragma once
#include "threads.h"

#define COUNT_ACCESS(BYTES)                                                                   \
  extern "C" __attribute__((visibility("hidden"), used, no_sanitize("coverage"))) inline void \
  __sanitizer_cov_load##BYTES(const void* address) {                                          \
    auto& context = emulator::current();                                                      \
    context.calls->count_access(context, address, BYTES, false);                              \
  }                                                                                           \
  extern "C" __attribute__((visibility("hidden"), used, no_sanitize("coverage"))) inline void \
  __sanitizer_cov_store##BYTES(const void* address) {                                         \
    auto& context = emulator::current();                                                      \
    context.calls->count_access(context, address, BYTES, true);                               \
  }
COUNT_ACCESS(1)
COUNT_ACCESS(2)
COUNT_ACCESS(4)
COUNT_ACCESS(8)
COUNT_ACCESS(16)
#undef COUNT_ACCESS

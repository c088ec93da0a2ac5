// Watched builds: the compiler calls these at every load and store that is left after optimisation.
#pragma once
#include "threads.h"

#define WATCH(NAME, BYTES, IS_STORE)                                                          \
  extern "C" __attribute__((visibility("hidden"), used, no_sanitize("coverage"))) inline void \
  NAME##BYTES(const void* address) {                                                          \
    auto& context = emulator::current();                                                      \
    context.calls->access(context, {(const char*)address, BYTES, IS_STORE, false, false,      \
                                    (const char*)__builtin_return_address(0)});               \
  }
#define WATCH_ACCESSES(BYTES)               \
  WATCH(__sanitizer_cov_load, BYTES, false) \
  WATCH(__sanitizer_cov_store, BYTES, true)
WATCH_ACCESSES(1)
WATCH_ACCESSES(2)
WATCH_ACCESSES(4)
WATCH_ACCESSES(8)
WATCH_ACCESSES(16)
#undef WATCH_ACCESSES
#undef WATCH

// All of a vector, from where it is loaded or stored.
namespace metal::vec_detail {

__attribute__((noinline, nodebug, no_sanitize("coverage"))) inline void watch_vector(
    uintptr_t address, int bytes, bool is_store) {
  auto& context = emulator::current();
  context.calls->access(context, {(const char*)address, uint32_t(bytes), is_store, false, true,
                                  (const char*)__builtin_return_address(0)});
}

} // namespace metal::vec_detail

// Watched functions are marked as ThreadSanitizer's are, so that the compiler makes no load
// unconditional that is not. Nothing else of it is used.
extern "C" __attribute__((visibility("hidden"), used)) inline void __tsan_init() {}

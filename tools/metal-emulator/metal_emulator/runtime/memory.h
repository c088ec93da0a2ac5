// Memory between guard regions, so that a read or write outside it faults.
#pragma once
#include <stddef.h>

#include "launch.h"

namespace emulator {

// Far enough for an index that is wrong by a lot. Costs address space, not memory.
constexpr size_t kGuardBytes = size_t(256) << 20;

// `start_aligned`: the data begins right behind a guard; else it ends at one, less what alignment
// to 16 bytes takes.
bool map_guarded(size_t bytes, bool start_aligned, size_t guard_bytes, Mapping* out);
void unmap(Mapping& mapping);
size_t page_bytes();

} // namespace emulator

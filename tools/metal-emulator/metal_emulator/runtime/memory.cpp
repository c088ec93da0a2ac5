#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

namespace emulator {

#if !defined(MAP_NORESERVE)
#define MAP_NORESERVE 0
#endif

size_t page_bytes() {
  static const size_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

bool map_guarded(size_t bytes, bool start_aligned, size_t guard_bytes, Mapping* out) {
  size_t page = page_bytes();
  size_t pages_bytes = (bytes + page - 1) / page * page;
  size_t total = pages_bytes + 2 * guard_bytes;
  void* base = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return false;
  char* pages = static_cast<char*>(base) + guard_bytes;
  if (pages_bytes && mprotect(pages, pages_bytes, PROT_READ | PROT_WRITE) != 0) {
    munmap(base, total);
    return false;
  }
  size_t lead = start_aligned ? 0 : (pages_bytes - bytes) / 16 * 16;
  *out = {static_cast<char*>(base), total, pages + lead, pages, pages_bytes};
  return true;
}

void unmap(Mapping& mapping) {
  if (mapping.base) munmap(mapping.base, mapping.total);
  mapping = {};
}

} // namespace emulator

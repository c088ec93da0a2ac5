#include "shadow.h"

#include <sys/mman.h>

#include "threadgroup.h"

namespace emulator {

namespace {

// A region with more cells is watched for its bounds only.
constexpr size_t kMaxCells = size_t(1) << 32;

int log2_floor(size_t n) { return n ? 63 - __builtin_clzll(n) : 0; }

const char* flag_of(MemoryKind kind) {
  return kind == kDeviceMemory ? "mem_device" : "mem_threadgroup";
}

} // namespace

bool Shadow::cover(size_t bytes, int element_shift) {
  shift = element_shift;
  size_t needed = ((bytes >> shift) + 1) * sizeof(Cell);
  if (needed <= reserved_bytes) return true;
  if (cells) munmap(cells, reserved_bytes);
  cells = nullptr, reserved_bytes = 0;
  if ((bytes >> shift) > kMaxCells) return false;
  int flags = MAP_PRIVATE | MAP_ANON;
#if defined(MAP_NORESERVE)
  flags |= MAP_NORESERVE; // most of a large buffer is never touched
#endif
  void* room = mmap(nullptr, needed, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (room == MAP_FAILED) return false;
  cells = static_cast<Cell*>(room), reserved_bytes = needed;
  return true;
}

// All bytes of a cell have seen the same, so each smaller cell starts with what the larger one
// knows.
void Shadow::refine(size_t bytes, int to_shift) {
  Shadow finer = {};
  if (!finer.cover(bytes, to_shift)) return;
  for (size_t i = 0; i < bytes >> to_shift; i++) finer.cells[i] = cells[i >> (shift - to_shift)];
  munmap(cells, reserved_bytes);
  *this = finer;
}

void Worker::begin_watching() {
  num_regions = 0;
  last_region = 0;
  launch_begin = ++time;
  for (int i = 0; i < launch->num_buffers; i++) {
    const Range& range = launch->ranges[i];
    size_t bytes = range.end - range.begin;
    Shadow& shadow = buffer_shadows[i];
    bool has_shadow = range.is_writable && shadow.cover(bytes, log2_floor(range.element_bytes));
    regions[num_regions++] = {
        range.name,    range.mapping_begin, range.mapping_end, range.begin, bytes,
        has_shadow ? &shadow : nullptr, kDeviceMemory, false};
  }
  num_buffer_regions = num_regions;
}

void Worker::watch_array(const ThreadgroupArray& array, int index, size_t element_bytes) {
  Shadow& shadow = array_shadows[index];
  bool has_shadow = shadow.cover(array.bytes, log2_floor(element_bytes));
  const Mapping& mapping = array.mapping;
  regions[num_regions++] = {array.name,
                            mapping.base,
                            mapping.base + mapping.total,
                            mapping.data,
                            array.bytes,
                            has_shadow ? &shadow : nullptr,
                            kThreadgroupMemory,
                            true};
}

// Times at and behind which everything comes after a barrier of this kind.
void Worker::pass_barrier(uint32_t flags) {
  time++;
  for (int kind = 0; kind < kNumMemoryKinds; kind++)
    if (flags >> kind & 1) barrier_time[kind] = time;
}

void Worker::pass_simdgroup_barrier(uint32_t simdgroup, uint32_t flags) {
  time++;
  for (int kind = 0; kind < kNumMemoryKinds; kind++)
    if (flags >> kind & 1) simdgroup_barrier_time[simdgroup][kind] = time;
}

Region* Worker::region_of(const char* address) {
  Region& last = regions[last_region];
  if (last_region < num_regions && address >= last.base && address < last.end) return &last;
  for (int i = 0; i < num_regions; i++)
    if (address >= regions[i].base && address < regions[i].end) {
      last_region = i;
      return &regions[i];
    }
  return nullptr;
}

bool Worker::is_old(const Trace& trace, MemoryKind kind) const {
  return trace.time < (kind == kDeviceMemory ? launch_begin : threadgroup_begin);
}

bool Worker::is_ordered(const Trace& trace, uint32_t thread, MemoryKind kind) const {
  if (is_old(trace, kind)) return true;
  if (trace.spread == kSeveralThreadgroups || trace.time < threadgroup_begin) return false;
  if (trace.time < barrier_time[kind]) return true;
  uint32_t simdgroup = thread / kSimdWidth;
  if (trace.spread == kOneThreadgroup || trace.thread / kSimdWidth != simdgroup) return false;
  if (trace.time < simdgroup_barrier_time[simdgroup][kind]) return true;
  return trace.spread == kOneThread && trace.thread == thread;
}

// Adds an access to those that were not ordered with each other.
void Worker::note(Trace& trace, const Trace& access, MemoryKind kind) const {
  Spread spread = kOneThread;
  if (!is_old(trace, kind)) {
    if (trace.spread == kSeveralThreadgroups || trace.time < threadgroup_begin)
      spread = kSeveralThreadgroups;
    else if (!is_ordered(trace, access.thread, kind))
      spread = trace.spread != kOneThreadgroup &&
                       trace.thread / kSimdWidth == access.thread / kSimdWidth
                   ? kOneSimdgroup
                   : kOneThreadgroup;
  }
  trace = access;
  trace.spread = spread;
}

void Worker::watch_access(Thread& thread, const Access& access) {
  // Its own stack, and what lanes exchange, are the thread's business.
  auto at = reinterpret_cast<uintptr_t>(access.address);
  if ((at ^ reinterpret_cast<uintptr_t>(thread.context)) < kStackBytes ||
      at - reinterpret_cast<uintptr_t>(this) < sizeof(Worker))
    return;
  Region* region = region_of(access.address);
  if (!region) return;
  if (access.address < region->data ||
      access.address + access.bytes > region->data + region->bytes)
    fail_outside(thread, access, *region);
  Shadow* shadow = region->shadow;
  if (!shadow || access.is_whole) return;
  size_t offset = access.address - region->data;
  int access_shift = __builtin_ctzll(offset | access.bytes);
  if (access_shift < shadow->shift) shadow->refine(region->bytes, access_shift);
  uint32_t code = uint32_t(access.code - reinterpret_cast<const char*>(launch->kernel));
  auto index = uint16_t(thread.context->thread_index_in_threadgroup);
  Trace trace = {time, code, index, kOneThread, access.is_atomic};
  size_t last = (offset + access.bytes - 1) >> shadow->shift;
  for (size_t i = offset >> shadow->shift; i <= last; i++)
    check_cell(thread, access, *region, shadow->cells[i], trace);
}

void Worker::check_cell(Thread& thread, const Access& access, const Region& region, Cell& cell,
                        const Trace& trace) {
  MemoryKind kind = region.kind;
  bool both_atomic = access.is_atomic && cell.write.is_atomic;
  if (!both_atomic && !is_ordered(cell.write, trace.thread, kind))
    fail_race(thread, access, region, cell.write, "wrote");
  if (access.is_store) {
    both_atomic = access.is_atomic && cell.read.is_atomic;
    if (!both_atomic && !is_ordered(cell.read, trace.thread, kind))
      fail_race(thread, access, region, cell.read, "read");
    note(cell.write, trace, kind);
    return;
  }
  if (kind == kThreadgroupMemory && is_old(cell.write, kind))
    fail_unwritten(thread, access, region);
  note(cell.read, trace, kind);
}

namespace {

// "byte 12 of row"
void describe(char* text, size_t room, const Access& access, const Region& region) {
  snprintf(text, room, "byte %td of %s%s", access.address - region.data,
           region.is_array ? "threadgroup array " : "", region.name);
}

} // namespace

void Worker::fail_outside(Thread& thread, const Access& access, const Region& region) {
  char where[200];
  // The first byte that lies outside.
  Access outside = access;
  if (access.address >= region.data && access.address < region.data + region.bytes)
    outside.address = region.data + region.bytes;
  describe(where, sizeof(where), outside, region);
  snprintf(report.message, sizeof(report.message), "%s %s, which has %zu bytes",
           access.is_store ? "wrote" : "read", where, region.bytes);
  fail_at(kMemoryFault, thread, access.code);
}

void Worker::fail_race(Thread& thread, const Access& access, const Region& region,
                       const Trace& other, const char* other_did) {
  char where[200], who[80], why[200];
  describe(where, sizeof(where), access, region);
  bool is_far = other.spread == kSeveralThreadgroups || other.time < threadgroup_begin;
  if (is_far) {
    snprintf(who, sizeof(who), "a thread of another threadgroup");
    snprintf(why, sizeof(why), "nothing orders the threadgroups of a launch");
  } else {
    if (other.thread == trace_index(thread))
      snprintf(who, sizeof(who), "several threads");
    else
      snprintf(who, sizeof(who), "thread %u", unsigned(other.thread));
    snprintf(why, sizeof(why), "no barrier with %s lies between", flag_of(region.kind));
  }
  snprintf(report.message, sizeof(report.message), "%s %s, which %s %s@; %s",
           access.is_store ? "wrote" : "read", where, who, other_did, why);
  report.other_code = other.code;
  fail_at(kRace, thread, access.code);
}

void Worker::fail_unwritten(Thread& thread, const Access& access, const Region& region) {
  char where[200];
  describe(where, sizeof(where), access, region);
  snprintf(report.message, sizeof(report.message), "read %s, which no thread has written", where);
  fail_at(kUnwrittenRead, thread, access.code);
}

// `code` is nullptr where the thread's site says it.
void Worker::fail_at(Outcome outcome, Thread& thread, const char* code) {
  running = nullptr;
  fail(outcome, &thread);
  report.has_code = code != nullptr;
  if (code) report.code = int64_t(code - reinterpret_cast<const char*>(launch->kernel));
  siglongjmp(escape, 1);
}

} // namespace emulator

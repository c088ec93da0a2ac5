#include "threadgroup.h"

#include <sys/mman.h>

#include "fiber.h"

namespace emulator {

namespace {

uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// Threadgroups at the end of the grid are cut off, as dispatchThreads does.
uint32_t clipped(uint32_t threadgroup, uint32_t grid, uint32_t position) {
  uint32_t left = grid - position * threadgroup;
  return left < threadgroup ? left : threadgroup;
}

void first_entry() {
  Context& context = current();
  auto& thread = *static_cast<Thread*>(context.fiber);
  thread.worker->launch->kernel(context);
  thread.worker->wait(thread, State::kReturned, thread.site);
}

void threadgroup_barrier(Context& context, Site site, uint32_t flags) {
  auto& thread = *static_cast<Thread*>(context.fiber);
  thread.flags = flags;
  thread.worker->wait(thread, State::kAtBarrier, site);
}

void simdgroup_operation(Context& context, Site site, Reduction reduction, uint32_t flags) {
  auto& thread = *static_cast<Thread*>(context.fiber);
  thread.reduction = reduction;
  thread.flags = flags;
  thread.worker->wait(thread, State::kAtExchange, site);
}

char* threadgroup_memory(Context& context, int index, const char* name, size_t bytes,
                         size_t element_bytes) {
  return static_cast<Thread*>(context.fiber)->worker->array(index, name, bytes, element_bytes);
}

void access(Context& context, const Access& access) {
  auto& thread = *static_cast<Thread*>(context.fiber);
  Worker& worker = *thread.worker;
  if (worker.launch->counts_accesses && !access.is_whole) worker.count_access(access);
  if (worker.launch->watches_accesses) worker.watch_access(thread, access);
}

void missing_lane(Context& context, Site site, int lane) {
  auto& thread = *static_cast<Thread*>(context.fiber);
  Worker& worker = *thread.worker;
  thread.site = site;
  bool has_lane = lane >= 0 && uint32_t(lane) < worker.lanes_of(trace_index(thread) / kSimdWidth);
  snprintf(worker.report.message, sizeof(worker.report.message),
           "took a value by %.40s from lane %d, which %s", site.operation, lane,
           has_lane ? "has returned" : "its simdgroup does not have");
  worker.fail_at(kUndefined, thread, nullptr);
}

void outside_array(Context& context, const char* code, const char* type, int64_t index) {
  auto& thread = *static_cast<Thread*>(context.fiber);
  Report& report = thread.worker->report;
  snprintf(report.message, sizeof(report.message), "used element %lld of %.200s",
           static_cast<long long>(index), type);
  thread.worker->fail_at(kMemoryFault, thread, code);
}

void outside_integer(Context& context, const char* code, const char* type, double value) {
  auto& thread = *static_cast<Thread*>(context.fiber);
  Report& report = thread.worker->report;
  snprintf(report.message, sizeof(report.message), "converted %.9g to %.200s, which can't hold it",
           value, type);
  thread.worker->fail_at(kUndefined, thread, code);
}

bool same_site(const Site& a, const Site& b) {
  return a.operation == b.operation && a.line == b.line && a.column == b.column;
}

} // namespace

const Calls kCalls = {threadgroup_barrier, simdgroup_operation, threadgroup_memory, access,
                      missing_lane,        outside_array,       outside_integer};

void Worker::count_access(const Access& access) {
  uint64_t* counts = access.is_store ? report.traffic.stored : report.traffic.loaded;
  for (int i = 0; i < launch->num_buffers; i++)
    if (access.address >= launch->ranges[i].begin && access.address < launch->ranges[i].end) {
      counts[i] += access.bytes;
      if (!access.is_store) count_distinct(i, access.address, access.bytes);
      return;
    }
  for (const auto& array : arrays)
    if (array.bytes && access.address >= array.mapping.data &&
        access.address < array.mapping.data + array.bytes)
      counts[kMaxBuffers] += access.bytes;
}

// The next lane of the running simdgroup whose turn it is.
Thread* Worker::next_lane() {
  while (turn < lane_order.count) {
    Thread& thread = threads[first_lane + lane_order.turns[turn++]];
    if (thread.state == State::kRunnable) return &thread;
  }
  return nullptr;
}

// From lane to lane directly; the last one gives way to the scheduler.
void Worker::wait(Thread& thread, State state, Site site) {
  thread.state = state;
  thread.site = site;
  running = next_lane();
  emulator_switch(&thread.stack, running ? running->stack : scheduler_stack);
}

void Worker::order(Turns& turns, uint32_t count) {
  if (launch->order != kRandom && turns.count == count) return;
  turns.count = count;
  for (uint32_t i = 0; i < count; i++)
    turns.turns[i] = launch->order == kDescending ? count - 1 - i : i;
  if (launch->order != kRandom) return;
  for (uint32_t i = count; i > 1; i--) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    uint32_t other = uint32_t(random >> 33) % i, last = turns.turns[i - 1];
    turns.turns[i - 1] = turns.turns[other], turns.turns[other] = last;
  }
}

void Worker::begin(Size3 at) {
  const Launch& l = *launch;
  position = at;
  random = (uint64_t(l.seed) << 32) ^ (at.x + 1000003u * (at.y + 1000003u * at.z));
  Size3 size = {clipped(l.threadgroup.x, l.grid.x, at.x), clipped(l.threadgroup.y, l.grid.y, at.y),
                clipped(l.threadgroup.z, l.grid.z, at.z)};
  num_threads = size.x * size.y * size.z;
  num_simdgroups = ceil_div(num_threads, kSimdWidth);
  number++;
  for (auto& array : arrays) array.bytes = 0;
  num_regions = num_buffer_regions;
  last_region = 0;
  threadgroup_begin = ++time;

  uint32_t full = l.threadgroup.x * l.threadgroup.y * l.threadgroup.z;
  for (uint32_t i = 0; i < num_threads; i++) {
    Context& context = context_on_stack(reinterpret_cast<uintptr_t>(stacks + i * kStackBytes));
    Size3 in_group = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    context = {
        .calls = &kCalls,
        .fiber = &threads[i],
        .exchanges = exchanges[i / kSimdWidth],
        .next_exchange = 0,
        .buffers = l.buffers,
        .thread_position_in_grid = {at.x * l.threadgroup.x + in_group.x,
                                    at.y * l.threadgroup.y + in_group.y,
                                    at.z * l.threadgroup.z + in_group.z},
        .thread_position_in_threadgroup = in_group,
        .threadgroup_position_in_grid = at,
        .threads_per_grid = l.grid,
        .threadgroups_per_grid = {ceil_div(l.grid.x, l.threadgroup.x),
                                  ceil_div(l.grid.y, l.threadgroup.y),
                                  ceil_div(l.grid.z, l.threadgroup.z)},
        .threads_per_threadgroup = size,
        .dispatch_threads_per_threadgroup = l.threadgroup,
        .thread_index_in_threadgroup = i,
        .thread_index_in_simdgroup = i % kSimdWidth,
        .simdgroup_index_in_threadgroup = i / kSimdWidth,
        .simdgroups_per_threadgroup = num_simdgroups,
        .dispatch_simdgroups_per_threadgroup = ceil_div(full, kSimdWidth),
    };
    void** stack_top = reinterpret_cast<void**>(&context);
    threads[i] = {
        this,    &context, prepare_stack(stack_top, first_entry), State::kRunnable, {nullptr, 0, 0},
        nullptr, 0};
  }
}

// Memory comes from the system: a kernel's stack may be left while an allocator would hold a lock.
void Worker::count_distinct(int buffer, const char* address, uint32_t bytes) {
  const Range& range = launch->ranges[buffer];
  uint32_t*& loads = last_loads[buffer];
  if (!loads) {
    void* room = mmap(nullptr, range.end - range.begin + 4, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANON, -1, 0);
    if (room == MAP_FAILED) return;
    loads = static_cast<uint32_t*>(room);
  }
  size_t first = (address - range.begin) / 4, last = (address + bytes - 1 - range.begin) / 4;
  for (size_t word = first; word <= last; word++)
    if (loads[word] != number) {
      loads[word] = number;
      report.traffic.distinct[buffer] += 4;
    }
}

void Worker::forget_loads() {
  for (int i = 0; i < kMaxBuffers; i++) {
    if (last_loads[i]) munmap(last_loads[i], launch->ranges[i].end - launch->ranges[i].begin + 4);
    last_loads[i] = nullptr;
  }
  number = 0;
}

// Runs the lanes until each of them has returned, waits at a threadgroup barrier, or can't go on.
void Worker::run_simdgroup(uint32_t index) {
  first_lane = index * kSimdWidth;
  do {
    order(lane_order, lanes_of(index));
    turn = 0;
    running = next_lane();
    if (running) emulator_switch(&scheduler_stack, running->stack);
  } while (release_exchange(index) && !stopped());
}

// Lanes that have returned don't take part any more; all others must be at the same operation.
bool Worker::release_exchange(uint32_t index) {
  uint32_t first = index * kSimdWidth;
  uint32_t count = lanes_of(index);
  Thread* one = nullptr;
  uint32_t active = 0, flags = ~0u;
  for (uint32_t lane = 0; lane < count; lane++) {
    Thread& thread = threads[first + lane];
    if (thread.state == State::kReturned) continue;
    if (thread.state != State::kAtExchange || (one && !same_site(one->site, thread.site)))
      return false;
    one = &thread;
    active |= 1u << lane;
    flags &= thread.flags;
  }
  if (!one) return false;
  Lanes& lanes = exchanges[index][one->context->next_exchange];
  lanes.active = active;
  if (one->reduction) one->reduction(lanes);
  report.exchanges++;
  if (flags) pass_simdgroup_barrier(index, flags);
  for (uint32_t lane = 0; lane < count; lane++)
    if (active >> lane & 1) threads[first + lane].state = State::kRunnable;
  return true;
}

bool Worker::release_barrier() {
  uint32_t flags = ~0u;
  for (uint32_t i = 0; i < num_threads; i++) {
    if (threads[i].state != State::kAtBarrier || !same_site(threads[i].site, threads[0].site))
      return false;
    flags &= threads[i].flags;
  }
  report.barriers++;
  pass_barrier(flags);
  for (uint32_t i = 0; i < num_threads; i++) threads[i].state = State::kRunnable;
  return true;
}

bool Worker::run(Size3 at) {
  begin(at);
  if (sigsetjmp(escape, 1) != 0)
    return false; // a thread faulted; the handler has filled the report
  while (!stopped()) {
    order(simdgroup_order, num_simdgroups);
    for (uint32_t turn = 0; turn < num_simdgroups; turn++)
      run_simdgroup(simdgroup_order.turns[turn]);
    bool all_returned = true;
    for (uint32_t i = 0; i < num_threads; i++) all_returned &= threads[i].state == State::kReturned;
    if (all_returned) return true;
    // When another worker failed, simdgroups here were left in the middle, which is no divergence.
    if (!release_barrier()) return stopped() ? false : fail(kDivergence, nullptr);
  }
  return false;
}

char* Worker::array(int index, const char* name, size_t bytes, size_t element_bytes) {
  ThreadgroupArray& array = arrays[index];
  if (array.bytes) return array.mapping.data;
  if (array.mapping.pages_bytes < bytes) unmap(array.mapping);
  if (!array.mapping.base && !map_guarded(bytes, false, 64 * page_bytes(), &array.mapping)) {
    fail(kNoMemory, running);
    siglongjmp(escape, 1);
  }
  Mapping& mapping = array.mapping;
  mapping.data = launch->start_aligned ? mapping.pages
                                       : mapping.pages + (mapping.pages_bytes - bytes) / 16 * 16;
  array.name = name;
  array.bytes = bytes;
  for (size_t i = 0; i < mapping.pages_bytes / sizeof(uint32_t); i++)
    reinterpret_cast<uint32_t*>(mapping.pages)[i] = launch->poison;

  if (launch->watches_accesses) watch_array(array, index, element_bytes);

  uint64_t total = 0;
  for (auto& other : arrays) total += other.bytes;
  if (total > report.threadgroup_bytes) report.threadgroup_bytes = total;
  if (total > kMaxThreadgroupBytes) {
    fail(kTooMuchMemory, running);
    snprintf(report.message, sizeof(report.message),
             "%llu bytes of threadgroup memory, a device has %zu",
             static_cast<unsigned long long>(total), kMaxThreadgroupBytes);
    siglongjmp(escape, 1);
  }
  return mapping.data;
}

bool Worker::fail(Outcome outcome, const Thread* thread) {
  report.outcome = outcome;
  report.threadgroup = position;
  if (thread) {
    report.thread = thread->context->thread_position_in_threadgroup;
    report.last_line = thread->site.line;
  }
  if (outcome == kDivergence) describe_waits(report.message, sizeof(report.message));
  return false;
}

// "threads 0..31 wait at threadgroup_barrier (line 7); threads 32..63 have returned"
void Worker::describe_waits(char* text, size_t room) const {
  size_t used = 0;
  text[0] = 0;
  for (size_t start = 0, end; start < num_threads; start = end) {
    const Thread& one = threads[start];
    for (end = start + 1; end < num_threads; end++) {
      const Thread& other = threads[end];
      if (other.state != one.state) break;
      if (one.state != State::kReturned && !same_site(other.site, one.site)) break;
    }
    if (used + 120 > room) {
      snprintf(text + used, room - used, "; ...");
      return;
    }
    const char* separator = start ? "; " : "";
    if (end - start == 1)
      used += snprintf(text + used, room - used, "%sthread %zu ", separator, start);
    else
      used += snprintf(text + used, room - used, "%sthreads %zu..%zu ", separator, start, end - 1);
    if (one.state == State::kReturned)
      used += snprintf(text + used, room - used, "returned");
    else
      used += snprintf(text + used, room - used, "at %.40s (line %d)", one.site.operation,
                       one.site.line);
  }
}

} // namespace emulator

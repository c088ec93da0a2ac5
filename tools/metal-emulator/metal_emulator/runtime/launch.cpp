// Spreads threadgroups over worker threads and turns the signals of a faulting kernel into a
// report.
#include "launch.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#if defined(__linux__)
#include <ucontext.h>
#endif

#include "threadgroup.h"

namespace emulator {

namespace {

constexpr int kFaultSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP};
constexpr int kNumFaultSignals = sizeof(kFaultSignals) / sizeof(int);
constexpr int kStopSignal = SIGUSR1;

thread_local Worker* this_worker = nullptr;

// Where the instruction that faulted lies; nullptr: not known.
const char* code_of(void* machine_context) {
#if defined(__linux__) && defined(__x86_64__)
  return reinterpret_cast<const char*>(
      static_cast<ucontext_t*>(machine_context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__linux__) && defined(__aarch64__)
  return reinterpret_cast<const char*>(
      static_cast<ucontext_t*>(machine_context)->uc_mcontext.pc);
#else
  (void)machine_context;
  return nullptr;
#endif
}

// Traps of the compiler's own bounds checks hold a number; ours, for misaligned pointers, don't.
#if defined(__x86_64__)
constexpr int kArrayTrap = SIGILL;
bool is_array_trap(const char* code) { return code && memcmp(code, "\x67\x0f\xb9", 3) == 0; }
#else
constexpr int kArrayTrap = SIGTRAP;
bool is_array_trap(const char* code) {
  uint32_t instruction = 0;
  if (code) memcpy(&instruction, code, sizeof(instruction));
  return (instruction & 0xffffe01f) == 0xd42aa000; // brk #0x55..
}
#endif

int is_write(void* machine_context) {
#if defined(__linux__) && defined(__x86_64__)
  return static_cast<ucontext_t*>(machine_context)->uc_mcontext.gregs[REG_ERR] >> 1 & 1;
#else
  (void)machine_context;
  return -1;
#endif
}

bool address_in_stack_guard(const Worker& worker, const void* address) {
  auto offset = static_cast<const char*>(address) - worker.stacks;
  return offset >= 0 && size_t(offset) < worker.num_stacks * kStackBytes &&
         size_t(offset) % kStackBytes < page_bytes();
}

// A kernel holds no lock and no resource, so its stack can be left where it is.
void on_signal(int number, siginfo_t* info, void* machine_context) {
  Worker* worker = this_worker;
  if (!worker || !worker->running) {
    // Not ours: a stop that came too late, or a fault that has nothing to do with a kernel.
    if (number != kStopSignal) signal(number, SIG_DFL);
    return;
  }
  Thread* thread = worker->running;
  worker->running = nullptr;
  worker->fail(number == kStopSignal ? kTimeLimit : kFault, thread);
  Report& report = worker->report;
  report.signal = number;
  report.address = reinterpret_cast<uint64_t>(info->si_addr);
  report.is_write = number == SIGSEGV || number == SIGBUS ? is_write(machine_context) : -1;
  if (const char* code = code_of(machine_context)) {
    // Addresses of code are those behind an instruction, as those of calls are.
    report.code = code + 1 - reinterpret_cast<const char*>(worker->launch->kernel);
    report.has_code = 1;
  }
  if (number == kArrayTrap && is_array_trap(code_of(machine_context))) {
    worker->report.outcome = kMemoryFault;
    snprintf(report.message, sizeof(report.message), "used memory outside of a thread array");
  }
  for (auto& array : worker->arrays) {
    const Mapping& mapping = array.mapping;
    auto* address = static_cast<char*>(info->si_addr);
    if (array.bytes && address >= mapping.base && address < mapping.base + mapping.total)
      snprintf(report.message, sizeof(report.message),
               "byte %td of threadgroup array %s, which has %zu bytes", address - mapping.data,
               array.name, array.bytes);
  }
  if (address_in_stack_guard(*worker, info->si_addr))
    snprintf(report.message, sizeof(report.message), "outside of the thread's stack (%zu bytes)",
             kStackBytes);
  siglongjmp(worker->escape, 1);
}

bool grow_stacks(Worker& worker, int count) {
  if (!worker.stacks) {
    // One more than needed, to find an aligned start. Untouched stacks cost no memory.
    size_t bytes = (kMaxThreads + 1) * kStackBytes;
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (base == MAP_FAILED) return false;
    auto start = (reinterpret_cast<uintptr_t>(base) + kStackBytes - 1) & ~(kStackBytes - 1);
    worker.stacks = reinterpret_cast<char*>(start);
  }
  for (; worker.num_stacks < count; worker.num_stacks++)
    if (mprotect(worker.stacks + worker.num_stacks * kStackBytes, page_bytes(), PROT_NONE) != 0)
      return false;
  return true;
}

constexpr int kMaxWorkers = 64;
Worker* idle_workers[kMaxWorkers]; // they keep their stacks from launch to launch
pthread_mutex_t one_launch_at_a_time = PTHREAD_MUTEX_INITIALIZER;

// The workers of one launch.
struct Crew {
  const Launch* launch;
  uint64_t num_threadgroups;
  uint64_t next; // atomic: the next threadgroup to run
  bool stop;     // atomic
  int working;   // under the mutex
  pthread_mutex_t mutex;
  pthread_cond_t finished;
};

struct Job {
  Crew* crew;
  Worker* worker;
  pthread_t handle;
};

uint64_t groups(uint32_t grid, uint32_t threadgroup) {
  return (uint64_t(grid) + threadgroup - 1) / threadgroup;
}

void run_threadgroups(Crew& crew, Worker& worker) {
  const Launch& launch = *crew.launch;
  const uint64_t width = groups(launch.grid.x, launch.threadgroup.x),
                 height = groups(launch.grid.y, launch.threadgroup.y);
  while (!__atomic_load_n(&crew.stop, __ATOMIC_RELAXED)) {
    uint64_t i = __atomic_fetch_add(&crew.next, 1, __ATOMIC_RELAXED);
    if (i >= crew.num_threadgroups) return;
    if (launch.order == kDescending) i = crew.num_threadgroups - 1 - i;
    if (!worker.run(
            {uint32_t(i % width), uint32_t(i / width % height), uint32_t(i / (width * height))}))
      __atomic_store_n(&crew.stop, true, __ATOMIC_RELAXED);
  }
}

void* work(void* argument) {
  Job& job = *static_cast<Job*>(argument);
  // A fault may be that of a full stack, so signals get one of their own.
  constexpr size_t kSignalStackBytes = 64 << 10;
  stack_t mine = {};
  mine.ss_sp = malloc(kSignalStackBytes);
  mine.ss_size = kSignalStackBytes;
  sigaltstack(&mine, nullptr);
  this_worker = job.worker;
  run_threadgroups(*job.crew, *job.worker);
  this_worker = nullptr;
  mine.ss_flags = SS_DISABLE;
  sigaltstack(&mine, nullptr);
  free(mine.ss_sp);
  pthread_mutex_lock(&job.crew->mutex);
  job.crew->working--;
  pthread_cond_signal(&job.crew->finished);
  pthread_mutex_unlock(&job.crew->mutex);
  return nullptr;
}

timespec seconds_from_now(double seconds) {
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  time.tv_sec += time_t(seconds);
  time.tv_nsec += long((seconds - double(time_t(seconds))) * 1e9);
  if (time.tv_nsec >= 1000000000) time.tv_sec++, time.tv_nsec -= 1000000000;
  return time;
}

// True if all workers were done by the deadline; called with the mutex held.
bool finished_by(Crew& crew, timespec deadline) {
  while (crew.working > 0)
    if (pthread_cond_timedwait(&crew.finished, &crew.mutex, &deadline) != 0)
      return crew.working == 0;
  return true;
}

Worker* prepare_worker(int index, const Crew& crew) {
  Worker*& worker = idle_workers[index];
  static_assert(sizeof(Worker) % alignof(Worker) == 0);
  if (!worker) {
    void* room = aligned_alloc(alignof(Worker), sizeof(Worker));
    if (!room) return nullptr;
    // All zero is a worker's start.
    worker = static_cast<Worker*>(memset(room, 0, sizeof(Worker)));
  }
  const Launch& launch = *crew.launch;
  worker->launch = &launch;
  worker->report = {};
  worker->stop = &crew.stop;
  worker->lane_order.count = worker->simdgroup_order.count = 0;
  if (launch.watches_accesses) worker->begin_watching();
  return grow_stacks(*worker, launch.threadgroup.x * launch.threadgroup.y * launch.threadgroup.z)
             ? worker
             : nullptr;
}

void run_crew(Crew& crew, Report& report) {
  Job jobs[kMaxWorkers];
  int num_workers = crew.launch->num_workers < kMaxWorkers ? crew.launch->num_workers : kMaxWorkers,
      num_jobs = 0;
  for (; num_jobs < num_workers && uint64_t(num_jobs) < crew.num_threadgroups; num_jobs++) {
    Job& job = jobs[num_jobs];
    job = {&crew, prepare_worker(num_jobs, crew), {}};
    pthread_mutex_lock(&crew.mutex);
    crew.working++;
    pthread_mutex_unlock(&crew.mutex);
    if (!job.worker || pthread_create(&job.handle, nullptr, work, &job) != 0) {
      pthread_mutex_lock(&crew.mutex);
      crew.working--;
      pthread_mutex_unlock(&crew.mutex);
      report.outcome = kNoMemory;
      break;
    }
  }
  pthread_mutex_lock(&crew.mutex);
  if (!finished_by(crew, seconds_from_now(crew.launch->time_limit_s))) {
    __atomic_store_n(&crew.stop, true, __ATOMIC_RELAXED);
    report.outcome = kTimeLimit;
    // Again and again: a worker that is between two threads at this moment ignores the signal.
    while (!finished_by(crew, seconds_from_now(0.02)))
      for (int i = 0; i < num_jobs; i++) pthread_kill(jobs[i].handle, kStopSignal);
  }
  pthread_mutex_unlock(&crew.mutex);

  uint64_t barriers = 0, exchanges = 0, threadgroup_bytes = 0;
  Traffic traffic = {};
  for (int i = 0; i < num_jobs; i++) {
    pthread_join(jobs[i].handle, nullptr);
    const Report& one = jobs[i].worker->report;
    barriers += one.barriers, exchanges += one.exchanges;
    for (int b = 0; b <= kMaxBuffers; b++)
      traffic.loaded[b] += one.traffic.loaded[b], traffic.stored[b] += one.traffic.stored[b],
          traffic.distinct[b] += one.traffic.distinct[b];
    jobs[i].worker->forget_loads();
    if (one.threadgroup_bytes > threadgroup_bytes) threadgroup_bytes = one.threadgroup_bytes;
    if (one.outcome != kDone && (report.outcome == kDone || report.outcome == kTimeLimit))
      report = one;
  }
  report.barriers = barriers, report.exchanges = exchanges,
  report.threadgroup_bytes = threadgroup_bytes;
  report.traffic = traffic;
}

} // namespace

extern "C" __attribute__((visibility("default"))) int emulator_launch(const Launch* launch,
                                                                      Report* report) {
  pthread_mutex_lock(&one_launch_at_a_time);
  *report = {};
  struct sigaction action = {}, old_actions[kNumFaultSignals], old_stop;
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < kNumFaultSignals; i++) sigaction(kFaultSignals[i], &action, &old_actions[i]);
  sigaction(kStopSignal, &action, &old_stop);

  const Size3 grid = launch->grid, group = launch->threadgroup;
  Crew crew = {launch,
               groups(grid.x, group.x) * groups(grid.y, group.y) * groups(grid.z, group.z),
               0,
               false,
               0,
               PTHREAD_MUTEX_INITIALIZER,
               PTHREAD_COND_INITIALIZER};
  run_crew(crew, *report);

  for (int i = 0; i < kNumFaultSignals; i++) sigaction(kFaultSignals[i], &old_actions[i], nullptr);
  sigaction(kStopSignal, &old_stop, nullptr);
  pthread_mutex_unlock(&one_launch_at_a_time);
  return report->outcome;
}

extern "C" __attribute__((visibility("default"))) int emulator_map(size_t bytes, int start_aligned,
                                                                   Mapping* out) {
  return map_guarded(bytes, start_aligned, kGuardBytes, out) ? 0 : 1;
}

extern "C" __attribute__((visibility("default"))) int emulator_protect(const Mapping* mapping,
                                                                       int writable) {
  return mapping->pages_bytes ? mprotect(mapping->pages, mapping->pages_bytes,
                                         PROT_READ | (writable ? PROT_WRITE : 0))
                              : 0;
}

extern "C" __attribute__((visibility("default"))) int emulator_same(const void* a, const void* b,
                                                                    size_t bytes) {
  return memcmp(a, b, bytes) == 0;
}

extern "C" __attribute__((visibility("default"))) void emulator_unmap(Mapping* mapping) {
  unmap(*mapping);
}

} // namespace emulator

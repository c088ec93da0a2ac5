// Atomics, with relaxed order as on a Mac. What order they come in depends on the order of the
// threads.
#pragma once
#include "../../runtime/interface.h"
#include "base.h"

// Atomics are ordered with each other, so a watched build says that they are some.
#if defined(EMULATOR_WATCHES_ACCESSES)
#define ATOMIC_FUNC inline __attribute__((noinline, nodebug, no_sanitize("coverage")))
#define WATCH_ATOMIC(IS_STORE)                                                                     \
  {                                                                                                \
    auto& context = emulator::current();                                                           \
    context.calls->access(context, {(const char*)&object->value, sizeof(T), IS_STORE, true, false, \
                                    (const char*)__builtin_return_address(0)});                    \
  }
#else
#define ATOMIC_FUNC METAL_FUNC
#define WATCH_ATOMIC(IS_STORE)
#endif

namespace metal {

enum memory_order { memory_order_relaxed };

template <typename T>
struct atomic {
  T value;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;

#define ATOMICS(SPACE)                                                                            \
  template <typename T>                                                                           \
  ATOMIC_FUNC T atomic_load_explicit(const volatile SPACE atomic<T>* object, memory_order) {      \
    WATCH_ATOMIC(false)                                                                           \
    T value;                                                                                      \
    __atomic_load((volatile T*)&object->value, &value, __ATOMIC_RELAXED);                         \
    return value;                                                                                 \
  }                                                                                               \
  template <typename T>                                                                           \
  ATOMIC_FUNC void atomic_store_explicit(volatile SPACE atomic<T>* object, same_as<T> value,      \
                                         memory_order) {                                          \
    WATCH_ATOMIC(true)                                                                            \
    __atomic_store((volatile T*)&object->value, &value, __ATOMIC_RELAXED);                        \
  }                                                                                               \
  template <typename T, typename Change>                                                          \
  ATOMIC_FUNC T atomic_change(volatile SPACE atomic<T>* object, Change change) {                  \
    WATCH_ATOMIC(true)                                                                            \
    T old, next;                                                                                  \
    auto* memory = (volatile T*)&object->value; /* the builtins know of one address space only */ \
    __atomic_load(memory, &old, __ATOMIC_RELAXED);                                                \
    do next = change(old);                                                                        \
    while (!__atomic_compare_exchange(memory, &old, &next, false, __ATOMIC_RELAXED,               \
                                      __ATOMIC_RELAXED));                                         \
    return old;                                                                                   \
  }                                                                                               \
  ATOMIC_CHANGE(SPACE, fetch_add, old + by)                                                       \
  ATOMIC_CHANGE(SPACE, fetch_sub, old - by)                                                       \
  ATOMIC_CHANGE(SPACE, fetch_max, old < by ? by : old)                                            \
  ATOMIC_CHANGE(SPACE, fetch_min, by < old ? by : old)                                            \
  ATOMIC_CHANGE(SPACE, fetch_and, (old & by))                                                     \
  ATOMIC_CHANGE(SPACE, fetch_or, old | by)                                                        \
  ATOMIC_CHANGE(SPACE, fetch_xor, old ^ by)                                                       \
  ATOMIC_CHANGE(SPACE, exchange, (old, by))
#define ATOMIC_CHANGE(SPACE, NAME, EXPRESSION)                                                     \
  template <typename T, typename U>                                                                \
  METAL_FUNC T atomic_##NAME##_explicit(volatile SPACE atomic<T>* object, U given, memory_order) { \
    const T by = T(given);                                                                         \
    return atomic_change(object, [by](T old) { return T(EXPRESSION); });                           \
  }

ATOMICS(device)
ATOMICS(threadgroup)

#undef ATOMICS
#undef ATOMIC_CHANGE
#undef ATOMIC_FUNC
#undef WATCH_ATOMIC

} // namespace metal

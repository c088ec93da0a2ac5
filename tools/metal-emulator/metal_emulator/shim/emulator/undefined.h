// What has no defined result: the compiler calls these at an index outside of an array and at a
// float that an integer can't hold.
#pragma once
#include "threads.h"

namespace emulator {

// As the compiler's UndefinedBehaviorSanitizer lays them out.
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeDescriptor {
  uint16_t kind, info;
  char name[1];
};
struct OutsideArray {
  SourceLocation location;
  const TypeDescriptor* array;
  const TypeDescriptor* index;
};
struct OutsideInteger {
  SourceLocation location;
  const TypeDescriptor* from;
  const TypeDescriptor* to;
};

} // namespace emulator

namespace metal::vec_detail {

inline __attribute__((noinline, nodebug)) void outside_vector(int index, int count) {
  auto& context = emulator::current();
  context.calls->outside_array(context, (const char*)__builtin_return_address(0),
                               count == 2   ? "a vector of 2"
                               : count == 3 ? "a vector of 3"
                                            : "a vector of 4",
                               index);
}

} // namespace metal::vec_detail

extern "C" __attribute__((visibility("hidden"), used, no_sanitize("coverage"))) inline void
__ubsan_handle_out_of_bounds_abort(const emulator::OutsideArray* found, uintptr_t index) {
  // The lowest bit of an integer type's info says whether it is signed, the others how wide it is.
  int unused_bits = 64 - (1 << (found->index->info >> 1));
  int64_t value = found->index->info & 1 ? int64_t(index << unused_bits) >> unused_bits : index;
  auto& context = emulator::current();
  context.calls->outside_array(context, (const char*)__builtin_return_address(0),
                               found->array->name, value);
}

extern "C" __attribute__((visibility("hidden"), used, no_sanitize("coverage"))) inline void
__ubsan_handle_float_cast_overflow_abort(const emulator::OutsideInteger* found, uintptr_t bits) {
  // Half and bfloat are as wide as each other; the name tells them apart.
  float value = __builtin_bit_cast(float, uint32_t(bits));
  if (found->from->info == 16) {
    bool is_bfloat = false;
    for (const char* c = found->from->name; *c; c++)
      is_bfloat = is_bfloat || (c[0] == 'b' && c[1] == 'f') || (c[0] == '_' && c[2] == 'b');
    value = is_bfloat ? float(__builtin_bit_cast(__bf16, uint16_t(bits)))
                      : float(__builtin_bit_cast(_Float16, uint16_t(bits)));
  }
  auto& context = emulator::current();
  context.calls->outside_integer(context, (const char*)__builtin_return_address(0),
                                 found->to->name, double(value));
}

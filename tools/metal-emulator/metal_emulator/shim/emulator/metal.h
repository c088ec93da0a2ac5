#pragma once
#include "atomic.h"
#include "math.h"
#include "mlx_utils.h"
#include "threads.h"
#include "vec.h"
#include "undefined.h"
#if defined(EMULATOR_WATCHES_ACCESSES)
#include "watching.h"
#endif

// A kernel's own functions keep their lines.
#undef METAL_FUNC
#define METAL_FUNC inline __attribute__((always_inline))

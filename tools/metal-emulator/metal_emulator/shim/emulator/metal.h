#pragma once
#include "atomic.h"
#include "math.h"
#include "mlx_utils.h"
#include "threads.h"
#include "vec.h"
#if defined(EMULATOR_COUNTS_ACCESSES)
#include "counting.h"
#endif

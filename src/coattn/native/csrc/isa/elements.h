// What every instruction set's file includes first. Nothing here may define a non-static inline function: the
// linker would keep one copy, perhaps the one compiled for a CPU we do not have.
#pragma once

#include <cstddef>
#include <cstdint>

#include "element.h"

// Numbers in bfloat16, for the C++ of the embedded server and of the trainer.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using Half = std::uint16_t;  // the bits of a bfloat16
using Count = std::int64_t;

static inline float wide(Half half) {
    const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

static inline Half narrow(float number) {  // to the nearest, ties to even
    std::uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return static_cast<Half>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static inline float rounded(float number) { return wide(narrow(number)); }

// The number, or -80 below it: exp(-80) counts as 0, and vectors of smaller ones are slow.
static inline float bounded(float x) { return std::max(x, -80.0f); }

// Arithmetic of the card.
#include <cmath>
#include <cstring>

#include "state.hpp"

namespace emulator {
namespace {

float flush(float v) { return std::fabs(v) < 1.17549435e-38f ? std::copysign(0.f, v) : v; }

// A NaN in 16 bits. It may belong to an accumulator of products in flight.
u16 nan(float v) {
  check_sums(&v, 4);
  return 0x7fff;
}

float checked(float v) {
  check_sums(&v, 4);
  return v;
}

// A lane's operand of a product, Each numbers per register. They are widened once: each is used by 8 or 4 lanes.
template <u32 Each>
struct Operands {
  float a[4 * Each], b[2 * Each];
};

template <u32 Each>
void multiply(float* d, const Operands<Each>& own, const void* site) {
  const u32 lane = machine->current % kWarp, group = lane / 4, part = lane % 4;
  const auto of_lane = [&](u32 l) { return reinterpret_cast<const Operands<Each>*>(machine->threads[machine->current - lane + l].brought); };
  machine->meet(Kind::kTogether, site, ~0u, u64(&own), lane);
  double sum[4] = {d[0], d[1], d[2], d[3]};
  for (u32 t = 0; t < 4; ++t) {  // lanes that hold a quarter of the columns of a and of the rows of b
    const float* rows = of_lane(group * 4 + t)->a;
    for (u32 n = 0; n < 2; ++n) {
      const float* column = of_lane((2 * part + n) * 4 + t)->b;
      for (u32 row = 0; row < 2; ++row)
        for (u32 w = 0; w < 2; ++w)
          for (u32 i = 0; i < Each; ++i) sum[2 * row + n] += double(rows[Each * (row + 2 * w) + i]) * column[Each * w + i];
    }
  }
  machine->meet(Kind::kTogether, site, ~0u, u64(&own), lane);  // the others may have read this lane's numbers until here
  for (int i = 0; i < 4; ++i) d[i] = float(sum[i]);
}

}  // namespace

float from_bf16(u16 v) {
  const u32 bits = u32(v) << 16;
  float r;
  std::memcpy(&r, &bits, 4);
  return r;
}

u16 to_bf16(float v) {
  u32 bits;
  std::memcpy(&bits, &v, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return nan(v);
  return u16((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

u16 to_f16(float v) {
  u32 bits;
  std::memcpy(&bits, &v, 4);
  const u32 sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return nan(v);
  if (magnitude >= 0x47800000u) return u16(sign | 0x7c00u);  // 65536 and above
  if (magnitude < 0x38800000u) {                             // below 2^-14: subnormal, in steps of 2^-24
    const float scaled = std::nearbyint(std::ldexp(std::fabs(v), 24));
    return u16(sign | u32(scaled));
  }
  const u32 rounded = magnitude + 0xfffu + (magnitude >> 13 & 1) - 0x38000000u;
  return u16(sign | (rounded >> 13));
}

u16 truncate_f16(float v) {
  u16 h = to_f16(v);
  if ((h & 0x7c00u) == 0x7c00u && std::isfinite(v)) return u16((h & 0x8000u) | 0x7bffu);
  if (std::fabs(from_f16(h)) > std::fabs(v)) --h;  // its magnitude
  return h;
}

float from_f16(u16 h) {
  const u32 exponent = h >> 10 & 31, mantissa = h & 1023;
  float v = exponent == 31 ? (mantissa ? NAN : INFINITY)
                           : exponent ? std::ldexp(float(mantissa | 1024), int(exponent) - 25) : std::ldexp(float(mantissa), -24);
  return h & 0x8000 ? -v : v;
}

// 1, 4 and 3 bits: no infinity, and 0x7f is NaN. Below 2^-6 in steps of 2^-9.
u16 e4m3_to_f16(unsigned char v) {
  const u32 size = v & 127;
  if (size == 127) return 0x7fff;
  const float number = size < 8 ? std::ldexp(float(size), -9) : std::ldexp(float(size % 8 + 8), int(size / 8) - 10);
  return to_f16(v & 128 ? -number : number);
}

unsigned char to_e4m3(float v) {
  const float size = std::fabs(checked(v));
  const unsigned char sign = std::signbit(v) ? 128 : 0;
  if (size != size) return 127;
  if (size >= 448.f) return sign | 126;
  const int exponent = size < 0.015625f ? -6 : std::ilogb(size);
  const int steps = int(std::nearbyint(std::ldexp(size, 3 - exponent)));  // of 2^(exponent - 3): 8 … 16, or fewer for subnormals
  return sign | static_cast<unsigned char>(8 * (exponent + 6) + steps);
}

float exp2_flushed(float v) { return flush(std::exp2(flush(checked(v)))); }
float rsqrt_flushed(float v) { return flush(1.f / std::sqrt(flush(checked(v)))); }
float rcp_flushed(float v) { return flush(1.f / flush(checked(v))); }

float log2_flushed(float v) { return std::log2(flush(checked(v))); }

// Sums in double, rounded once per call: the tensor cores' own order and rounding are not documented.
void mma(float* d, const u32* a, const u32* b, bool bf16) {
  Operands<2> own;
  const auto widen = [&](u32 word, float* to) {
    for (u32 half = 0; half < 2; ++half) to[half] = bf16 ? from_bf16(u16(word >> 16 * half)) : from_f16(u16(word >> 16 * half));
  };
  for (u32 w = 0; w < 4; ++w) widen(a[w], own.a + 2 * w);
  for (u32 w = 0; w < 2; ++w) widen(b[w], own.b + 2 * w);
  multiply(d, own, __builtin_return_address(0));
}

void mma_tf32(float* d, const float* a, const float* b) {
  Operands<1> own;
  const auto cut = [](float v) {
    u32 bits;
    std::memcpy(&bits, &v, 4);
    if ((bits & 0x7fffffffu) <= 0x7f800000u) bits &= 0xffffe000u;  // NaN stays NaN
    std::memcpy(&v, &bits, 4);
    return checked(v);
  };
  for (u32 w = 0; w < 4; ++w) own.a[w] = cut(a[w]);
  for (u32 w = 0; w < 2; ++w) own.b[w] = cut(b[w]);
  multiply(d, own, __builtin_return_address(0));
}

}  // namespace emulator

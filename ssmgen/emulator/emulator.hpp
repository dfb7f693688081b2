// Gives CUDA's words a meaning in C++17 and replaces the PTX of templates/lib with portable bodies: included before a generated kernel's
// text, it lets the text run on a CPU, unmodified. Threads of a block are fibers that run until they meet at a shuffle or a barrier.
//
// It is a checker first: every access to global memory must lie in an operand, be aligned, not collide with another thread's write,
// and come after the wait in a kernel that has one; lanes must meet at the same shuffle; shared memory must be written before it is
// read. The first violation ends the launch with a sentence about it.
//
// Every kernel is compiled with this header, so it contains declarations only, and no headers of the standard library, which take longer to
// read than a kernel. The implementation is in machine.cpp.
#ifndef SSMGEN_EMULATOR_HPP
#define SSMGEN_EMULATOR_HPP
#define SSMGEN_EMULATOR 1

#include "machine.hpp"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

namespace emulator {

template <class T>
u64 to_bits(T v) {
  static_assert(sizeof(T) <= 8, "a shuffle moves 8 bytes at most");
  u64 r = 0;
  __builtin_memcpy(&r, &v, sizeof(T));
  return r;
}
template <class T>
T from_bits(u64 v) {
  T r;
  __builtin_memcpy(&r, &v, sizeof(T));
  return r;
}

// A thread's handle of an array in shared memory.
template <class T>
class Shared {
 public:
  class Reference {
   public:
    Reference(SharedArray* array, long long i) : array_(array), i_(i) {}
    operator T() const { return *static_cast<const T*>(shared_load(array_, i_)); }
    T operator=(T v) const {
      check_sums(&v, sizeof(T));
      return *static_cast<T*>(shared_store(array_, i_)) = v;
    }
    T operator=(const Reference& r) const { return *this = T(r); }
    T operator+=(T v) const { return *this = T(*this) + v; }

   private:
    SharedArray* array_;
    long long i_;
  };

  explicit Shared(SharedArray* array) : array_(array) {}
  Reference operator[](long long i) { return Reference(array_, i); }
  SharedArray* array() const { return array_; }
  void store_to_peer(u32 rank, long long i, T v) {
    check_sums(&v, sizeof(T));
    *static_cast<T*>(shared_store_to_peer(array_, rank, i)) = v;
  }

 private:
  SharedArray* array_;
};

// A kernel's arguments as the driver takes them: an array of pointers to each.
template <class T>
T& argument(void**& next) {
  return *static_cast<T*>(*next++);
}
template <class... A>
struct Call {
  Call(void (*kernel)(A...), A&... arguments) { kernel(arguments...); }
};
template <class... A>
void call(void (*kernel)(A...), void** arguments) {
  Call<A...>{kernel, argument<A>(arguments)...};  // in braces: one after the other
}

}  // namespace emulator

#define threadIdx (emulator::thread_index)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

// Arrays are distinguished by the address of the static byte.
#define EMULATED_SHARED(type, name, count, alignment) \
  static char name##_site;                            \
  emulator::Shared<type> name(emulator::shared_array(&name##_site, #name, sizeof(type), count, alignment))
#define SHARED(type, name, count) EMULATED_SHARED(type, name, count, alignof(type))
#define ALIGNED_SHARED(type, name, count) EMULATED_SHARED(type, name, count, 16)
#define DYNAMIC_SHARED(type, name) EMULATED_SHARED(type, name, emulator::kDynamic, 16)
#define SWIZZLED_SHARED(type, name) EMULATED_SHARED(type, name, emulator::kDynamic, 1024)

// CUDA's own functions. Functions that C has too are C's.

extern "C" {
float ceilf(float), cosf(float), exp2f(float), expf(float), expm1f(float), fabsf(float), floorf(float), log1pf(float), log2f(float), logf(float);
float rintf(float), roundf(float), sinf(float), sqrtf(float), tanhf(float), truncf(float);
float copysignf(float, float), fmaxf(float, float), fminf(float, float), fmodf(float, float), powf(float, float);
float fmaf(float, float, float);
}

inline unsigned __float_as_uint(float v) { return emulator::from_bits<unsigned>(emulator::to_bits(v)); }
inline float __uint_as_float(unsigned v) { return emulator::from_bits<float>(v); }
inline int __float_as_int(float v) { return int(__float_as_uint(v)); }
inline float __int_as_float(int v) { return __uint_as_float(unsigned(v)); }

inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)high << 32 | low;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return r;
}
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }

template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}

[[gnu::always_inline]] inline void __syncthreads() { emulator::meet(emulator::Kind::kBlockBarrier, 0); }
[[gnu::always_inline]] inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator::meet(emulator::Kind::kWarpBarrier, mask); }
[[gnu::always_inline]] inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return unsigned(emulator::meet(emulator::Kind::kBallot, mask, predicate != 0));
}
[[gnu::always_inline]] inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
[[gnu::always_inline]] inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

template <class T>
[[gnu::always_inline]] inline T shuffle_from(unsigned mask, T v, unsigned source) {
  return emulator::from_bits<T>(emulator::meet(emulator::Kind::kShuffle, mask, emulator::to_bits(v), source));
}
template <class T>
[[gnu::always_inline]] inline T __shfl_sync(unsigned mask, T v, int source, int width = 32) {
  const unsigned lane = threadIdx.x % 32;
  return shuffle_from(mask, v, (lane & ~(width - 1u)) + unsigned(source) % width);
}
template <class T>
[[gnu::always_inline]] inline T __shfl_xor_sync(unsigned mask, T v, int with, int width = 32) {
  const unsigned lane = threadIdx.x % 32, source = lane ^ unsigned(with);
  return shuffle_from(mask, v, source / width == lane / width ? source : lane);
}
template <class T>
[[gnu::always_inline]] inline T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
  const unsigned lane = threadIdx.x % 32;
  return shuffle_from(mask, v, lane % width >= by ? lane - by : lane);
}
template <class T>
[[gnu::always_inline]] inline T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
  const unsigned lane = threadIdx.x % 32;
  return shuffle_from(mask, v, lane % width + by < unsigned(width) ? lane + by : lane);
}

template <class T>
T atomicAdd(T* p, T v) {
  emulator::check_atomic(p, sizeof(T));
  const T old = *p;
  *p = old + v;
  return old;
}
template <class T>
T atomicMax(T* p, T v) {
  emulator::check_atomic(p, sizeof(T));
  const T old = *p;
  *p = old < v ? v : old;
  return old;
}

// Portable bodies of templates/lib/ptx.cuh.j2.

template <class T>
inline T emulated_load(const void* p) {
  T r;
  emulator::load(p, &r, sizeof(T));
  return r;
}

inline unsigned char load_u8(const void* p) { return emulated_load<unsigned char>(p); }
template <class T>
inline const T* pinned(const T* p) {
  return p;
}
inline unsigned short load_u16(const void* p) { return emulated_load<unsigned short>(p); }
inline unsigned load_u32(const void* p) { return emulated_load<unsigned>(p); }
inline unsigned long long load_u64(const void* p) { return emulated_load<unsigned long long>(p); }
inline void load_2xu32(const void* p, unsigned* r) { emulator::load(p, r, 8); }
inline void load_4xu32(const void* p, unsigned* r) { emulator::load(p, r, 16); }
inline void store_u8(void* p, unsigned char v) { emulator::store(p, &v, 1); }
inline void store_u16(void* p, unsigned short v) { emulator::store(p, &v, 2); }
inline void store_u32(void* p, unsigned v) { emulator::store(p, &v, 4); }
inline void store_2xu32(void* p, const unsigned* v) { emulator::store(p, v, 8); }
inline void store_4xu32(void* p, const unsigned* v) { emulator::store(p, v, 16); }
inline void store_4xu32_streaming(void* p, const unsigned* v) { emulator::store(p, v, 16); }

inline unsigned short round_bf16(float v) { return emulator::to_bf16(v); }
inline unsigned round_2xbf16(float low, float high) { return round_bf16(low) | unsigned(round_bf16(high)) << 16; }
inline unsigned short round_f16(float v) { return emulator::to_f16(v); }
inline unsigned round_2xf16(float low, float high) { return round_f16(low) | unsigned(round_f16(high)) << 16; }
inline unsigned truncate_2xf16(float low, float high) { return emulator::truncate_f16(low) | unsigned(emulator::truncate_f16(high)) << 16; }
inline float widen_f16(unsigned short v) { return emulator::from_f16(v); }
inline unsigned widen_2xe4m3(unsigned short v) { return emulator::e4m3_to_f16(v & 255) | unsigned(emulator::e4m3_to_f16(v >> 8)) << 16; }
inline unsigned round_2xe4m3(float low, float high) { return emulator::to_e4m3(low) | unsigned(emulator::to_e4m3(high)) << 8; }
inline unsigned subtract_2xf16(unsigned a, unsigned b) {
  return round_2xf16(widen_f16(a) - widen_f16(b), widen_f16(a >> 16) - widen_f16(b >> 16));
}
inline unsigned subtract_2xbf16(unsigned a, unsigned b) {
  return round_2xbf16(__uint_as_float(a << 16) - __uint_as_float(b << 16), __uint_as_float(a & 0xffff0000u) - __uint_as_float(b & 0xffff0000u));
}
inline float max_nan(float a, float b) { return a != a || b != b ? __uint_as_float(0x7fffffffu) : fmaxf(a, b); }
inline int round_to_int(float v) { return v != v ? 0 : int(rintf(fminf(fmaxf(v, -2147483648.f), 2147483520.f))); }

inline float sin_approx(float v) { return sinf(v); }
inline float cos_approx(float v) { return cosf(v); }
inline float exp2_approx(float v) { return emulator::exp2_flushed(v); }
inline float rsqrt_approx(float v) { return emulator::rsqrt_flushed(v); }
inline float rcp_approx(float v) { return emulator::rcp_flushed(v); }
inline float log2_approx(float v) { return emulator::log2_flushed(v); }

[[gnu::always_inline]] inline void mma_bf16(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  emulator::mma(d, a, b, true);
}
[[gnu::always_inline]] inline void mma_f16(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  emulator::mma(d, a, b, false);
}
[[gnu::always_inline]] inline void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  const float a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  emulator::mma_tf32(d, a, b);
}

template <class T>
[[gnu::always_inline]] inline void load_matrices(unsigned (&r)[4], const emulator::Shared<T>& from, unsigned i) {
  emulator::load_matrices(r, from.array(), i, false);
}
template <class T>
[[gnu::always_inline]] inline void load_matrices_transposed(unsigned (&r)[4], const emulator::Shared<T>& from, unsigned i) {
  emulator::load_matrices(r, from.array(), i, true);
}

[[gnu::always_inline]] inline unsigned transpose_matrix(unsigned r) {
  const unsigned lane = threadIdx.x % 32, from = lane % 4 * 8 + lane / 8, by = lane / 4 % 2 * 16;  // of its two rows, its column
  const unsigned low = __shfl_sync(~0u, r, int(from)), high = __shfl_sync(~0u, r, int(from + 4));
  return (low >> by & 0xffffu) | (high >> by) << 16;
}

inline void load_shared_2xu32(const emulator::Shared<unsigned>& from, unsigned i, unsigned* r) { emulator::load_pair(r, from.array(), i); }

template <unsigned Size = 16, class T>
inline void copy_async(const emulator::Shared<T>& to, unsigned i, const void* from, unsigned bytes = Size) {
  static_assert(Size == 4 || Size == 8 || Size == 16, "a copy has 4, 8 or 16 bytes");
  static_assert(Size % sizeof(T) == 0, "a copy is one of whole elements");
  emulator::copy_async(to.array(), i, from, bytes, Size);
}
inline void commit_copies() { emulator::commit_copies(); }
template <unsigned Left>
inline void wait_copies() { emulator::wait_copies(Left); }
inline void wait_all_copies() { emulator::wait_all_copies(); }

inline void barrier_init(const emulator::Shared<unsigned long long>& barriers, unsigned i, unsigned count) {
  emulator::barrier_init(barriers.array(), i, count);
}
inline void barrier_arrive(const emulator::Shared<unsigned long long>& barriers, unsigned i) { emulator::barrier_arrive(barriers.array(), i, 0); }
inline void barrier_arrive_expecting(const emulator::Shared<unsigned long long>& barriers, unsigned i, unsigned bytes) {
  emulator::barrier_arrive(barriers.array(), i, bytes);
}
inline void barrier_arrive_with_copies(const emulator::Shared<unsigned long long>& barriers, unsigned i) {
  emulator::barrier_arrive_with_copies(barriers.array(), i);
}
inline void barrier_wait(const emulator::Shared<unsigned long long>& barriers, unsigned i, unsigned parity) {
  emulator::barrier_wait(barriers.array(), i, parity);
}
template <class T>
inline void copy_bulk(const emulator::Shared<T>& to, unsigned i, const void* from, unsigned bytes,
                      const emulator::Shared<unsigned long long>& barriers, unsigned b) {
  static_assert(16 % sizeof(T) == 0, "a copy is one of whole elements");
  emulator::copy_bulk(to.array(), i, from, bytes, barriers.array(), b);
}
template <class T>
inline void copy_bulk_once(const emulator::Shared<T>& to, unsigned i, const void* from, unsigned bytes,
                           const emulator::Shared<unsigned long long>& barriers, unsigned b) {
  copy_bulk(to, i, from, bytes, barriers, b);
}

using emulator::TensorMap;
template <class T>
inline void copy_box(const emulator::Shared<T>& to, unsigned i, const TensorMap& map, unsigned token, unsigned columns, unsigned head,
                     unsigned row, const emulator::Shared<unsigned long long>& barriers, unsigned b) {
  static_assert(16 % sizeof(T) == 0, "a copy is one of whole elements");
  const unsigned from[5] = {0, token, columns, head, row};
  emulator::copy_box(to.array(), i, map, from, barriers.array(), b);
}
template <class T>
inline void copy_columns(const emulator::Shared<T>& to, unsigned i, const TensorMap& map, unsigned column, unsigned token, unsigned head,
                         unsigned row, const emulator::Shared<unsigned long long>& barriers, unsigned b) {
  static_assert(16 % sizeof(T) == 0, "a copy is one of whole elements");
  const unsigned from[5] = {column, token, 0, head, row};
  emulator::copy_box(to.array(), i, map, from, barriers.array(), b);
}
inline void prefetch_box(const TensorMap&, unsigned, unsigned, unsigned, unsigned) {}
inline void prefetch_columns(const TensorMap&, unsigned, unsigned, unsigned, unsigned) {}

using emulator::Matrix;
inline Matrix operator+(Matrix m, unsigned bytes) { return m.byte += bytes, m; }
template <class T>
inline Matrix matrix_by_rows(const emulator::Shared<T>& from, unsigned i) {
  return Matrix{from.array(), (long long)(i) * sizeof(T), 0, false};
}
template <class T>
inline Matrix matrix_by_columns(const emulator::Shared<T>& from, unsigned i, unsigned next) {
  return Matrix{from.array(), (long long)(i) * sizeof(T), next, true};
}
template <class T>
inline Matrix matrix_by_short_rows(const emulator::Shared<T>& from, unsigned i) {
  return Matrix{from.array(), (long long)(i) * sizeof(T), 0, false, 32};
}
[[gnu::always_inline]] inline void wgmma_fence() { emulator::wgmma_fence(); }
[[gnu::always_inline]] inline void wgmma_commit() { emulator::wgmma_commit(); }
template <unsigned Left>
[[gnu::always_inline]] inline void wgmma_wait() {
  emulator::wgmma_wait(Left);
}
template <unsigned Count>
inline void wgmma_landed(float (&d)[Count]) {
  emulator::wgmma_landed(d, Count);
}
#define EMULATED_PRODUCT(columns)                                                                                               \
  template <bool kByColumns>                                                                                                    \
  [[gnu::always_inline]] inline void wgmma_##columns(float (&d)[columns / 2], const unsigned* a, const Matrix& b, unsigned sum) { \
    emulator::wgmma(d, a, b, columns, kByColumns, sum);                                                                         \
  }                                                                                                                             \
  template <bool kFirstByColumns, bool kByColumns>                                                                              \
  [[gnu::always_inline]] inline void wgmma_##columns##_shared(float (&d)[columns / 2], const Matrix& a, const Matrix& b,        \
                                                              unsigned sum) {                                                   \
    emulator::wgmma(d, a, kFirstByColumns, b, columns, kByColumns, sum);                                                        \
  }
#define EMULATED_PRODUCTS(a, b, c, d) EMULATED_PRODUCT(a) EMULATED_PRODUCT(b) EMULATED_PRODUCT(c) EMULATED_PRODUCT(d)
EMULATED_PRODUCTS(8, 16, 24, 32)
EMULATED_PRODUCTS(40, 48, 56, 64)
EMULATED_PRODUCTS(72, 80, 88, 96)
EMULATED_PRODUCTS(104, 112, 120, 128)
EMULATED_PRODUCTS(136, 144, 152, 160)
EMULATED_PRODUCTS(168, 176, 184, 192)
EMULATED_PRODUCTS(200, 208, 216, 224)
EMULATED_PRODUCTS(232, 240, 248, 256)
inline void fence_for_async() { emulator::fence_for_async(); }
template <unsigned Registers>
[[gnu::always_inline]] inline void take_registers() {
  static_assert(Registers >= 24 && Registers <= 256 && Registers % 8 == 0, "a thread has 24 to 256 registers, a multiple of 8");
  emulator::change_registers(Registers, true);
}
template <unsigned Registers>
[[gnu::always_inline]] inline void give_registers() {
  static_assert(Registers >= 24 && Registers <= 256 && Registers % 8 == 0, "a thread has 24 to 256 registers, a multiple of 8");
  emulator::change_registers(Registers, false);
}
inline unsigned own_thread() { return threadIdx.x; }
template <class T>
[[gnu::always_inline]] inline void store_matrices_transposed(const emulator::Shared<T>& to, unsigned i, unsigned r0, unsigned r1, unsigned r2,
                                                             unsigned r3) {
  static_assert(16 % sizeof(T) == 0, "a row of a matrix is one of whole elements");
  const unsigned r[4] = {r0, r1, r2, r3};
  emulator::store_matrices_transposed(to.array(), i, r);
}

template <class T>
inline void load_4_shared(const emulator::Shared<T>& from, unsigned i, unsigned* r) {
  static_assert(16 % sizeof(T) == 0, "four words are whole elements");
  emulator::load_4_shared(from.array(), i, r);
}
template <class T>
inline void store_4_shared(const emulator::Shared<T>& to, unsigned i, const unsigned* v) {
  static_assert(16 % sizeof(T) == 0, "four words are whole elements");
  emulator::store_4_shared(to.array(), i, v);
}

struct Place {
  emulator::SharedArray* array;
  long long i;
};
template <class T>
inline Place place_in(const emulator::Shared<T>& array, unsigned i) {
  static_assert(sizeof(T) == 4, "elements are words");
  return Place{array.array(), i};
}
inline Place operator+(Place p, int words) { return p.i += words, p; }
inline unsigned load_word(Place from, int ahead) { return *static_cast<const unsigned*>(emulator::shared_load(from.array, from.i + ahead)); }
inline void load_pair(Place from, int ahead, unsigned* r) { emulator::load_pair(r, from.array, from.i + ahead); }
inline void store_word(Place to, int ahead, unsigned v) { *static_cast<unsigned*>(emulator::shared_store(to.array, to.i + ahead)) = v; }
inline void store_pair(Place to, int ahead, const unsigned* v) { emulator::store_pair(to.array, to.i + ahead, v); }
inline void load_quad(Place from, int ahead, unsigned* r) { emulator::load_4_shared(from.array, from.i + ahead, r); }
inline void store_quad(Place to, int ahead, const unsigned* v) { emulator::store_4_shared(to.array, to.i + ahead, v); }
[[gnu::always_inline]] inline void load_matrices(unsigned (&r)[4], Place from, int ahead) {
  emulator::load_matrices(r, from.array, from.i + ahead, false);
}
[[gnu::always_inline]] inline void load_matrices_transposed(unsigned (&r)[4], Place from, int ahead) {
  emulator::load_matrices(r, from.array, from.i + ahead, true);
}
[[gnu::always_inline]] inline void store_matrices_transposed(Place to, int ahead, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  const unsigned r[4] = {r0, r1, r2, r3};
  emulator::store_matrices_transposed(to.array, to.i + ahead, r);
}

inline void prefetch_l2(const void* p, int bytes) { emulator::prefetch(p, bytes); }
inline void touch_l2(const void* p) { emulator::touch(p); }
inline void meet(unsigned barrier, unsigned threads) { emulator::meet_at(barrier, threads); }
inline void cluster_arrive() { emulator::cluster_arrive(); }
inline void cluster_wait() { emulator::cluster_wait(); }
inline void store_to_peer(emulator::Shared<float>& own, unsigned i, unsigned rank, float v) { own.store_to_peer(rank, i, v); }
template <class T>
inline void load_4_from_peer(const emulator::Shared<T>& own, unsigned i, unsigned rank, unsigned* r) {
  static_assert(sizeof(T) == 4, "four words are four elements");
  emulator::load_4_from_peer(own.array(), rank, i, r);
}
template <class T>
inline void store_4_to_peer(const emulator::Shared<T>& own, unsigned i, unsigned rank, const unsigned* v) {
  static_assert(sizeof(T) == 4, "four words are four elements");
  emulator::store_4_to_peer(own.array(), rank, i, v);
}
inline void wait_for_upstream() { emulator::wait_for_upstream(); }
inline void allow_dependents() {}

#endif

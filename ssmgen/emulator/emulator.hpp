// Runs a generated kernel on a CPU, unmodified: included before its text, it gives CUDA's words a meaning in C++17 and replaces the
// PTX of templates/lib with portable bodies. Threads of a block are fibers that run until they meet at a shuffle or a barrier.
//
// It is a checker first: every access to global memory must lie in an operand, be aligned, not collide with another thread's write,
// and come after the wait in a kernel that has one; lanes must meet at the same shuffle; shared memory must be written before it is
// read. The first violation ends the launch with a sentence about it.
#ifndef SSMGEN_EMULATOR_HPP
#define SSMGEN_EMULATOR_HPP
#define SSMGEN_EMULATOR 1

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)

namespace emulator {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct Dim {
  u32 x = 0, y = 0, z = 0;
};

// An operand: what a thread may touch.
struct Operand {
  const char* name;  // with shape and dtype
  char* begin;
  u64 bytes;
  u32 element;
  u32 writable;
  u32 early;  // may be touched before the wait
};

enum class Kind { kShuffle, kBallot, kWarpBarrier, kBlockBarrier };
enum class State { kRunning, kAtWarp, kAtBlock, kAtCluster, kDone };

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Dim index;
  State state = State::kRunning;
  bool waited = false;   // for the upstream kernel
  u32 warp_epoch = 0;    // __syncwarp passed
  u32 cluster_arrived = 0, cluster_waited = 0;  // barriers of the cluster: arrived at, and passed
  // Where it waits for the others, and what it brought and takes away.
  Kind kind = Kind::kWarpBarrier;
  const void* site = nullptr;
  u32 mask = 0, source = 0;
  u64 brought = 0, taken = 0;
};

// A moment in a thread's life: how many barriers of its block and of its warp it has passed, and at how many of its cluster's it has arrived.
struct Moment {
  u32 block, thread, epoch, warp_epoch, cluster_arrived;
  bool real;  // false: there was none
};

constexpr u32 kWarp = 32;
constexpr std::size_t kStack = 256 * 1024;

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Machine {
 public:
  std::vector<Operand> operands;
  std::vector<Thread> threads;  // of a cluster, block by block
  Dim grid, block, block_index;
  u32 cluster = 1;          // blocks that run together
  u32 first_block = 0;      // of the cluster
  u32 current = 0;          // thread
  std::vector<u32> epochs;  // barriers passed, of each block
  bool pdl = false;
  std::string failure;
  std::vector<std::vector<Moment>> writers;  // of each operand, by 2-byte cell, in this launch
  std::function<void()> kernel;
  ucontext_t scheduler;
  std::vector<struct SharedBase*> shared;
  u32 dynamic_bytes = 0;  // of shared memory

  Thread& me() { return threads[current]; }
  u32 rank() const { return current / block.x; }  // of the block in its cluster
  void select(u32 thread) { current = thread, block_index.x = first_block + rank(); }
  Moment now() { return Moment{block_index.x, current, epochs[rank()], me().warp_epoch, me().cluster_arrived, true}; }
  // Whether a barrier, or the program's order, lies between that moment and now.
  bool ordered(const Moment& then) {
    if (then.block / cluster != block_index.x / cluster) return false;
    if (then.cluster_arrived < me().cluster_waited) return true;
    if (then.block != block_index.x) return false;
    if (then.thread == current || then.epoch != epochs[rank()]) return true;
    return then.thread / kWarp == current / kWarp && then.warp_epoch != me().warp_epoch;
  }

  [[noreturn]] void fail(const std::string& what) {
    char where[96];
    std::snprintf(where, sizeof where, "block %u, thread %u (lane %u): ", block_index.x, current % block.x, current % kWarp);
    throw Failure(where + what);
  }

  enum Access { kLoad, kStore, kAtomic };

  void access(const void* address, u32 bytes, Access kind) {
    const bool write = kind != kLoad;
    const char* what = kind == kLoad ? "load" : kind == kStore ? "store" : "atomic";
    const char* p = static_cast<const char*>(address);
    if (reinterpret_cast<std::uintptr_t>(p) % bytes)
      fail(std::to_string(bytes) + "-byte " + what + " at an address that is not a multiple of " + std::to_string(bytes) + nearest(p));
    const Operand* in = nullptr;
    for (const Operand& o : operands)
      if (p >= o.begin && p + bytes <= o.begin + o.bytes) {
        in = &o;
        if (!write || o.writable) break;
      }
    if (!in) fail(std::to_string(bytes) + "-byte " + what + " outside of every operand" + nearest(p));
    if (pdl && !me().waited && !in->early) fail(std::to_string(bytes) + "-byte " + what + " before the wait for the upstream kernel");
    if (!write) return;
    if (!in->writable) fail(std::string(what) + " to " + in->name + ", which is read only");
    if (kind == kAtomic) return;
    std::vector<Moment>& cells = writers[in - operands.data()];
    if (cells.empty()) cells.resize(in->bytes / 2 + 1);
    for (u32 i = 0; i < bytes; i += 2) {
      Moment& w = cells[(p + i - in->begin) / 2];
      if (w.real && !ordered(w))
        fail("store to an address that thread " + std::to_string(w.thread % block.x) + " of block " + std::to_string(w.block) +
             " also writes, with no barrier between" + nearest(p));
      w = now();
    }
  }

  std::string nearest(const char* p) const {
    const Operand* best = nullptr;
    long long distance = 0;
    for (const Operand& o : operands) {
      const long long d = p < o.begin ? p - o.begin : p >= o.begin + o.bytes ? p - (o.begin + static_cast<long long>(o.bytes)) + 1 : 0;
      if (!best || std::llabs(d) < std::llabs(distance)) best = &o, distance = d;
    }
    if (!best) return "";
    const long long offset = p - best->begin;
    return std::string("; nearest: element ") + std::to_string(offset / static_cast<long long>(best->element)) + " of " + best->name;
  }

  // Waits until the other lanes are here too.
  u64 meet(Kind kind, const void* site, u32 mask, u64 value, u32 source) {
    Thread& t = me();
    t.kind = kind, t.site = site, t.mask = mask, t.brought = value, t.source = source;
    t.state = kind == Kind::kBlockBarrier ? State::kAtBlock : State::kAtWarp;
    swapcontext(&t.context, &scheduler);
    return me().taken;
  }

  void run_cluster();
  bool settle_warp(u32 first);
  bool settle_block(u32 rank);
  bool settle_cluster();
};

inline Machine* machine = nullptr;

struct SharedBase {
  virtual ~SharedBase() = default;
  virtual void forget() = 0;  // at the start of a block: everything is uninitialised
};

inline void fiber() {
  Thread& t = machine->me();
  try {
    machine->kernel();
  } catch (const std::exception& e) {
    if (machine->failure.empty()) machine->failure = e.what();
  }
  t.state = State::kDone;
  swapcontext(&t.context, &machine->scheduler);
}

inline void Machine::run_cluster() {
  const u32 count = block.x * cluster;
  if (threads.size() < count) threads.resize(count);
  epochs.assign(cluster, 0);
  for (SharedBase* s : shared) s->forget();
  for (u32 i = 0; i < count; ++i) {
    Thread& t = threads[i];
    if (!t.stack) t.stack.reset(new char[kStack]);
    t.index = Dim{i % block.x, 0, 0}, t.state = State::kRunning, t.waited = false, t.warp_epoch = 0;
    t.cluster_arrived = t.cluster_waited = 0;
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.get();
    t.context.uc_stack.ss_size = kStack;
    t.context.uc_link = nullptr;
    makecontext(&t.context, fiber, 0);
  }
  for (;;) {
    u32 done = 0;
    for (u32 i = 0; i < count && failure.empty(); ++i) {
      if (threads[i].state == State::kRunning) {
        select(i);
        swapcontext(&scheduler, &threads[i].context);
      }
      done += threads[i].state == State::kDone;
    }
    if (!failure.empty() || done == count) return;
    bool moved = false;
    try {
      for (u32 first = 0; first < count; first += kWarp) moved |= settle_warp(first);
      for (u32 rank = 0; rank < cluster && !moved; ++rank) moved = settle_block(rank);
      if (!moved) moved = settle_cluster();
      if (!moved) fail("threads wait at different barriers");
    } catch (const Failure& e) {
      failure = e.what();
      return;
    }
  }
}

// Lets the lanes of a warp go on that have met. True if there were any.
inline bool Machine::settle_warp(u32 first) {
  bool moved = false;
  for (u32 lane = 0; lane < kWarp; ++lane) {
    Thread& leader = threads[first + lane];
    if (leader.state != State::kAtWarp) continue;
    const char* what = leader.kind == Kind::kShuffle ? "shuffle" : leader.kind == Kind::kBallot ? "vote" : "__syncwarp";
    select(first + lane);
    if (!(leader.mask >> lane & 1)) fail(std::string(what) + " whose mask leaves out the lane itself");
    for (u32 l = 0; l < kWarp; ++l) {
      if (!(leader.mask >> l & 1)) continue;
      const Thread& other = threads[first + l];
      if (other.state == State::kDone) fail(std::string(what) + " with lane " + std::to_string(l) + ", which has ended");
      if (other.state != State::kAtWarp || other.site != leader.site || other.mask != leader.mask)
        fail(std::string("divergent ") + what + ": lane " + std::to_string(l) + " of its mask is elsewhere");
    }
    u64 ballot = 0;
    for (u32 l = 0; l < kWarp; ++l)
      if (leader.mask >> l & 1 && threads[first + l].brought) ballot |= u64(1) << l;
    for (u32 l = 0; l < kWarp; ++l) {
      if (!(leader.mask >> l & 1)) continue;
      Thread& t = threads[first + l];
      if (t.kind == Kind::kShuffle) {
        select(first + l);
        if (!(leader.mask >> t.source & 1)) fail("shuffle from lane " + std::to_string(t.source) + ", which is not in the mask");
        t.taken = threads[first + t.source].brought;
      } else {
        t.taken = ballot;
      }
    }
    for (u32 l = 0; l < kWarp; ++l)
      if (leader.mask >> l & 1) {
        threads[first + l].state = State::kRunning;
        threads[first + l].warp_epoch += leader.kind == Kind::kWarpBarrier;
      }
    moved = true;
  }
  return moved;
}

inline bool Machine::settle_block(u32 rank) {
  const u32 first = rank * block.x;
  const auto waits = [&](u32 i) { return threads[first + i].state == State::kAtBlock; };
  u32 waiting = 0;
  for (u32 i = 0; i < block.x; ++i) waiting += waits(i);
  if (!waiting) return false;
  const void* site = nullptr;
  for (u32 i = 0; i < block.x; ++i) {
    select(first + i);
    if (me().state == State::kDone) fail("has ended while others wait at __syncthreads");
    if (!waits(i)) return false;
    if (site && me().site != site) fail("divergent __syncthreads: others wait at another one");
    site = me().site;
  }
  for (u32 i = 0; i < block.x; ++i) threads[first + i].state = State::kRunning;
  ++epochs[rank];
  return true;
}

// Lets threads go on that wait for their cluster: when all that have not ended have arrived as often.
inline bool Machine::settle_cluster() {
  u32 least = ~0u;
  const u32 count = block.x * cluster;
  for (u32 i = 0; i < count; ++i)
    if (threads[i].state != State::kDone) least = std::min(least, threads[i].cluster_arrived);
  bool moved = false;
  for (u32 i = 0; i < count; ++i) {
    Thread& t = threads[i];
    if (t.state != State::kAtCluster || t.cluster_arrived > least) continue;
    t.cluster_waited = t.cluster_arrived, t.state = State::kRunning;
    moved = true;
  }
  return moved;
}

[[gnu::noinline]] inline u64 meet(Kind kind, u32 mask, u64 value = 0, u32 source = 0) {
  return machine->meet(kind, __builtin_return_address(0), mask, value, source);
}

template <class T>
u64 to_bits(T v) {
  static_assert(sizeof(T) <= 8, "a shuffle moves 8 bytes at most");
  u64 r = 0;
  std::memcpy(&r, &v, sizeof(T));
  return r;
}
template <class T>
T from_bits(u64 v) {
  T r;
  std::memcpy(&r, &v, sizeof(T));
  return r;
}

// Shared memory that knows which elements were written, and by whom.
template <class T>
class Shared : SharedBase {
 public:
  struct Cell {
    T value{};
    bool written = false;
    Moment when{};
    Moment readers[2] = {};  // since then, the last of two threads: whoever writes next, one of them is another thread
  };
  class Reference {
   public:
    Reference(Shared& s, long long i) : shared_(s), i_(i) {}
    operator T() const { return shared_.read(i_); }
    T operator=(T v) const { return shared_.write(i_, v); }
    T operator=(const Reference& r) const { return shared_.write(i_, T(r)); }
    T operator+=(T v) const { return shared_.write(i_, shared_.read(i_) + v); }

   private:
    Shared& shared_;
    long long i_;
  };

  Shared(const char* name, std::size_t count) : name_(name), count_(count) {
    machine->shared.push_back(this);
    forget();
  }
  explicit Shared(const char* name) : name_(name), dynamic_(true) {
    machine->shared.push_back(this);
    forget();
  }
  Reference operator[](long long i) { return Reference(*this, i); }
  void forget() override {
    if (dynamic_) count_ = machine->dynamic_bytes / sizeof(T);
    cells_.resize(count_ * machine->cluster);
    for (Cell& c : cells_) c.written = c.readers[0].real = c.readers[1].real = false;
  }

  // Where a peer of the cluster has the same array.
  void write_to_peer(u32 rank, long long i, T v) {
    Machine& m = *machine;
    if (rank >= m.cluster) m.fail("store to " + name_ + " of block " + std::to_string(rank) + " of a cluster of " + std::to_string(m.cluster));
    if (!m.me().cluster_waited) m.fail("store to " + name_ + " of a peer that may not have begun: no barrier of the cluster lies before it");
    bool there = false;
    for (u32 t = 0; t < m.block.x; ++t) there |= m.threads[rank * m.block.x + t].state != State::kDone;
    if (!there) m.fail("store to " + name_ + " of a peer that has ended");
    write(i, v, rank);
  }

 private:
  Cell& at(long long i, const char* what, u32 rank) {
    if (i < 0 || i >= static_cast<long long>(count_))
      machine->fail(std::string(what) + " of " + name_ + "[" + std::to_string(i) + "] in shared memory; it has " + std::to_string(count_) + " elements");
    return cells_[rank * count_ + i];
  }
  T read(long long i) {
    Cell& c = at(i, "load", machine->rank());
    if (!c.written) machine->fail(std::string("load of ") + name_ + "[" + std::to_string(i) + "] in shared memory, which nothing has written");
    if (!machine->ordered(c.when))
      machine->fail(std::string("load of ") + name_ + "[" + std::to_string(i) + "] in shared memory, which thread " + std::to_string(c.when.thread % machine->block.x) +
                    " has written, with no barrier between");
    const Moment now = machine->now();
    if (c.readers[0].real && c.readers[0].thread != now.thread) c.readers[1] = c.readers[0];
    c.readers[0] = now;
    return c.value;
  }
  T write(long long i, T v) { return write(i, v, machine->rank()); }
  T write(long long i, T v, u32 rank) {
    Cell& c = at(i, "store", rank);
    if (c.written && !machine->ordered(c.when))
      machine->fail(std::string("store to ") + name_ + "[" + std::to_string(i) + "] in shared memory, which thread " + std::to_string(c.when.thread % machine->block.x) +
                    " also writes, with no barrier between");
    for (Moment& reader : c.readers) {
      if (reader.real && !machine->ordered(reader))
        machine->fail(std::string("store to ") + name_ + "[" + std::to_string(i) + "] in shared memory, which thread " + std::to_string(reader.thread % machine->block.x) +
                      " has read, with no barrier between");
      reader.real = false;
    }
    c.value = v, c.written = true, c.when = machine->now();
    return v;
  }

  std::string name_;
  std::size_t count_ = 0;
  bool dynamic_ = false;     // its size is the launch's
  std::vector<Cell> cells_;  // of every block of a cluster
};

// A kernel's arguments as the driver takes them: an array of pointers to each.
template <class... A, std::size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
}

template <class... A>
int launch(void (*kernel)(A...), u32 grid, u32 block, u32 cluster, u32 shared_bytes, bool pdl, void** arguments, const Operand* operands, u32 count,
           char* message, u32 room) {
  static Machine one;  // static shared arrays register with it once
  machine = &one;
  one.operands.assign(operands, operands + count);
  one.grid = Dim{grid, 1, 1}, one.block = Dim{block, 1, 1}, one.pdl = pdl;
  one.cluster = cluster;
  one.dynamic_bytes = shared_bytes;
  one.writers.assign(count, {});
  one.failure.clear();
  one.kernel = [=] { call(kernel, arguments, std::index_sequence_for<A...>{}); };
  if (grid % cluster) one.failure = "a grid of " + std::to_string(grid) + " blocks is not made of clusters of " + std::to_string(cluster);
  for (u32 b = 0; b < grid && one.failure.empty(); b += cluster) {
    one.first_block = b;
    one.run_cluster();
  }
  std::snprintf(message, room, "%s", one.failure.c_str());
  return one.failure.empty() ? 0 : 1;
}

inline u16 to_bf16(float v) {
  u32 bits;
  std::memcpy(&bits, &v, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return u16((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline u16 to_f16(float v) {
  u32 bits;
  std::memcpy(&bits, &v, 4);
  const u32 sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x47800000u) return u16(sign | 0x7c00u);  // 65536 and above
  if (magnitude < 0x38800000u) {                             // below 2^-14: subnormal, in steps of 2^-24
    const float scaled = std::nearbyint(std::ldexp(std::fabs(v), 24));
    return u16(sign | u32(scaled));
  }
  const u32 rounded = magnitude + 0xfffu + (magnitude >> 13 & 1) - 0x38000000u;
  return u16(sign | (rounded >> 13));
}

inline float from_f16(u16 h) {
  const u32 exponent = h >> 10 & 31, mantissa = h & 1023;
  float v = exponent == 31 ? (mantissa ? NAN : INFINITY)
                           : exponent ? std::ldexp(float(mantissa | 1024), int(exponent) - 25) : std::ldexp(float(mantissa), -24);
  return h & 0x8000 ? -v : v;
}

inline float flush(float v) { return std::fabs(v) < 1.17549435e-38f ? std::copysign(0.f, v) : v; }

}  // namespace emulator

#define threadIdx (emulator::machine->me().index)
#define blockIdx (emulator::machine->block_index)
#define blockDim (emulator::machine->block)
#define gridDim (emulator::machine->grid)

#define SHARED(type, name, count) static emulator::Shared<type> name(#name, count)
#define DYNAMIC_SHARED(type, name) static emulator::Shared<type> name(#name)

// CUDA's own functions.

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
  emulator::machine->access(p, sizeof(T), emulator::Machine::kAtomic);
  const T old = *p;
  *p = old + v;
  return old;
}
template <class T>
T atomicMax(T* p, T v) {
  emulator::machine->access(p, sizeof(T), emulator::Machine::kAtomic);
  const T old = *p;
  *p = old < v ? v : old;
  return old;
}

// Portable bodies of templates/lib/ptx.cuh.j2.

template <class T>
inline T emulated_load(const void* p) {
  emulator::machine->access(p, sizeof(T), emulator::Machine::kLoad);
  T r;
  std::memcpy(&r, p, sizeof(T));
  return r;
}
template <class T>
inline void emulated_store(void* p, T v) {
  emulator::machine->access(p, sizeof(T), emulator::Machine::kStore);
  std::memcpy(p, &v, sizeof(T));
}
inline void emulated_load(const void* p, unsigned* r, unsigned words) {
  emulator::machine->access(p, 4 * words, emulator::Machine::kLoad);
  std::memcpy(r, p, 4 * words);
}
inline void emulated_store(void* p, const unsigned* v, unsigned words) {
  emulator::machine->access(p, 4 * words, emulator::Machine::kStore);
  std::memcpy(p, v, 4 * words);
}

inline unsigned char load_u8(const void* p) { return emulated_load<unsigned char>(p); }
inline unsigned short load_u16(const void* p) { return emulated_load<unsigned short>(p); }
inline unsigned load_u32(const void* p) { return emulated_load<unsigned>(p); }
inline unsigned long long load_u64(const void* p) { return emulated_load<unsigned long long>(p); }
inline void load_2xu32(const void* p, unsigned* r) { emulated_load(p, r, 2); }
inline void load_4xu32(const void* p, unsigned* r) { emulated_load(p, r, 4); }
inline void store_u16(void* p, unsigned short v) { emulated_store(p, v); }
inline void store_u32(void* p, unsigned v) { emulated_store(p, v); }
inline void store_2xu32(void* p, const unsigned* v) { emulated_store(p, v, 2); }
inline void store_4xu32(void* p, const unsigned* v) { emulated_store(p, v, 4); }
inline void store_4xu32_streaming(void* p, const unsigned* v) { emulated_store(p, v, 4); }

inline unsigned short round_bf16(float v) { return emulator::to_bf16(v); }
inline unsigned round_2xbf16(float low, float high) { return round_bf16(low) | unsigned(round_bf16(high)) << 16; }
inline unsigned short round_f16(float v) { return emulator::to_f16(v); }
inline unsigned round_2xf16(float low, float high) { return round_f16(low) | unsigned(round_f16(high)) << 16; }
inline float widen_f16(unsigned short v) { return emulator::from_f16(v); }

inline float exp2_approx(float v) { return emulator::flush(std::exp2(emulator::flush(v))); }
inline float rsqrt_approx(float v) { return emulator::flush(1.f / std::sqrt(emulator::flush(v))); }
inline float rcp_approx(float v) { return emulator::flush(1.f / emulator::flush(v)); }

// Sums in double, rounded once per call: the tensor cores' own order and rounding are not documented.
template <class Widen>
void emulated_mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], Widen widen) {
  const unsigned lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
  double sum[4] = {d[0], d[1], d[2], d[3]};
  for (unsigned t = 0; t < 4; ++t) {  // lanes that hold a quarter of the columns of a and of the rows of b
    unsigned mine[4], theirs[2][2];
    for (int w = 0; w < 4; ++w) mine[w] = __shfl_sync(0xffffffffu, a[w], int(group * 4 + t));
    for (int w = 0; w < 2; ++w)
      for (unsigned n = 0; n < 2; ++n) theirs[n][w] = __shfl_sync(0xffffffffu, b[w], int((2 * part + n) * 4 + t));
    for (int row = 0; row < 2; ++row)
      for (int n = 0; n < 2; ++n)
        for (int w = 0; w < 2; ++w)
          for (int half = 0; half < 2; ++half)
            sum[2 * row + n] += double(widen((unsigned short)(mine[row + 2 * w] >> 16 * half))) * widen((unsigned short)(theirs[n][w] >> 16 * half));
  }
  for (int i = 0; i < 4; ++i) d[i] = float(sum[i]);
}
inline void mma_bf16(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  emulated_mma(d, {a0, a1, a2, a3}, {b0, b1}, [](unsigned short v) { return __uint_as_float(unsigned(v) << 16); });
}
inline void mma_f16(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  emulated_mma(d, {a0, a1, a2, a3}, {b0, b1}, [](unsigned short v) { return emulator::from_f16(v); });
}

inline void prefetch_l2(const void* p, int bytes) {
  if (emulator::machine->pdl && !emulator::machine->me().waited) emulator::machine->fail("prefetch before the wait for the upstream kernel");
  if (reinterpret_cast<std::uintptr_t>(p) % 16 || bytes % 16) emulator::machine->fail("prefetch of an address or a size that is not a multiple of 16");
  for (const emulator::Operand& o : emulator::machine->operands)
    if (static_cast<const char*>(p) >= o.begin && static_cast<const char*>(p) + bytes <= o.begin + o.bytes) return;
  emulator::machine->fail("prefetch outside of every operand" + emulator::machine->nearest(static_cast<const char*>(p)));
}
inline void touch_l2(const void* p) {
  if (emulator::machine->pdl && !emulator::machine->me().waited) emulator::machine->fail("prefetch before the wait for the upstream kernel");
  for (const emulator::Operand& o : emulator::machine->operands)
    if (static_cast<const char*>(p) >= o.begin && static_cast<const char*>(p) < o.begin + o.bytes) return;
  emulator::machine->fail("prefetch outside of every operand" + emulator::machine->nearest(static_cast<const char*>(p)));
}
inline void cluster_arrive() {
  emulator::Thread& t = emulator::machine->me();
  if (t.cluster_arrived++ != t.cluster_waited) emulator::machine->fail("arrives at a barrier of the cluster again without waiting");
}
inline void cluster_wait() {
  emulator::Machine& m = *emulator::machine;
  if (m.me().cluster_arrived == m.me().cluster_waited) m.fail("waits at a barrier of the cluster without having arrived");
  m.me().state = emulator::State::kAtCluster;
  swapcontext(&m.me().context, &m.scheduler);
}
inline void store_to_peer(emulator::Shared<float>& own, unsigned i, unsigned rank, float v) { own.write_to_peer(rank, i, v); }

inline void wait_for_upstream() { emulator::machine->me().waited = true; }
inline void allow_dependents() {}

#endif

// A launch: its threads, and its records of memory accesses. Everything here lives as long as the launch.
#ifndef SSMGEN_EMULATOR_STATE_HPP
#define SSMGEN_EMULATOR_STATE_HPP

#include <setjmp.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <deque>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "machine.hpp"

namespace emulator {

constexpr u32 kWarp = 32, kWarpgroup = 4 * kWarp;
constexpr std::size_t kStack = 256 * 1024;

enum class State { kRunning, kAtWarp, kAtBlock, kAtMeeting, kAtBarrier, kAtCluster, kDone };
enum class Access { kLoad, kStore, kAtomic, kCopy };
enum class Numbers { kNone, kBf16, kF16 };

struct SharedArray;

// A copy in flight: a number of elements of an array, from element i on.
struct Copy {
  SharedArray* to;
  long long i;
  u32 elements;
  const char* from;
  u32 bytes;          // read; the rest is zero
  std::string asked;  // the content when the copy was issued
  u32 thread, clock;  // that issued it
};

// A thread's arrival, due once this number of its copies, counted from its first, has landed.
struct Arrival {
  u32 thread, clock;
  u64 copies;
  std::vector<u32> seen;
};

constexpr long long kNever = -2;  // -1 is the phase before the first, which is over

// A thread's wait for a phase, at its clock.
struct Look {
  long long phase;
  u32 clock;
};

// A barrier in shared memory.
struct Barrier {
  SharedArray* array;
  u32 rank;                         // of the block that it belongs to
  long long i;
  u32 count, missing;               // arrivals of the phase, and the remaining ones
  u64 expected = 0;                 // bytes in this phase
  long long phase = 0;              // the one that is not over
  std::vector<Copy> copies;         // in flight, for this phase
  std::vector<Arrival> arrivals;    // with copies, in this phase
  std::vector<u32> gathered;        // the clocks that arrived threads have seen
  std::vector<long long> waited_for;  // by each thread, the last phase; kNever
  std::vector<Look> looks[2];       // of each thread, the last of either parity
  std::vector<u32> arrived[3];      // the moments of arrivals: of phase i in place i % 3
};

// A thread's barriers and seen clocks at a fence, which makes its earlier stores visible to products.
struct Fence {
  u32 moment, cluster_waited;
  std::vector<u32> seen;
};

struct Thread {
  jmp_buf context;
  bool started = false;  // its stack holds a fiber
  State state = State::kRunning;
  bool waited = false;                          // for the upstream kernel
  u32 warp_epoch = 0;                           // __syncwarp passed
  u32 cluster_arrived = 0, cluster_waited = 0;  // barriers of the cluster: arrived at, and passed
  u32 moment = 0;                               // now, if it has been noted
  u32 clock = 0;                                // advances where others may learn what it has done (barriers.cpp)
  std::vector<u32> seen;                        // of each thread, the clock up to which its accesses are ordered before this one's
  Barrier* awaited = nullptr;
  // The place where it waits for the others, and the values that it passes and receives.
  Kind kind = Kind::kWarpBarrier;
  const void* site = nullptr;
  u32 mask = 0, source = 0;
  u64 brought = 0, taken = 0;
  std::vector<Copy> copies;  // in flight, in order
  std::vector<u32> groups;   // number of copies in each group; later copies have no group yet
  u64 landed = 0, entrusted = 0;  // numbers of copies that have landed, and that barriers wait for, counted from the first
  std::vector<Fence> fences;    // in order
  bool fenced = false;          // since products were last waited for
  std::vector<char> registers;  // the stack as it was then, down to `lowest`
  const char* lowest = nullptr;
};

// The accumulators of products, 16 rows of a warp. From the first product until the last one has landed, d holds poison.
struct Sum {
  float* d[kWarp];  // of each lane
  u32 columns, pending;
  std::vector<float> values;
};

// The part of a matrix in shared memory that a product reads: 16 numbers of each column.
struct Part {
  SharedArray* array = nullptr;  // nullptr: nothing
  std::vector<u32> pieces;       // bytes at which 8 elements begin, in the order of their rows, or of their columns
  u32 columns = 0;
  bool by_columns = false;
};

// A product in flight.
struct Product {
  Part first, second;  // operands; the first one is in registers otherwise
  bool add;
  Sum* into;
  const u32* a[kWarp];  // of each lane, or nullptr
  u32 held[kWarp][4];   // the content when the product was issued
};

inline bool same(const Matrix& a, const Matrix& b) { return a.array == b.array && a.byte == b.byte && a.next == b.next && a.row == b.row; }

// The steps that all warps of a warpgroup take, in one order: products, and changes of registers.
struct Step {
  Matrix first, second;
  u32 columns, sum, registers;
  bool operator==(const Step& s) const {
    return same(first, s.first) && same(second, s.second) && columns == s.columns && sum == s.sum && registers == s.registers;
  }
};

struct Warp {
  std::deque<Product> products;  // in flight, in order
  std::vector<u32> groups;       // number of products in each group; later products have no group yet
  std::vector<std::unique_ptr<Sum>> sums;
  u32 steps = 0, registers = 0;
};

// A moment in a thread's life: how many barriers of its block and of its warp it has passed, and at how many of its cluster's it has
// arrived. Memory remembers the moments' numbers, from 1 on: 4 bytes for 2 of an operand.
struct Moment {
  u32 block, thread, epoch, warp_epoch, cluster_arrived, clock;
  bool bulk = false;  // a bulk copy's landing, which products need no fence for
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// Stacks of all fibers. Only what they touch becomes memory: huge pages would make it all.
class Stacks {
 public:
  explicit Stacks(std::size_t count) : bytes_(count * kStack) {
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<char*>(p);
#ifdef MADV_NOHUGEPAGE
    madvise(p, bytes_, MADV_NOHUGEPAGE);
#endif
  }
  ~Stacks() { munmap(begin_, bytes_); }
  Stacks(const Stacks&) = delete;
  char* operator[](std::size_t i) { return begin_ + i * kStack; }

 private:
  std::size_t bytes_;
  char* begin_;
};

struct SharedArray {
  struct Cell {
    u32 when = 0;             // it was written; 0: it was not
    u32 readers[2] = {0, 0};  // since then: the last two readers, of two warps if possible, so that one is not the next writer
    u32 in_flight = 0;        // when a copy to here was asked for that has not landed; 0: there is none
    u32 products = 0;         // in flight that read it
  };
  const void* site;
  std::string name;
  u32 element;
  u64 count;
  u32 alignment;
  std::vector<char> values;  // of every block of a cluster
  std::vector<Cell> cells;
};

class Machine {
 public:
  Machine(void (*entry)(void**), void** packed, u32 threads_of_block, u32 blocks, u32 dynamic, bool waits, Numbers of, const Operand* first, u32 count)
      : kernel(entry), arguments(packed), block(threads_of_block), cluster(blocks), dynamic_bytes(dynamic), pdl(waits), numbers(of),
        operands(first, first + count), writers(count), threads(block * cluster), stacks(threads.size()), moments(1) {}

  void (*kernel)(void**);
  void** arguments;
  u32 block;            // threads
  u32 cluster;          // blocks that run together
  u32 dynamic_bytes;    // of shared memory
  bool pdl;
  bool waited = false;  // any thread of the launch, for the upstream kernel
  Numbers numbers;      // that warpgroups multiply
  u32 first_block = 0;  // of the cluster
  u32 current = 0;      // thread
  u32 rank = 0;         // of its block in the cluster
  std::string failure;
  std::vector<Operand> operands;
  std::vector<std::unique_ptr<u32[], Free>> writers;  // of each operand, the moment by 2-byte cell
  std::vector<Thread> threads;                        // of a cluster, block by block
  Stacks stacks;
  std::vector<u32> epochs;  // barriers passed, of each block
  std::vector<Moment> moments;
  std::vector<std::unique_ptr<SharedArray>> shared;
  std::vector<std::unique_ptr<Barrier>> barriers;
  std::vector<std::vector<u32>> gathered;  // at each barrier of the cluster, the clocks that arrived threads have seen
  std::vector<Warp> warps;
  std::vector<std::vector<Step>> steps;  // of each warpgroup
  jmp_buf scheduler;

  Thread& me() { return threads[current]; }
  void select(u32 thread) {
    current = thread, rank = thread / block;
    thread_index.x = thread % block, block_index.x = first_block + rank;
  }
  u32 now() {
    Thread& t = me();
    if (!t.moment) {
      t.moment = u32(moments.size());
      moments.push_back(Moment{block_index.x, current, epochs[rank], t.warp_epoch, t.cluster_arrived, t.clock});
    }
    return t.moment;
  }
  // Whether a barrier, or the program's order, lies between that moment and now.
  bool ordered(u32 moment) {
    const Thread& t = me();
    return precedes(moments[moment], Moment{block_index.x, current, epochs[rank], t.warp_epoch, 0, 0}, t.cluster_waited, t.seen);
  }
  // The same for two moments. cluster_waited and seen: the later one's thread, at that moment.
  bool precedes(const Moment& then, const Moment& later, u32 cluster_waited, const std::vector<u32>& seen) const {
    if (then.block / cluster != later.block / cluster) return false;
    if (then.cluster_arrived < cluster_waited) return true;
    if (!seen.empty() && then.clock < seen[then.thread]) return true;
    if (then.block != later.block) return false;
    if (then.thread == later.thread || then.epoch != later.epoch) return true;
    return then.thread / kWarp == later.thread / kWarp && then.warp_epoch != later.warp_epoch;
  }
  std::string thread_of(u32 moment) { return std::to_string(moments[moment].thread % block); }

  [[noreturn]] void fail(const std::string& what);
  void access(const void* address, u32 bytes, Access kind, u32 alignment);
  std::string nearest(const char* p) const;
  u64 meet(Kind kind, const void* site, u32 mask, u64 value, u32 source);
  void run_cluster();
  void resume(u32 thread);
  void yield();
  bool settle_warp(u32 first);
  bool settle_block(u32 rank);
  bool settle_meetings(u32 rank);
  bool settle_barriers();
  bool settle_cluster();
  [[noreturn]] void fail_of_deadlock();
  void share(u32 first, u32 count, u32 mask);
  void gather(u32 number);
  void spread(u32 number);
};

extern Machine* machine;

// Element i of a block's array, to be written: fails where another thread's access is not ordered.
char* claim(SharedArray& array, u32 rank, long long i, const char* what);
// Element i of a block's array, to be read, and that it was.
SharedArray::Cell& readable(SharedArray& array, u32 rank, long long i, const char* what);
void note_reader(SharedArray::Cell& c);
void check_ended();
std::string element(const SharedArray& array, long long i);
void check_place(const SharedArray& array, long long i, u32 size, const char* what);
void take_off(const Copy& copy);
void land(const Copy& copy, u32 moment);
void land_copies(u32 thread, u64 count);  // that thread's first ones
void end_phases();                        // of which nothing is missing any more
void check_barriers_ended();
void check_products_ended();       // of this thread
void check_warpgroups_ended();
std::string product_reader(const SharedArray& array, u32 rank, long long i);
float from_bf16(u16 v);

}  // namespace emulator

#endif

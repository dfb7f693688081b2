// A launch: its threads, and what it remembers of memory. All of it belongs to the launch and goes with it.
#ifndef SSMGEN_EMULATOR_STATE_HPP
#define SSMGEN_EMULATOR_STATE_HPP

#include <setjmp.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "machine.hpp"

namespace emulator {

constexpr u32 kWarp = 32;
constexpr std::size_t kStack = 256 * 1024;

enum class State { kRunning, kAtWarp, kAtBlock, kAtMeeting, kAtBarrier, kAtCluster, kDone };
enum class Access { kLoad, kStore, kAtomic, kCopy };

struct SharedArray;

// A copy in flight: so many elements of an array, from its i-th on.
struct Copy {
  SharedArray* to;
  long long i;
  u32 elements;
  const char* from;
  u32 bytes;          // read; the rest is zero
  std::string asked;  // what was there when it was asked for
  u32 thread, clock;  // that asked
};

// A barrier in shared memory.
struct Barrier {
  SharedArray* array;
  long long i;
  u32 count, missing;               // arrivals, those that the phase still needs
  u64 expected = 0;                 // bytes in this phase
  long long phase = 0;              // the one that is not over
  std::vector<Copy> copies;         // in flight, for this phase
  std::vector<u32> gathered;        // what those that arrived have seen
  std::vector<long long> waited_for;  // by each thread, the last phase; kNever
};
constexpr long long kNever = -2;  // -1 is the phase before the first, which is over

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
  // Where it waits for the others, and what it brought and takes away.
  Kind kind = Kind::kWarpBarrier;
  const void* site = nullptr;
  u32 mask = 0, source = 0;
  u64 brought = 0, taken = 0;
  std::vector<Copy> copies;  // in flight, in order
  std::vector<u32> groups;   // how many of them each group has; those behind belong to none yet
};

// A moment in a thread's life: how many barriers of its block and of its warp it has passed, and at how many of its cluster's it has
// arrived. Memory remembers the moments' numbers, from 1 on: 4 bytes for 2 of an operand.
struct Moment {
  u32 block, thread, epoch, warp_epoch, cluster_arrived, clock;
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
    u32 readers[2] = {0, 0};  // since then, the last of two threads, of two warps if there were: whoever writes next, one is another
    u32 in_flight = 0;        // when a copy to here was asked for that has not landed; 0: there is none
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
  Machine(void (*entry)(void**), void** packed, u32 threads_of_block, u32 blocks, u32 dynamic, bool waits, const Operand* first, u32 count)
      : kernel(entry), arguments(packed), block(threads_of_block), cluster(blocks), dynamic_bytes(dynamic), pdl(waits),
        operands(first, first + count), writers(count), threads(block * cluster), stacks(threads.size()), moments(1) {}

  void (*kernel)(void**);
  void** arguments;
  u32 block;            // threads
  u32 cluster;          // blocks that run together
  u32 dynamic_bytes;    // of shared memory
  bool pdl;
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
    const Moment& then = moments[moment];
    if (then.block / cluster != block_index.x / cluster) return false;
    if (then.cluster_arrived < me().cluster_waited) return true;
    if (!me().seen.empty() && then.clock < me().seen[then.thread]) return true;
    if (then.block != block_index.x) return false;
    if (then.thread == current || then.epoch != epochs[rank]) return true;
    return then.thread / kWarp == current / kWarp && then.warp_epoch != me().warp_epoch;
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
};

extern Machine* machine;

// Element i of a block's array, to be written: fails where another thread's access is not ordered.
char* claim(SharedArray& array, u32 rank, long long i, const char* what);
void check_ended();
std::string element(const SharedArray& array, long long i);
void check_place(const SharedArray& array, long long i, u32 size, const char* what);
void take_off(const Copy& copy);
void land(const Copy& copy, u32 moment);
void check_barriers_ended();

}  // namespace emulator

#endif

// Runs the threads of a launch: fibers that go on until they meet.
#include <ucontext.h>

#include <algorithm>
#include <cstdio>

#include "state.hpp"

namespace emulator {

Dim thread_index, block_index, block_size, grid_size;
Machine* machine = nullptr;

void Machine::fail(const std::string& what) {
  char where[96];
  std::snprintf(where, sizeof where, "block %u, thread %u (lane %u): ", block_index.x, current % block, current % kWarp);
  throw Failure(where + what);
}

u64 Machine::meet(Kind kind, const void* site, u32 mask, u64 value, u32 source) {
  if (kind == Kind::kShuffle) check_sums(&value, sizeof value);
  Thread& t = me();
  t.kind = kind, t.site = site, t.mask = mask, t.brought = value, t.source = source;
  t.state = kind == Kind::kBlockBarrier ? State::kAtBlock : State::kAtWarp;
  yield();
  return me().taken;
}

// A fiber outlives the block: it runs the same thread of the next.
void fiber() {
  for (;;) {
    try {
      machine->kernel(machine->arguments);
      check_ended();
    } catch (const std::exception& e) {
      if (machine->failure.empty()) machine->failure = e.what();
    }
    machine->me().state = State::kDone;
    machine->yield();
  }
}

// Contexts serve to begin a fiber only: swapcontext asks the kernel for the signal mask each time, twice for every shuffle of a lane.
[[gnu::noinline]] void Machine::resume(u32 thread) {
  select(thread);
  Thread& t = threads[thread];
  if (_setjmp(scheduler)) return;
  if (t.started) _longjmp(t.context, 1);
  t.started = true;
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = stacks[thread];
  start.uc_stack.ss_size = kStack;
  start.uc_link = nullptr;
  makecontext(&start, fiber, 0);
  setcontext(&start);
}

[[gnu::noinline]] void Machine::yield() {
  if (!_setjmp(me().context)) _longjmp(scheduler, 1);
}

void Machine::run_cluster() {
  const u32 count = block * cluster;
  epochs.assign(cluster, 0);
  for (auto& array : shared) std::fill(array->cells.begin(), array->cells.end(), SharedArray::Cell());
  for (Thread& t : threads) {
    t.state = State::kRunning, t.waited = false, t.warp_epoch = 0, t.moment = 0;
    t.cluster_arrived = t.cluster_waited = t.clock = 0;
    t.seen.clear();
    t.fences.clear(), t.fenced = false;
    t.landed = t.entrusted = 0;
  }
  barriers.clear();
  gathered.clear();
  warps = std::vector<Warp>((count + kWarp - 1) / kWarp);
  steps.assign(cluster * ((block + kWarpgroup - 1) / kWarpgroup), {});
  for (;;) {
    u32 done = 0;
    for (u32 i = 0; i < count && failure.empty(); ++i) {
      if (threads[i].state == State::kRunning) resume(i);
      done += threads[i].state == State::kDone;
    }
    if (!failure.empty()) return;
    bool moved = false;
    try {
      if (done == count) return check_barriers_ended(), check_warpgroups_ended();
      for (u32 first = 0; first < count; first += kWarp) moved |= settle_warp(first);
      for (u32 r = 0; r < cluster && !moved; ++r) moved = settle_block(r) || settle_meetings(r);
      if (!moved) moved = settle_barriers();
      if (!moved) moved = settle_cluster();
      if (!moved) fail_of_deadlock();
    } catch (const Failure& e) {
      failure = e.what();
      return;
    }
  }
}

const char* name_of(Kind kind) {
  return kind == Kind::kShuffle ? "shuffle" : kind == Kind::kBallot ? "vote" : kind == Kind::kTogether ? "instruction of a warp" : "__syncwarp";
}

// Lets the lanes of a warp go on that have met. True if there were any.
bool Machine::settle_warp(u32 first) {
  bool moved = false;
  for (u32 lane = 0; lane < kWarp; ++lane) {
    Thread& leader = threads[first + lane];
    if (leader.state != State::kAtWarp) continue;
    const char* what = name_of(leader.kind);
    select(first + lane);
    if (!(leader.mask >> lane & 1)) fail(std::string(what) + " whose mask leaves out the lane itself");
    bool comes = false;  // a lane that waits for a phase may be here when that is over
    for (u32 l = 0; l < kWarp; ++l) comes |= leader.mask >> l & 1 && threads[first + l].state == State::kAtBarrier;
    if (comes) continue;
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
        Thread& t = threads[first + l];
        t.state = State::kRunning;
        if (leader.kind == Kind::kWarpBarrier) ++t.warp_epoch, t.moment = 0;
      }
    if (leader.kind == Kind::kWarpBarrier) share(first, kWarp, leader.mask);
    moved = true;
  }
  return moved;
}

bool Machine::settle_block(u32 of) {
  const u32 first = of * block;
  const auto waits = [&](u32 i) { return threads[first + i].state == State::kAtBlock; };
  u32 waiting = 0;
  for (u32 i = 0; i < block; ++i) waiting += waits(i);
  if (!waiting) return false;
  const void* site = nullptr;
  for (u32 i = 0; i < block; ++i) {
    select(first + i);
    if (me().state == State::kDone) fail("has ended while others wait at __syncthreads");
    if (!waits(i)) return false;
    if (site && me().site != site) fail("divergent __syncthreads: others wait at another one");
    site = me().site;
  }
  for (u32 i = 0; i < block; ++i) threads[first + i].state = State::kRunning, threads[first + i].moment = 0;
  share(first, block, ~0u);
  ++epochs[of];
  return true;
}

// Lets threads go on that wait for their cluster: when all that have not ended have arrived as often.
bool Machine::settle_cluster() {
  u32 least = ~0u;
  for (const Thread& t : threads)
    if (t.state != State::kDone) least = std::min(least, t.cluster_arrived);
  bool moved = false;
  for (Thread& t : threads) {
    if (t.state != State::kAtCluster || t.cluster_arrived > least) continue;
    t.cluster_waited = t.cluster_arrived, t.state = State::kRunning;
    select(u32(&t - threads.data()));
    spread(t.cluster_waited - 1);
    moved = true;
  }
  return moved;
}

u64 meet(Kind kind, u32 mask, u64 value, u32 source) { return machine->meet(kind, __builtin_return_address(0), mask, value, source); }

void cluster_arrive() {
  Thread& t = machine->me();
  if (t.cluster_arrived++ != t.cluster_waited) machine->fail("arrives at a barrier of the cluster again without waiting");
  machine->gather(t.cluster_waited);
  t.moment = 0;
}
void cluster_wait() {
  Thread& t = machine->me();
  if (t.cluster_arrived == t.cluster_waited) machine->fail("waits at a barrier of the cluster without having arrived");
  t.state = State::kAtCluster;
  machine->yield();
}
void wait_for_upstream() { machine->me().waited = machine->waited = true; }

}  // namespace emulator

// One launch of a kernel, which takes its arguments as the driver does. 0, or 1 and a sentence in `message`.
extern "C" int launch(void (*kernel)(void**), unsigned grid, unsigned block, unsigned cluster, unsigned shared_bytes, int pdl, int numbers,
                      void** arguments, const emulator::Operand* operands, unsigned count, char* message, unsigned room) try {
  using namespace emulator;
  Machine one(kernel, arguments, block, cluster, shared_bytes, pdl != 0, Numbers(numbers), operands, count);
  machine = &one;
  grid_size = Dim{grid, 1, 1}, block_size = Dim{block, 1, 1}, thread_index = block_index = Dim{0, 0, 0};
  if (grid % cluster) one.failure = "a grid of " + std::to_string(grid) + " blocks is not made of clusters of " + std::to_string(cluster);
  for (u32 b = 0; b < grid && one.failure.empty(); b += cluster) {
    one.first_block = b;
    one.run_cluster();
  }
  if (one.failure.empty() && pdl && !one.waited)
    one.failure = "no thread waits for the upstream kernel; the kernel after this one could start before the upstream kernel has ended";
  std::snprintf(message, room, "%s", one.failure.c_str());
  return one.failure.empty() ? 0 : 1;
} catch (const std::bad_alloc&) {
  std::snprintf(message, room, "the emulator has no memory for the launch");
  return 1;
}

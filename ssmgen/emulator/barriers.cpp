// Barriers in shared memory. Accesses of a thread before it arrives are ordered before accesses of threads that wait for the phase. Each
// thread keeps a clock, and the clocks of other threads up to which it has seen their accesses.
#include <algorithm>

#include "state.hpp"

namespace emulator {
namespace {

void learn(std::vector<u32>& seen, const std::vector<u32>& from) {
  seen.resize(machine->threads.size());
  for (std::size_t t = 0; t < from.size(); ++t) seen[t] = std::max(seen[t], from[t]);
}

// Merges the accesses that a thread has seen into `gathered`.
void tell(u32 thread, std::vector<u32>& gathered) {
  Thread& t = machine->threads[thread];
  learn(gathered, t.seen);
  gathered[thread] = ++t.clock;
  t.moment = 0;
}

Barrier& barrier_of(SharedArray* array, long long i) {
  shared_load(array, i);  // fails unless it was prepared and a barrier lies between
  for (auto& b : machine->barriers)
    if (b->array == array && b->rank == machine->rank && b->i == i) return *b;
  machine->fail(element(*array, i) + " in shared memory is used as a barrier, and was not prepared as one");
}

u64 bytes_of(const Barrier& b) {
  u64 bytes = 0;
  for (const Copy& copy : b.copies) bytes += copy.elements * copy.to->element;
  return bytes;
}

bool in_flight(const Barrier& b) {
  const auto flies = [](const Arrival& a) { return machine->threads[a.thread].landed < a.copies; };
  return !b.copies.empty() || std::any_of(b.arrivals.begin(), b.arrivals.end(), flies);
}

// A parity distinguishes two phases only: a thread that looks for the end of a phase after the next one is over waits forever. The end of a
// phase must therefore be ordered after the waits of all threads that waited for the previous phase. Lanes of a warp that wait for a phase
// look together.
void check_looks(const Barrier& b) {
  for (u32 first = 0; first < machine->threads.size(); first += kWarp) {
    u32 waiting = kWarp;
    bool known = false;
    for (u32 lane = 0; lane < kWarp && first + lane < machine->threads.size(); ++lane) {
      const Look& look = b.looks[b.phase - 1 & 1][first + lane];
      if (look.phase == b.phase - 1) waiting = std::min(waiting, lane), known = known || b.gathered[first + lane] > look.clock;
    }
    if (waiting == kWarp || known) continue;
    machine->select(first + waiting);
    machine->fail("waits for phase " + std::to_string(b.phase - 1) + " of " + element(*b.array, b.i) + ", and nothing keeps others from ending phase " +
                  std::to_string(b.phase) + " before it looks: by the parity it would wait for ever");
  }
}

// A thread's first wait may be for a later phase than the first one. If it came before the phase before that is over, its parity would let it
// pass at once.
void check_first_look(const Barrier& b, long long phase) {
  for (u32 moment : b.arrived[(phase - 1) % 3]) {
    if (machine->ordered(moment)) continue;
    const std::string before = std::to_string(phase - 1);
    machine->fail("waits for phase " + std::to_string(phase) + " of " + element(*b.array, b.i) + " first, and nothing keeps it from looking before thread " +
                  machine->thread_of(moment) + " arrives in phase " + before + ": by the parity it would not wait");
  }
}

// Ends the phase if nothing is missing: the copies land.
bool complete(Barrier& b) {
  if (b.missing || b.expected != bytes_of(b)) return false;
  const u32 me = machine->current;
  for (const Arrival& a : b.arrivals) {
    land_copies(a.thread, a.copies);
    learn(b.gathered, a.seen);
    b.gathered[a.thread] = std::max(b.gathered[a.thread], a.clock + 1);
  }
  b.arrivals.clear();
  for (const Copy& copy : b.copies) {
    machine->select(copy.thread);
    const Thread& t = machine->me();
    const u32 epoch = machine->epochs[machine->rank];
    machine->moments.push_back(Moment{block_index.x, copy.thread, epoch, t.warp_epoch, t.cluster_arrived, copy.clock, true});
    land(copy, u32(machine->moments.size() - 1));
    b.gathered.resize(machine->threads.size());
    b.gathered[copy.thread] = std::max(b.gathered[copy.thread], copy.clock + 1);
  }
  b.copies.clear();
  check_looks(b);
  b.missing = b.count, b.expected = 0, ++b.phase;
  b.arrived[b.phase % 3].clear();
  machine->select(me);
  return true;
}

// One arrival fewer is missing.
Barrier& arrive(SharedArray* array, long long i) {
  Barrier& b = barrier_of(array, i);
  if (!b.missing)
    machine->fail("arrives at " + element(*array, i) + ", at which all " + std::to_string(b.count) + " have arrived and copies are in flight");
  --b.missing;
  b.arrived[b.phase % 3].push_back(machine->now());
  return b;
}

}  // namespace

void barrier_init(SharedArray* array, long long i, u32 count) {
  if (!count) machine->fail("barrier " + element(*array, i) + " is prepared for nobody");
  claim(*array, machine->rank, i, "store");
  for (auto& b : machine->barriers)
    if (b->array == array && b->rank == machine->rank && b->i == i) machine->fail("barrier " + element(*array, i) + " is prepared again");
  const std::size_t threads = machine->threads.size();
  const std::vector<long long> never(threads, kNever);
  const std::vector<Look> none(threads, Look{kNever, 0});
  machine->barriers.emplace_back(new Barrier{array, machine->rank, i, count, count, 0, 0, {}, {}, {}, never, {none, none}, {}});
}

void barrier_arrive(SharedArray* array, long long i, u32 bytes) {
  Barrier& b = arrive(array, i);
  b.expected += bytes;
  tell(machine->current, b.gathered);
  if (!in_flight(b)) complete(b);
}

void barrier_arrive_with_copies(SharedArray* array, long long i) {
  Barrier& b = arrive(array, i);
  Thread& t = machine->me();
  t.entrusted = t.landed + t.copies.size();
  b.arrivals.push_back(Arrival{machine->current, t.clock, t.entrusted, t.seen});
  ++t.clock, t.moment = 0;
  if (!in_flight(b)) complete(b);
}

void end_phases() {
  for (auto& b : machine->barriers)
    if (!b->arrivals.empty() && !in_flight(*b)) complete(*b);
}

void barrier_wait(SharedArray* array, long long i, u32 parity) {
  Barrier& b = barrier_of(array, i);
  if (parity > 1) machine->fail("waits for parity " + std::to_string(parity) + " of " + element(*array, i));
  long long& last = b.waited_for[machine->current];
  const auto has = [&](long long phase) { return u32(phase & 1) == parity; };
  const long long phase = last == kNever ? has(b.phase - 1) ? b.phase - 1 : b.phase : has(last) ? last : last + 1;
  if (phase < b.phase - 1)
    machine->fail("waits for phase " + std::to_string(phase) + " of " + element(*array, i) + " by its parity, and the next is over too");
  if (last == kNever && phase > 0) check_first_look(b, phase);
  last = phase;
  Thread& t = machine->me();
  b.looks[phase & 1][machine->current] = Look{phase, t.clock};
  if (phase == b.phase) {
    t.state = State::kAtBarrier, t.awaited = &b;
    machine->yield();
  }
  learn(machine->me().seen, b.gathered);
}

void copy_bulk(SharedArray* to, long long i, const void* from, u32 bytes, SharedArray* barriers, long long at) {
  Barrier& b = barrier_of(barriers, at);
  check_place(*to, i, 16, "copy");
  if (!bytes || bytes % 16) machine->fail("bulk copy of " + std::to_string(bytes) + " bytes, which is no multiple of 16");
  machine->access(from, bytes, Access::kCopy, 16);
  const char* p = static_cast<const char*>(from);
  b.copies.push_back(Copy{to, i, bytes / to->element, p, bytes, std::string(p, bytes), machine->current, machine->me().clock});
  take_off(b.copies.back());
  ++machine->me().clock, machine->me().moment = 0;  // the copy's landing does not order later accesses
}

// Rows of 128 bytes, 16 bytes at once; elements outside of the tensor are zero, and count.
void copy_box(SharedArray* to, long long i, const TensorMap& map, const u32* from, SharedArray* barriers, long long at) {
  Barrier& b = barrier_of(barriers, at);
  check_place(*to, i, 1024, "copy of a box");
  if (map.box[0] * map.element != 128 || map.box[3] != 1 || map.box[4] != 1) machine->fail("copy of a box whose rows are not 128 bytes, or of several heads");
  for (u32 block = 0, row = 0; block < map.box[2]; ++block) {
    for (u32 token = 0; token < map.box[1]; ++token, ++row) {
      const u32 place[5] = {from[0], from[1] + token, from[2] + block, from[3], from[4]};
      bool there = true;
      const char* p = map.begin + u64(place[0]) * map.element;
      for (u32 axis = 0; axis < 5; ++axis) {
        there = there && place[axis] < map.sizes[axis];
        if (axis) p += place[axis] * map.strides[axis - 1];
      }
      for (u32 piece = 0; piece < 8; ++piece) {
        const u32 bytes = there && (piece * 16 + 16) / map.element <= map.sizes[0] - place[0] ? 16 : 0;
        if (bytes) machine->access(p + piece * 16, 16, Access::kCopy, 16);
        const long long byte = row * 128 + (piece ^ row % 8) * 16;
        const char* asked = bytes ? p + piece * 16 : map.begin;
        b.copies.push_back(Copy{to, i + byte / to->element, 16 / to->element, asked, bytes, std::string(asked, bytes), machine->current, machine->me().clock});
        take_off(b.copies.back());
      }
    }
  }
  ++machine->me().clock, machine->me().moment = 0;  // the copies' landing does not order later accesses
}

// Ends phases with waiting threads. Copies land as late as possible: when no thread can go on without them.
bool Machine::settle_barriers() {
  bool moved = false;
  for (auto& b : barriers) {
    const auto waits = [&](const Thread& t) { return t.state == State::kAtBarrier && t.awaited == b.get(); };
    if (std::none_of(threads.begin(), threads.end(), waits)) continue;
    const auto over = [&](const Thread& t) { return b->waited_for[&t - threads.data()] < b->phase; };
    if (std::none_of(threads.begin(), threads.end(), [&](const Thread& t) { return waits(t) && over(t); })) complete(*b);
    for (Thread& t : threads)
      if (waits(t) && over(t)) t.state = State::kRunning, moved = true;
  }
  return moved;
}

// Threads that met at a barrier of the block or of the warp know everything that any of them knew.
void Machine::share(u32 first, u32 count, u32 mask) {
  if (barriers.empty()) return;
  std::vector<u32> all;
  const auto takes_part = [&](u32 i) { return mask >> i % kWarp & 1; };
  for (u32 i = 0; i < count; ++i)
    if (takes_part(i)) tell(first + i, all);
  for (u32 i = 0; i < count; ++i)
    if (takes_part(i)) threads[first + i].seen = all;
}

// This thread arrives at a barrier of the cluster: it passes on the accesses that it has seen.
void Machine::gather(u32 number) {
  if (barriers.empty()) return;
  if (gathered.size() <= number) gathered.resize(number + 1);
  tell(current, gathered[number]);
}
// This thread has waited for that barrier: it sees the accesses that arrived threads have seen.
void Machine::spread(u32 number) {
  if (number < gathered.size()) learn(me().seen, gathered[number]);
}

void Machine::fail_of_deadlock() {
  std::string what;
  for (const auto& b : barriers) {
    const auto waits = [&](const Thread& t) { return t.state == State::kAtBarrier && t.awaited == b.get(); };
    const auto first = std::find_if(threads.begin(), threads.end(), waits);
    if (first == threads.end()) continue;
    select(u32(first - threads.begin()));
    what += (what.empty() ? "waits for phase " : "; thread " + std::to_string(current) + " for phase ") + std::to_string(b->phase) + " of " +
            element(*b->array, b->i) + ", which nobody ends: " + std::to_string(b->missing) + " of " + std::to_string(b->count) +
            " have not arrived, " + std::to_string(b->expected) + " bytes are expected and " + std::to_string(bytes_of(*b)) + " were asked for";
  }
  for (u32 i = 0; i < threads.size() && what.empty(); ++i) {
    const Thread& t = threads[i];
    if (t.state != State::kAtMeeting) continue;
    const auto beside = [&](const Thread& other) {
      return other.state == State::kAtMeeting && other.source == t.source && (&other - threads.data()) / block == i / block;
    };
    select(i);
    what = "waits at barrier " + std::to_string(t.source) + ", at which " + std::to_string(std::count_if(threads.begin(), threads.end(), beside)) +
           " of " + std::to_string(t.mask) + " threads are and no more will come";
  }
  fail(what.empty() ? "threads wait at different barriers" : what);
}

// Threads of a block that meet by a barrier's number, wherever they are in the text.
void meet_at(u32 barrier, u32 count) {
  Thread& t = machine->me();
  if (!barrier || barrier > 15) machine->fail("meets at barrier " + std::to_string(barrier) + ": they are 1 to 15, and 0 is that of __syncthreads");
  if (!count || count % kWarp || count > machine->block)
    machine->fail(std::to_string(count) + " threads are to meet, which are no whole warps, or more than the block has");
  t.source = barrier, t.mask = count, t.state = State::kAtMeeting;
  machine->yield();
}

// Lets the threads of a block go on that have met at one of its barriers.
bool Machine::settle_meetings(u32 of) {
  for (u32 barrier = 1; barrier < 16; ++barrier) {
    std::vector<u32> here;
    for (u32 i = of * block; i < (of + 1) * block; ++i)
      if (threads[i].state == State::kAtMeeting && threads[i].source == barrier) here.push_back(i);
    if (here.empty()) continue;
    const u32 wanted = threads[here[0]].mask;
    for (u32 i : here) {
      select(i);
      if (me().mask != wanted) fail("waits at barrier " + std::to_string(barrier) + " for " + std::to_string(me().mask) + " threads, others for " + std::to_string(wanted));
    }
    if (here.size() < wanted) continue;
    if (here.size() > wanted) fail("waits at barrier " + std::to_string(barrier) + " with more than the " + std::to_string(wanted) + " threads that it is for");
    for (u32 i : here) threads[i].state = State::kRunning, threads[i].moment = 0;
    if (wanted == block) {
      share(of * block, block, ~0u);
      ++epochs[of];
    } else {
      std::vector<u32> all;
      for (u32 i : here) tell(i, all);
      for (u32 i : here) threads[i].seen = all;
    }
    return true;
  }
  return false;
}

void check_barriers_ended() {
  for (const auto& b : machine->barriers) {
    if (!in_flight(*b)) continue;
    const auto flies = [](const Arrival& a) { return machine->threads[a.thread].landed < a.copies; };
    const Copy& copy = b->copies.empty() ? machine->threads[std::find_if(b->arrivals.begin(), b->arrivals.end(), flies)->thread].copies[0] : b->copies[0];
    machine->select(copy.thread);
    machine->fail("has ended, and nobody has waited for its copy to " + element(*copy.to, copy.i));
  }
}

}  // namespace emulator

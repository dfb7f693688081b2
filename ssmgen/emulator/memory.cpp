// Checked memory accesses of a launch's threads: accesses must lie in operands, and stores must not collide.
#include <cstdint>
#include <cstring>

#include "state.hpp"

namespace emulator {

void Machine::access(const void* address, u32 bytes, Access kind, u32 alignment) {
  const bool write = kind == Access::kStore || kind == Access::kAtomic;
  const char* what = kind == Access::kLoad ? "load" : kind == Access::kStore ? "store" : kind == Access::kCopy ? "copy" : "atomic";
  const char* p = static_cast<const char*>(address);
  if (reinterpret_cast<std::uintptr_t>(p) % alignment)
    fail(std::to_string(alignment) + "-byte " + what + " at an address that is not a multiple of " + std::to_string(alignment) + nearest(p));
  if (!bytes) return;
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
  if (kind == Access::kAtomic) return;
  auto& cells = writers[in - operands.data()];
  const u32 grain = in->element == 1 ? 1 : 2;  // bytes that one thread writes
  if (!cells) cells.reset(static_cast<u32*>(std::calloc(in->bytes / grain + 1, sizeof(u32))));
  if (!cells) throw std::bad_alloc();
  const u32 moment = now();
  for (u32 i = 0; i < bytes; i += grain) {
    u32& w = cells[(p + i - in->begin) / grain];
    if (w && !ordered(w))
      fail("store to an address that thread " + thread_of(w) + " of block " + std::to_string(moments[w].block) +
           " also writes, with no barrier between" + nearest(p));
    w = moment;
  }
}

std::string Machine::nearest(const char* p) const {
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

namespace {

constexpr const char *kNoBarrier = ", with no barrier between", *kNotWaited = ", and that thread has not waited for the copy";

SharedArray::Cell& cell(SharedArray& array, long long i, const char* what, u32 rank) {
  if (i < 0 || u64(i) >= array.count)
    machine->fail(std::string(what) + " of " + array.name + "[" + std::to_string(i) + "] in shared memory; it has " +
                  std::to_string(array.count) + " elements");
  return array.cells[rank * array.count + i];
}

// The constraints on a thread's prefetch, whatever its address.
void check_prefetch(const char* p, u64 bytes) {
  for (const Operand& o : machine->operands)
    if (p >= o.begin && p + bytes <= o.begin + o.bytes) return;
  machine->fail("prefetch outside of every operand" + machine->nearest(p));
}

void check_waited() {
  if (machine->pdl && !machine->me().waited) machine->fail("prefetch before the wait for the upstream kernel");
}

// Checks that another block of the cluster is known to run.
void check_peer(const SharedArray& array, u32 rank, const char* what) {
  Machine& m = *machine;
  const auto fail = [&](const std::string& where) { m.fail(what + array.name + " of " + where); };
  if (rank >= m.cluster) fail("block " + std::to_string(rank) + " of a cluster of " + std::to_string(m.cluster));
  if (!m.me().cluster_waited) fail("a peer that may not have begun: no barrier of the cluster lies before it");
  bool there = false;
  for (u32 t = 0; t < m.block; ++t) there |= m.threads[rank * m.block + t].state != State::kDone;
  if (!there) fail("a peer that has ended");
}

void load_4(SharedArray& array, u32 rank, long long i, u32* r) {
  check_place(array, i, 16, "load of four words");
  for (u32 e = 0; e < 16 / array.element; ++e) note_reader(readable(array, rank, i + e, "load"));
  std::memcpy(r, array.values.data() + (rank * array.count + i) * array.element, 16);
}

void store_4(SharedArray& array, u32 rank, long long i, const u32* v) {
  check_place(array, i, 16, "store of four words");
  check_sums(v, 16);
  for (u32 done = 0; done < 16; done += array.element)
    std::memcpy(claim(array, rank, i + done / array.element, "store"), reinterpret_cast<const char*>(v) + done, array.element);
}

}  // namespace

void note_reader(SharedArray::Cell& c) {
  const auto of = [&](u32 reader) -> const Moment& { return machine->moments[reader]; };
  const u32 last = c.readers[0], warp = machine->current / kWarp, moment = machine->now();
  c.readers[0] = moment;
  if (!last || of(last).thread == machine->current) return;
  const u32 other = c.readers[1];
  const bool keep = other && of(last).thread / kWarp == warp && of(other).thread / kWarp != warp && of(other).epoch == of(moment).epoch;
  if (!keep) c.readers[1] = last;
}

char* claim(SharedArray& array, u32 rank, long long i, const char* what) {
  SharedArray::Cell& c = cell(array, i, what, rank);
  const auto fail = [&](u32 moment, const char* does, const char* without) {
    machine->fail(std::string(what) + " to " + array.name + "[" + std::to_string(i) + "] in shared memory, which thread " +
                  machine->thread_of(moment) + does + without);
  };
  if (c.in_flight) fail(c.in_flight, " copies to", kNotWaited);
  if (c.products)
    machine->fail(std::string(what) + " to " + element(array, i) + " in shared memory, written while a product reads it: " +
                  product_reader(array, rank, i) + " has not waited for it");
  if (c.when && !machine->ordered(c.when)) fail(c.when, " also writes", kNoBarrier);
  for (u32& reader : c.readers) {
    if (reader && !machine->ordered(reader)) fail(reader, " has read", kNoBarrier);
    reader = 0;
  }
  c.when = machine->now();
  return array.values.data() + (rank * array.count + i) * array.element;
}

void load(const void* from, void* to, u32 bytes) {
  machine->access(from, bytes, Access::kLoad, bytes);
  std::memcpy(to, from, bytes);
}
void store(void* to, const void* from, u32 bytes) {
  machine->access(to, bytes, Access::kStore, bytes);
  check_sums(from, bytes);
  std::memcpy(to, from, bytes);
}
void check_atomic(const void* address, u32 bytes) { machine->access(address, bytes, Access::kAtomic, bytes); }

void prefetch(const void* address, int bytes) {
  check_waited();
  if (reinterpret_cast<std::uintptr_t>(address) % 16 || bytes % 16)
    machine->fail("prefetch of an address or a size that is not a multiple of 16");
  check_prefetch(static_cast<const char*>(address), bytes);
}
void touch(const void* address) {
  check_waited();
  check_prefetch(static_cast<const char*>(address), 1);
}

SharedArray* shared_array(const void* site, const char* name, u32 element, u64 count, u32 alignment) {
  for (auto& array : machine->shared)
    if (array->site == site) return array.get();
  count = count == kDynamic ? machine->dynamic_bytes / element : count;
  const u64 all = count * machine->cluster;
  machine->shared.emplace_back(new SharedArray{site, name, element, count, alignment, std::vector<char>(all * element),
                                               std::vector<SharedArray::Cell>(all)});
  return machine->shared.back().get();
}

SharedArray::Cell& readable(SharedArray& array, u32 rank, long long i, const char* what) {
  SharedArray::Cell& c = cell(array, i, what, rank);
  const auto fail = [&](const std::string& why) { machine->fail(std::string(what) + " of " + element(array, i) + " in shared memory, which " + why); };
  if (c.in_flight) fail("thread " + machine->thread_of(c.in_flight) + " copies to" + kNotWaited);
  if (!c.when) fail("nothing has written");
  if (!machine->ordered(c.when)) fail("thread " + machine->thread_of(c.when) + " has written" + kNoBarrier);
  return c;
}

const void* shared_load(SharedArray* array, long long i) {
  note_reader(readable(*array, machine->rank, i, "load"));
  return array->values.data() + (machine->rank * array->count + i) * array->element;
}

void* shared_store(SharedArray* array, long long i) { return claim(*array, machine->rank, i, "store"); }

void* shared_store_to_peer(SharedArray* array, u32 rank, long long i) {
  check_peer(*array, rank, "store to ");
  return claim(*array, rank, i, "store");
}

void load_4_from_peer(SharedArray* array, u32 rank, long long i, u32* r) {
  check_peer(*array, rank, "load from ");
  load_4(*array, rank, i, r);
}

void load_4_shared(SharedArray* from, long long i, u32* r) { load_4(*from, machine->rank, i, r); }

void store_4_to_peer(SharedArray* array, u32 rank, long long i, const u32* v) {
  check_peer(*array, rank, "store to ");
  store_4(*array, rank, i, v);
}

void store_4_shared(SharedArray* to, long long i, const u32* v) { store_4(*to, machine->rank, i, v); }

}  // namespace emulator

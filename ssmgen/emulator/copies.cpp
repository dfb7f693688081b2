// Moves of several elements: copies that land at a wait for them, and matrices from shared memory.
#include <algorithm>
#include <cstring>

#include "state.hpp"

namespace emulator {
namespace {

// `bytes` of this block's array from a byte on, as this thread reads them: at most 4, of one element or of several.
u32 read(SharedArray* array, long long byte, u32 bytes) {
  u32 r = 0;
  for (u32 done = 0; done < bytes;) {
    const u32 within = u32((byte + done) % array->element), part = std::min(bytes - done, array->element - within);
    std::memcpy(reinterpret_cast<char*>(&r) + done, static_cast<const char*>(shared_load(array, (byte + done) / array->element)) + within, part);
    done += part;
  }
  return r;
}

}  // namespace

std::string element(const SharedArray& array, long long i) { return array.name + "[" + std::to_string(i) + "]"; }

// Checks the place of `size` bytes in a block's array, which an instruction needs aligned.
void check_place(const SharedArray& array, long long i, u32 size, const char* what) {
  if (array.alignment < size)
    machine->fail(std::string(what) + " of " + array.name + ", which is declared with an alignment of " + std::to_string(array.alignment) +
                  " bytes instead of " + std::to_string(size));
  if (i * array.element % size)
    machine->fail(std::string(what) + " of " + element(array, i) + " in shared memory, which does not begin at a multiple of " + std::to_string(size) +
                  " bytes");
}

void take_off(const Copy& copy) {
  for (u32 e = 0; e < copy.elements; ++e) {
    claim(*copy.to, machine->rank, copy.i + e, "copy");
    copy.to->cells[machine->rank * copy.to->count + copy.i + e].in_flight = machine->now();
  }
}

void land(const Copy& copy, u32 moment) {
  SharedArray& to = *copy.to;
  const u64 first = machine->rank * to.count + copy.i;
  if (std::memcmp(copy.asked.data(), copy.from, copy.bytes))
    machine->fail("copy to " + element(to, copy.i) + " of what has been written since it was asked for" + machine->nearest(copy.from));
  char* values = to.values.data() + first * to.element;
  std::memset(values, 0, copy.elements * to.element);
  std::memcpy(values, copy.from, copy.bytes);
  for (u32 e = 0; e < copy.elements; ++e) to.cells[first + e].when = moment, to.cells[first + e].in_flight = 0;
}

// Lands copies of a thread, up to this number. Copies entrusted to a barrier count as stored when they were issued, before their thread
// arrived: threads that wait for the barrier therefore see them, whenever they land.
void land_copies(u32 thread, u64 count) {
  Machine& m = *machine;
  const u32 me = m.current;
  m.select(thread);
  Thread& t = m.me();
  u32 moment = 0;
  const u64 before = t.landed;
  for (; t.landed < count; ++t.landed) {
    const Copy& copy = t.copies[t.landed - before];
    if (t.landed >= t.entrusted) moment = m.now();
    else if (!moment || m.moments[moment].clock != copy.clock) {
      moment = u32(m.moments.size());
      m.moments.push_back(Moment{block_index.x, thread, m.epochs[m.rank], t.warp_epoch, t.cluster_arrived, copy.clock});
    }
    land(copy, moment);
  }
  u64 landed = t.landed - before;
  t.copies.erase(t.copies.begin(), t.copies.begin() + landed);
  for (u32& group : t.groups) {
    const u32 of = u32(std::min<u64>(group, landed));
    group -= of, landed -= of;
  }
  m.select(me);
}

void copy_async(SharedArray* to, long long i, const void* from, u32 bytes, u32 size) {
  check_place(*to, i, size, "copy");
  if (bytes > size) machine->fail("copy of " + std::to_string(bytes) + " bytes to " + std::to_string(size));
  machine->access(from, bytes, Access::kCopy, size);
  const char* p = static_cast<const char*>(from);
  machine->me().copies.push_back(Copy{to, i, size / to->element, p, bytes, std::string(p, bytes), machine->current, machine->me().clock});
  take_off(machine->me().copies.back());
}

void commit_copies() {
  Thread& t = machine->me();
  u32 grouped = 0;
  for (u32 group : t.groups) grouped += group;
  t.groups.push_back(u32(t.copies.size()) - grouped);
}

void wait_copies(u32 left) {
  Thread& t = machine->me();
  while (t.groups.size() > left) {
    land_copies(machine->current, t.landed + t.groups.front());
    t.groups.erase(t.groups.begin());
  }
  if (t.entrusted) end_phases();
}

void wait_all_copies() {
  commit_copies();
  wait_copies(0);
}

void check_ended() {
  const Thread& t = machine->me();
  if (t.landed + t.copies.size() > t.entrusted && !t.copies.empty()) {
    const Copy& copy = t.copies[std::max(t.landed, t.entrusted) - t.landed];
    machine->fail("has ended without waiting for its copy to " + element(*copy.to, copy.i));
  }
  check_products_ended();
}

void load_pair(u32* r, SharedArray* from, long long i) {
  check_place(*from, i, 8, "load of two words");
  for (u32 e = 0; e < 2; ++e) r[e] = *static_cast<const u32*>(shared_load(from, i + e));
}

void store_pair(SharedArray* to, long long i, const u32* v) {
  check_place(*to, i, 8, "store of two words");
  for (u32 e = 0; e < 2; ++e) *static_cast<u32*>(shared_store(to, i + e)) = v[e];
}

void load_matrices(u32* r, SharedArray* from, long long i, bool transposed) {
  struct Row {
    SharedArray* array;
    long long byte;
  } own{from, i * from->element};
  check_place(*from, i, 16, "load of matrices");
  const u32 lane = machine->current % kWarp, group = lane / 4, part = lane % 4;
  const auto meet = [&, site = __builtin_return_address(0)] { machine->meet(Kind::kTogether, site, ~0u, u64(&own), lane); };
  const auto row = [&](u32 l) { return *reinterpret_cast<const Row*>(machine->threads[machine->current - lane + l].brought); };
  meet();
  for (u32 m = 0; m < 4; ++m) {
    if (transposed) {
      r[m] = 0;
      for (u32 half = 0; half < 2; ++half) {
        const Row of = row(8 * m + 2 * part + half);
        r[m] |= read(of.array, of.byte + 2 * group, 2) << 16 * half;
      }
    } else {
      const Row of = row(8 * m + group);
      r[m] = read(of.array, of.byte + 4 * part, 4);
    }
  }
  meet();  // the others may have read this lane's row until here
}

// Each lane stores the row at its address, from the other lanes' registers.
void store_matrices_transposed(SharedArray* to, long long i, const u32* r) {
  check_place(*to, i, 16, "store of matrices");
  const u32 lane = machine->current % kWarp, matrix = lane / 8, row = lane % 8;
  const auto meet = [&, site = __builtin_return_address(0)] { machine->meet(Kind::kTogether, site, ~0u, u64(r), lane); };
  const auto held = [&](u32 l) { return reinterpret_cast<const u32*>(machine->threads[machine->current - lane + l].brought)[matrix]; };
  meet();
  u16 numbers[8];
  for (u32 column = 0; column < 8; ++column) numbers[column] = u16(held(4 * column + row / 2) >> 16 * (row % 2));
  for (u32 done = 0; done < 16; done += to->element)
    std::memcpy(claim(*to, machine->rank, i + done / to->element, "store"), reinterpret_cast<const char*>(numbers) + done, to->element);
  meet();  // the others may have read this lane's registers until here
}

}  // namespace emulator

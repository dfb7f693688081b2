// Boxes that tensor maps describe: rows of 128 bytes, 16 at once. Copies to shared memory land with a barrier's phase; what the tensor lacks is
// zero, and counts. Copies from there read it until they are waited for, and leave out what the tensor lacks.
#include <cstring>

#include "state.hpp"

namespace emulator {
namespace {

void check_box(const SharedArray& array, long long i, const TensorMap& map) {
  check_place(array, i, 1024, "copy of a box");
  if (map.box[0] * map.element != 128 || map.box[3] != 1 || map.box[4] != 1) machine->fail("copy of a box whose rows are not 128 bytes, or of several heads");
}

// Calls work(byte of the box in shared memory, address, whether the tensor has it) for each 16 bytes.
template <class Work>
void for_pieces(const TensorMap& map, const u32* from, const Work& work) {
  for (u32 block = 0, row = 0; block < map.box[2]; ++block) {
    for (u32 token = 0; token < map.box[1]; ++token, ++row) {
      const u32 place[5] = {from[0], from[1] + token, from[2] + block, from[3], from[4]};
      bool there = true;
      char* p = map.begin + u64(place[0]) * map.element;
      for (u32 axis = 0; axis < 5; ++axis) {
        there = there && place[axis] < map.sizes[axis];
        if (axis) p += place[axis] * map.strides[axis - 1];
      }
      for (u32 piece = 0; piece < 8; ++piece)
        work(row * 128 + (piece ^ row % 8) * 16, p + piece * 16, there && (piece * 16 + 16) / map.element <= map.sizes[0] - place[0]);
    }
  }
}

}  // namespace

void copy_box(SharedArray* to, long long i, const TensorMap& map, const u32* from, SharedArray* barriers, long long at, u32 blocks) {
  const std::vector<u32> ranks = ranks_of(*to, blocks);
  check_box(*to, i, map);
  for_pieces(map, from, [&](u32 byte, const char* p, bool there) {
    const u32 bytes = there ? 16 : 0;
    if (bytes) machine->access(p, 16, Access::kCopy, 16);
    const char* asked = bytes ? p : map.begin;
    const std::string there_now(asked, bytes);
    for (u32 rank : ranks)
      ask_for(Copy{to, i + byte / to->element, 16 / to->element, asked, bytes, there_now, machine->current, machine->me().clock, rank}, barriers, at);
  });
  ++machine->me().clock, machine->me().moment = 0;  // what it does now is not ordered by the copies' landing
}

void store_box(const TensorMap& map, const u32* to, SharedArray* from, long long i) {
  check_box(*from, i, map);
  for_pieces(map, to, [&](u32 byte, char* p, bool there) {
    const u32 count = 16 / from->element;
    for (u32 e = 0; e < count; ++e) {
      const long long at = i + byte / from->element + e;
      SharedArray::Cell& c = readable(*from, machine->rank, at, "copy of a box");
      if (!visible(c.when))
        machine->fail("copy of " + element(*from, at) + " in shared memory, which thread " + machine->thread_of(c.when) +
                      " has written, with no fence_for_async between");
      ++c.products;
    }
    machine->me().stores.push_back(Store{from, i + byte / from->element, count, there ? p : nullptr});
  });
}

void wait_boxes_read() {
  Thread& t = machine->me();
  if (t.stores.empty()) machine->fail("waits for boxes to be read, and has stored none");
  for (const Store& store : t.stores) {
    const u64 first = machine->rank * store.from->count + store.i;
    for (u32 e = 0; e < store.elements; ++e) {
      --store.from->cells[first + e].products;
      note_reader(store.from->cells[first + e]);
    }
    if (!store.to) continue;
    machine->access(store.to, 16, Access::kStore, 16);
    std::memcpy(store.to, store.from->values.data() + first * store.from->element, 16);
  }
  t.stores.clear();
}

}  // namespace emulator

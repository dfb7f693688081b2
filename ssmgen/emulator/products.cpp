// Products of warpgroups: they read and sum until they are waited for, and land no earlier. A warp has 16 rows. Lane 0, the first to
// continue after a warp has met, does the work of the whole warp.
#include <algorithm>
#include <cstring>

#include "state.hpp"

namespace emulator {
namespace {

constexpr u32 kPoison = 0x7fed50d5;  // a NaN that nothing else makes; arithmetic hands it on
constexpr u32 kPiece = 16;           // bytes that stay together: 8 elements
constexpr u32 kDepth = 16;           // summed over by one product
constexpr u32 kRegisters = 65536;    // of a multiprocessor, in eights per thread

struct Asked {
  float* d;
  const u32* a;  // or nullptr, and
  Matrix first;
  bool first_by_columns;
  Matrix b;
  u32 columns;
  bool by_columns;
  u32 sum;
  bool operator==(const Asked& o) const { return same(first, o.first) && same(b, o.b) && columns == o.columns && sum == o.sum; }
};

// The lanes meet; then lane 0 does it, whose number among the threads it is given.
template <class Work>
void together(const void* site, const void* own, const Work& work) {
  machine->meet(Kind::kTogether, site, ~0u, u64(own), machine->current % kWarp);
  const u32 me = machine->current;
  if (me % kWarp) return;
  work(me);
  machine->select(me);
}

[[noreturn]] void fail_of(u32 thread, const std::string& what) {
  machine->select(thread);
  machine->fail(what);
}

Warp& warp_of(u32 thread) { return machine->warps[thread / kWarp]; }
u32 warpgroup_of(u32 thread) {
  const u32 block = machine->block, each = (block + kWarpgroup - 1) / kWarpgroup;
  return thread / block * each + thread % block / kWarpgroup;
}

void take_step(u32 first, const Step& step, const char* what) {
  const u32 within = first % machine->block / kWarpgroup * kWarpgroup;
  if (within + kWarpgroup > machine->block)
    machine->fail(std::string(what) + " of a warpgroup, of whose four warps the block has " +
                  std::to_string((machine->block - within) / kWarp));
  auto& steps = machine->steps[warpgroup_of(first)];
  const u32 mine = warp_of(first).steps++;
  if (mine == steps.size()) steps.push_back(step);
  if (!(steps[mine] == step)) machine->fail(std::string(what) + " that is not what another warp of the warpgroup has asked for in its place");
}

// Registers are on the threads' stacks.
void check_fenced(u32 thread, const void* registers, u32 bytes, const char* what) {
  const Thread& t = machine->threads[thread];
  const char *p = static_cast<const char*>(registers), *top = t.lowest + t.registers.size();
  if (p < machine->stacks[thread] || p >= top) return;
  if (p < t.lowest || std::memcmp(p, t.registers.data() + (p - t.lowest), bytes))
    fail_of(thread, std::string(what) + ", changed since the last wgmma_fence");
}

bool poisoned(const float* d, u32 count) {
  for (u32 i = 0; i < count; ++i)
    if (std::memcmp(d + i, &kPoison, 4)) return false;
  return true;
}

void poison(float* d, u32 count) {
  for (u32 i = 0; i < count; ++i) std::memcpy(d + i, &kPoison, 4);
}

// Lane 4 g + t has columns 8 i + 2 t and one up, of row g in d[4 i] and d[4 i + 1], of row g + 8 in the next two.
template <class Move>
void move(Sum& sum, const Move& one) {
  for (u32 lane = 0; lane < kWarp; ++lane)
    for (u32 i = 0; i < sum.columns / 2; ++i)
      one(sum.d[lane][i], sum.values[(lane / 4 + i % 4 / 2 * 8) * sum.columns + i / 4 * 8 + lane % 4 * 2 + i % 2]);
}

const char* const kSums = "registers that products sum into";

// The sum in these registers, or a new one.
Sum& sum_of(u32 first, const Asked* const* asked) {
  Warp& warp = warp_of(first);
  const u32 columns = asked[0]->columns, count = columns / 2;
  for (auto& sum : warp.sums) {
    u32 same = 0;
    for (u32 l = 0; l < kWarp; ++l) {
      const float *d = asked[l]->d, *other = sum->d[l];
      same += d == other && columns == sum->columns;
      if (d < other + sum->columns / 2 && other < d + count && !(d == other && columns == sum->columns))
        fail_of(first + l, "sums into registers into which a product of another shape, in flight, sums too");
    }
    if (!same) continue;
    if (same < kWarp) fail_of(first, "sums into registers of which some lanes' are in flight, and others' are not");
    for (u32 l = 0; l < kWarp; ++l)
      if (!poisoned(sum->d[l], count)) fail_of(first + l, std::string(kSums) + ", changed while they are in flight");
    return *sum;
  }
  warp.sums.emplace_back(new Sum{{}, columns, 0, std::vector<float>(16 * columns)});
  Sum& sum = *warp.sums.back();
  for (u32 l = 0; l < kWarp; ++l) {
    sum.d[l] = asked[l]->d;
    if (asked[0]->sum) check_fenced(first + l, sum.d[l], 4 * count, kSums);
  }
  move(sum, [](float& d, float& value) { value = d; });
  for (u32 l = 0; l < kWarp; ++l) poison(sum.d[l], count);
  return sum;
}

// The part read of an operand's columns, or of the first operand's rows: 8 elements are contiguous. Addresses are relative to a multiple of
// 1024.
Part part_of(const Matrix& b, u32 columns, bool by_columns, u32 from, u32 count) {
  check_place(*b.array, 0, 1024, "matrix");
  const auto fail = [&](const std::string& why) { machine->fail("matrix that begins at byte " + std::to_string(b.byte) + " of " + b.array->name + why); };
  if (b.by_columns != by_columns) fail(b.by_columns ? ", by columns, in a product by rows" : ", by rows, in a product by columns");
  if (b.byte % kPiece || b.byte / b.row % 8) fail(": its rows do not begin with one of every 8");
  const u32 wide = b.by_columns ? std::min(columns, 64u) * 2 : kDepth * 2;
  if (b.byte % b.row + wide > b.row) fail(": its rows go on behind their " + std::to_string(b.row) + " bytes");
  if (b.by_columns && columns > 64 && b.next % 1024)
    fail(": its next 64 columns are " + std::to_string(b.next) + " bytes on, which is no multiple of 1024");
  Part part{b.array, {}, count, by_columns};
  const u32 first_row = by_columns ? 0 : from, rows = by_columns ? kDepth : count;
  const u32 first_piece = by_columns ? from / 8 : 0, across = by_columns ? count / 8 : kDepth / 8;
  for (u32 row = first_row; row < first_row + rows; ++row)
    for (u32 p = first_piece; p < first_piece + across; ++p) {
      const u32 at = u32(b.byte) + row * b.row + p / 8 * b.next + p % 8 * kPiece;
      part.pieces.push_back(at ^ (at / 128 % (b.row / kPiece) * kPiece));
    }
  return part;
}

// Whether this thread's products see a store of that moment: some thread's fence must come after the store and before this thread.
bool visible(u32 moment) {
  Machine& m = *machine;
  const Moment& then = m.moments[moment];
  const auto by = [&](u32 thread) {
    const auto& fences = m.threads[thread].fences;
    const auto behind = [&](const Fence& f) { return moment < f.moment && m.precedes(then, m.moments[f.moment], f.cluster_waited, f.seen); };
    const auto first = std::partition_point(fences.begin(), fences.end(), [&](const Fence& f) { return !behind(f); });
    return first != fences.end() && m.ordered(first->moment);
  };
  if (then.bulk || by(then.thread) || by(m.current)) return true;
  for (u32 thread = 0; thread < m.threads.size(); ++thread)
    if (by(thread)) return true;
  return false;
}

template <class Work>
void for_cells(const Part& part, u32 rank, const Work& work) {
  for (u32 p = 0; p < part.pieces.size(); ++p)
    for (u32 i = part.pieces[p] / part.array->element, end = i + kPiece / part.array->element; i < end; ++i) work(p, i, rank * part.array->count + i);
}

// Each lane answers for some of the pieces, so that all of them are known to be ordered.
void begin_reading(u32 first, const Part& part) {
  SharedArray& array = *part.array;
  for_cells(part, machine->rank, [&](u32 piece, u32 i, u64) {
    machine->select(first + piece % kWarp);
    SharedArray::Cell& c = readable(array, machine->rank, i, "product");
    if (!visible(c.when))
      machine->fail("product of " + element(array, i) + " in shared memory, which thread " + machine->thread_of(c.when) +
                    " has written, with no fence_for_async between");
    ++c.products;
  });
  machine->select(first);
}

void issue(u32 first) {
  const Asked* asked[kWarp];
  for (u32 l = 0; l < kWarp; ++l) asked[l] = reinterpret_cast<const Asked*>(machine->threads[first + l].brought);
  const Asked& one = *asked[0];
  for (u32 l = 1; l < kWarp; ++l)
    if (!(*asked[l] == one)) fail_of(first + l, "a product that is not the one of lane 0");
  take_step(first, Step{one.first, one.b, one.columns, one.sum, 0}, "a product");
  for (u32 l = 0; l < kWarp; ++l)
    if (!machine->threads[first + l].fenced) fail_of(first + l, "a product with no wgmma_fence since products were last waited for");
  const u32 own_row = first % machine->block / kWarp % 4 * 16;
  Product product{{}, part_of(one.b, one.columns, one.by_columns, 0, one.columns), one.sum != 0, nullptr, {}, {}};
  if (one.first.array) product.first = part_of(one.first, 64, one.first_by_columns, own_row, 16);
  for (u32 l = 0; l < kWarp && one.a; ++l) {
    check_fenced(first + l, asked[l]->a, 16, "registers of a product's first operand");
    product.a[l] = asked[l]->a;
    std::memcpy(product.held[l], asked[l]->a, 16);
  }
  product.into = &sum_of(first, asked);
  ++product.into->pending;
  if (product.first.array) begin_reading(first, product.first);
  begin_reading(first, product.second);
  warp_of(first).products.push_back(std::move(product));
}

float widen(u16 bits) { return machine->numbers == Numbers::kBf16 ? from_bf16(bits) : from_f16(bits); }

// The values of a part, row by row along the summed axis.
std::vector<double> values_of(const Part& part) {
  std::vector<double> found(kDepth * part.columns);
  const char* values = part.array->values.data() + machine->rank * part.array->count * part.array->element;
  const u32 across = part.by_columns ? part.columns / 8 : kDepth / 8;
  for (u32 p = 0; p < part.pieces.size(); ++p) {
    u16 bits[8];
    std::memcpy(bits, values + part.pieces[p], kPiece);
    for (u32 i = 0; i < 8; ++i) {
      const u32 row = p / across, column = p % across * 8 + i;
      found[part.by_columns ? row * part.columns + column : column * part.columns + row] = widen(bits[i]);
    }
  }
  return found;
}

// Sums in double, rounded once per product, as mma's.
void sum_up(const Product& product) {
  Sum& sum = *product.into;
  double a[16][kDepth];
  if (product.first.array) {
    const std::vector<double> rows = values_of(product.first);
    for (u32 i = 0; i < 16 * kDepth; ++i) a[i % 16][i / 16] = rows[i];
  } else {
    for (u32 lane = 0; lane < kWarp; ++lane)
      for (u32 w = 0; w < 8; ++w)  // halves of its registers: rows g and g + 8, then columns 8 on
        a[lane / 4 + w / 2 % 2 * 8][lane % 4 * 2 + w / 4 * 8 + w % 2] = widen(u16(product.held[lane][w / 2] >> 16 * (w % 2)));
  }
  const std::vector<double> b = values_of(product.second);
  for (u32 row = 0; row < 16; ++row)
    for (u32 column = 0; column < sum.columns; column += 8) {
      float* d = sum.values.data() + row * sum.columns + column;
      double sums[8];
      for (u32 j = 0; j < 8; ++j) sums[j] = product.add ? d[j] : 0;
      for (u32 k = 0; k < kDepth; ++k) {
        const double left = a[row][k], *right = b.data() + k * sum.columns + column;
        for (u32 j = 0; j < 8; ++j) sums[j] += left * right[j];
      }
      for (u32 j = 0; j < 8; ++j) d[j] = float(sums[j]);
    }
}

void land(u32 first, const Product& product) {
  for (u32 l = 0; l < kWarp && product.a[l]; ++l)
    if (std::memcmp(product.a[l], product.held[l], 16))
      fail_of(first + l, "registers of a product's first operand, changed while a product reads them");
  machine->select(first);
  for (const Part* part : {&product.first, &product.second})
    for_cells(*part, machine->rank, [&](u32, u32, u64 at) {
      SharedArray::Cell& c = part->array->cells[at];
      --c.products;
      note_reader(c);
    });
  sum_up(product);
  Sum& sum = *product.into;
  if (--sum.pending) return;
  for (u32 l = 0; l < kWarp; ++l)
    if (!poisoned(sum.d[l], sum.columns / 2)) fail_of(first + l, std::string(kSums) + ", changed while they are in flight");
  move(sum, [](float& d, float& value) { d = value; });
  auto& sums = warp_of(first).sums;
  sums.erase(std::find_if(sums.begin(), sums.end(), [&](const auto& s) { return s.get() == &sum; }));
}

}  // namespace

void wgmma(float* d, const u32* a, const Matrix& b, u32 columns, bool by_columns, u32 sum) {
  const Asked own{d, a, {}, false, b, columns, by_columns, sum != 0};
  together(__builtin_return_address(0), &own, issue);
}

void wgmma(float* d, const Matrix& a, bool a_by_columns, const Matrix& b, u32 columns, bool by_columns, u32 sum) {
  const Asked own{d, nullptr, a, a_by_columns, b, columns, by_columns, sum != 0};
  together(__builtin_return_address(0), &own, issue);
}

void wgmma_fence() {
  Thread& t = machine->me();
  t.fenced = true;
  t.lowest = static_cast<const char*>(__builtin_frame_address(0));
  t.registers.assign(t.lowest, static_cast<const char*>(machine->stacks[machine->current] + kStack));
  together(__builtin_return_address(0), nullptr, [](u32) {});
}

void wgmma_commit() {
  together(__builtin_return_address(0), nullptr, [](u32 first) {
    Warp& warp = warp_of(first);
    u32 grouped = 0;
    for (u32 group : warp.groups) grouped += group;
    warp.groups.push_back(u32(warp.products.size()) - grouped);
  });
}

void wgmma_wait(u32 left) {
  together(__builtin_return_address(0), nullptr, [left](u32 first) {
    Warp& warp = warp_of(first);
    if (warp.groups.empty())
      machine->fail(warp.products.empty() ? "waits for products, and none are in flight" : "waits for products that nobody has committed");
    while (warp.groups.size() > left) {
      for (u32 p = 0; p < warp.groups.front(); ++p) {
        land(first, warp.products.front());
        warp.products.pop_front();
      }
      warp.groups.erase(warp.groups.begin());
      for (u32 l = 0; l < kWarp; ++l) machine->threads[first + l].fenced = false;
    }
  });
}

void wgmma_landed(const float* d, u32 count) {
  for (const auto& sum : warp_of(machine->current).sums) {
    const float* other = sum->d[machine->current % kWarp];
    if (d < other + sum->columns / 2 && other < d + count) machine->fail("names as landed what products in flight sum up: nobody has waited for them");
  }
}

void fence_for_async() {
  Thread& t = machine->me();
  t.moment = 0;  // separates its earlier stores from its later ones
  t.fences.push_back(Fence{machine->now(), t.cluster_waited, t.seen});
  t.moment = 0;
}

void change_registers(u32 registers, bool more) {
  together(__builtin_return_address(0), nullptr, [=](u32 first) {
    Warp& warp = warp_of(first);
    const char* what = more ? "take_registers" : "give_registers";
    if (warp.registers) machine->fail(std::string(what) + " of a warpgroup that has changed its registers before");
    warp.registers = registers;
    take_step(first, Step{{}, {}, 0, more, registers}, what);
  });
}

void check_sums(const void* numbers, u32 bytes) {
  if (machine->numbers == Numbers::kNone) return;
  for (u32 i = 0; i + 4 <= bytes; i += 4) {
    u32 bits;
    std::memcpy(&bits, static_cast<const char*>(numbers) + i, 4);
    if ((bits & 0x7fffffffu) == kPoison) machine->fail("uses what products in flight sum up: nobody has waited for them");
  }
}

std::string product_reader(const SharedArray& array, u32 rank, long long i) {
  for (u32 w = 0; w < machine->warps.size(); ++w)
    for (const Product& product : machine->warps[w].products) {
      bool reads = false;
      for (const Part* part : {&product.first, &product.second})
        if (part->array == &array && w * kWarp / machine->block == rank)
          for_cells(*part, rank, [&](u32, u32 cell, u64) { reads |= cell == i; });
      if (reads) return "thread " + std::to_string(w * kWarp % machine->block);
    }
  return "a thread";
}

void check_products_ended() {
  const Warp& warp = warp_of(machine->current);
  if (warp.products.empty()) return;
  u32 grouped = 0;
  for (u32 group : warp.groups) grouped += group;
  machine->fail(grouped < warp.products.size() ? "has ended with products that it has not committed" : "has ended without waiting for its products");
}

void check_warpgroups_ended() {
  Machine& m = *machine;
  for (u32 w = 0; w < m.warps.size(); ++w) {
    const u32 of_all = u32(m.steps[warpgroup_of(w * kWarp)].size());
    if (m.warps[w].steps < of_all)
      fail_of(w * kWarp, "has ended after " + std::to_string(m.warps[w].steps) + " products and changes of registers, of which another warp of its "
                         "warpgroup has done " + std::to_string(of_all) + ": all four warps do them all");
  }
  const u32 there = kRegisters / m.block / 8 * 8 * m.block;
  for (u32 rank = 0; rank < m.cluster; ++rank) {
    u32 all = 0;
    for (u32 w = rank * m.block / kWarp; w < (rank + 1) * m.block / kWarp; ++w) all += m.warps[w].registers * kWarp;
    if (all > there)
      fail_of(rank * m.block, "is of a block whose warpgroups ask for " + std::to_string(all) + " registers, of which it has " + std::to_string(there));
  }
}

}  // namespace emulator

// The interface between a kernel's text and the machine that runs it. The machine (machine.cpp) is compiled once, with optimisation; each
// kernel is compiled without optimisation, against these declarations alone.
#ifndef SSMGEN_EMULATOR_MACHINE_HPP
#define SSMGEN_EMULATOR_MACHINE_HPP

namespace emulator {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct Dim {
  u32 x, y, z;
};

// An operand: memory that a thread may access.
struct Operand {
  const char* name;  // with shape and dtype
  char* begin;
  u64 bytes;
  u32 element;
  u32 writable;
  u32 early;  // may be touched before the wait
};

enum class Kind { kShuffle, kBallot, kTogether, kWarpBarrier, kBlockBarrier };  // kTogether: an instruction of all lanes

// For the running thread.
extern Dim thread_index, block_index, block_size, grid_size;

// Waits until the other lanes are here too; `site` is where this returns to.
u64 meet(Kind kind, u32 mask, u64 value = 0, u32 source = 0);

void meet_at(u32 barrier, u32 threads);
void cluster_arrive();
void cluster_wait();
void wait_for_upstream();

// Global memory, checked.
void load(const void* from, void* to, u32 bytes);
void store(void* to, const void* from, u32 bytes);
void check_atomic(const void* address, u32 bytes);
void prefetch(const void* address, int bytes);
void touch(const void* address);

// Shared memory that knows which elements were written, and by whom.
struct SharedArray;
constexpr u64 kDynamic = ~u64(0);  // elements: the number that fits in the launch's dynamic shared memory
// The array that is declared at `site`, in each block.
SharedArray* shared_array(const void* site, const char* name, u32 element, u64 count, u32 alignment);
const void* shared_load(SharedArray* array, long long i);
void* shared_store(SharedArray* array, long long i);
void* shared_store_to_peer(SharedArray* array, u32 rank, long long i);
void load_4_from_peer(SharedArray* array, u32 rank, long long i, u32* r);
void store_4_to_peer(SharedArray* array, u32 rank, long long i, const u32* v);
void load_4_shared(SharedArray* from, long long i, u32* r);
void store_4_shared(SharedArray* to, long long i, const u32* v);
void load_pair(u32* r, SharedArray* from, long long i);
void store_pair(SharedArray* to, long long i, const u32* v);
void load_matrices(u32* r, SharedArray* from, long long i, bool transposed);
void store_matrices_transposed(SharedArray* to, long long i, const u32* r);

// Copies to shared memory that land when they are waited for.
void copy_async(SharedArray* to, long long i, const void* from, u32 bytes, u32 size);
void commit_copies();
void wait_copies(u32 left);
void wait_all_copies();

// Barriers in shared memory, and copies that land with their phases.
void barrier_init(SharedArray* array, long long i, u32 count);
void barrier_arrive(SharedArray* array, long long i, u32 bytes);
void barrier_arrive_with_copies(SharedArray* array, long long i);
void barrier_wait(SharedArray* array, long long i, u32 parity);
void copy_bulk(SharedArray* to, long long i, const void* from, u32 bytes, SharedArray* barriers, long long b);
// A tensor map as arguments.Tiles describes it. Strides are bytes, of all axes but the first.
struct TensorMap {
  char* begin;
  u64 strides[4];
  u32 sizes[5], box[5], element;
  char rest[44];
};
static_assert(sizeof(TensorMap) == 128, "a tensor map has 128 bytes");
void copy_box(SharedArray* to, long long i, const TensorMap& map, const u32* from, SharedArray* barriers, long long b);

// Products of warpgroups.
struct Matrix {
  SharedArray* array = nullptr;
  long long byte = 0;
  u32 next = 0;
  bool by_columns = false;
  u32 row = 128;  // bytes
};
void wgmma(float* d, const u32* a, const Matrix& b, u32 columns, bool by_columns, u32 sum);
void wgmma(float* d, const Matrix& a, bool a_by_columns, const Matrix& b, u32 columns, bool by_columns, u32 sum);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(u32 left);
void wgmma_landed(const float* d, u32 count);
void fence_for_async();
void change_registers(u32 registers, bool more);
// Checks numbers that leave a thread's registers: none may belong to the sum of a product in flight.
void check_sums(const void* numbers, u32 bytes);

// Arithmetic of the card.
u16 to_bf16(float v);
u16 to_f16(float v);
u16 truncate_f16(float v);
float from_f16(u16 h);
u16 e4m3_to_f16(unsigned char v);
unsigned char to_e4m3(float v);
float exp2_flushed(float v);
float rsqrt_flushed(float v);
float rcp_flushed(float v);
float log2_flushed(float v);
void mma(float* d, const u32* a, const u32* b, bool bf16);
void mma_tf32(float* d, const float* a, const float* b);

}  // namespace emulator

#endif

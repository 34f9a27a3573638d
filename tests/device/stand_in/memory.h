// Memory that the host cannot read, and pinned memory, which both can.
//
// Every device address lies in pages without access. The bytes lie at the same distance within a second mapping, the shadow,
// which only these files know: host code that follows a pointer of the device is ended by SIGSEGV, as that of a GPU's user is.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <cstring>
#include <set>

#include "device.h"

namespace stand_in {

constexpr size_t GIBIBYTE = size_t(1) << 30;
constexpr size_t ADDRESSES = 256 * GIBIBYTE;  // of one device: addresses cost nothing, and are not used again
constexpr size_t CAPACITY = 8 * GIBIBYTE;     // of one device, unless a test sets less
constexpr size_t GRANULE = 512;               // as CUDA's allocator

inline char* addresses = nullptr;
inline char* shadows = nullptr;
inline pid_t owner = 0;  // the process that used the device first

inline char* shadow_of(const void* pointer) { return shadows + (static_cast<const char*>(pointer) - addresses); }

/// Before anything else is done on a device. A forked child has no device, as with CUDA.
inline void open_device() {
  Locked locked(lock);
  if (addresses == nullptr) {
    const auto map = [](int access) {
      void* mapped = mmap(nullptr, ADDRESSES * DEVICES, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(mapped != MAP_FAILED, "no addresses for the memory of a device");
      madvise(mapped, ADDRESSES * DEVICES, MADV_DONTDUMP);
      return static_cast<char*>(mapped);
    };
    addresses = map(PROT_NONE), shadows = map(PROT_READ | PROT_WRITE), owner = getpid();
  }
  TORCH_CHECK(owner == getpid(), "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must ",
              "use the 'spawn' start method");
}

/// One piece of memory, whose last uses are known.
struct Block {
  size_t size;
  DeviceIndex device;
  int stream;  // on which it was allocated, and is allocated again without waiting
  bool is_used = true;
  int writer = -1;
  uint64_t written = 0;  // the writer's time
  std::string written_by = "";
  std::map<int, std::pair<uint64_t, std::string>> readers = {};  // by stream: the time, and what read
  std::set<int> recorded = {};                                   // streams that must be over when it is freed: record_stream
};
inline std::map<const char*, Block> blocks;

inline Block* block_of(const void* pointer) {
  auto next = blocks.upper_bound(static_cast<const char*>(pointer));
  if (pointer == nullptr || next == blocks.begin()) return nullptr;
  auto& [begin, block] = *--next;
  return static_cast<const char*>(pointer) < begin + block.size ? &block : nullptr;
}

inline void record_stream(const void* pointer, int stream) {
  Locked locked(lock);
  if (Block* block = block_of(pointer)) block->recorded.insert(stream);
}

struct Pool {
  size_t next = 0, capacity = CAPACITY;
  size_t allocated = 0, reserved = 0, peak_allocated = 0, peak_reserved = 0;
  int64_t allocations = 0, frees = 0;
  std::map<std::pair<int, size_t>, std::vector<char*>> free;       // by stream and size
  std::vector<std::pair<char*, std::map<int, uint64_t>>> waiting;  // for the times of streams
};
inline std::array<Pool, DEVICES> pools;

/// Let the memory of tensors that other streams used be allocated again, where the host knows that these uses are over.
inline void collect(Pool& pool) {
  std::erase_if(pool.waiting, [&](auto& pair) {
    auto& [pointer, times] = pair;
    for (auto [stream, time] : times)
      if (host_clock[stream] < time) return false;
    Block& block = blocks.at(pointer);
    block.readers.clear(), block.writer = -1;
    pool.free[{block.stream, block.size}].push_back(pointer);
    return true;
  });
}

inline void release_unused(Pool& pool) {
  for (auto& [key, pointers] : pool.free)
    for (char* pointer : pointers) pool.reserved -= key.second, blocks.erase(pointer);
  pool.free.clear();
}

void learn(const Clock& clock);

inline std::string as_text(size_t bytes) {
  char text[32];
  double size = double(bytes);
  snprintf(text, sizeof text, "%.2f %s", size / (bytes < GIBIBYTE ? 1 << 20 : GIBIBYTE), bytes < GIBIBYTE ? "MiB" : "GiB");
  return text;
}

/// Memory that a device has not given to anybody yet, of which nothing else is left.
inline char* reserve(Pool& pool, DeviceIndex index, int stream, size_t size) {
  if (pool.reserved + size > pool.capacity) {  // as CUDA does: wait for what other streams use, and give back the rest
    for (int i = 0; i < STREAMS_EACH; i++) learn(stream_clocks[index * STREAMS_EACH + i]);
    collect(pool), release_unused(pool);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, pool.reserved + size <= pool.capacity && pool.next + size <= ADDRESSES,
                   "CUDA out of memory. Tried to allocate ", as_text(size), ". GPU ", int(index), " has a total capacity of ",
                   as_text(pool.capacity), " of which ", as_text(pool.capacity - std::min(pool.reserved, pool.capacity)),
                   " is free.");
  char* pointer = addresses + index * ADDRESSES + pool.next;
  pool.next += size, pool.reserved += size, pool.peak_reserved = std::max(pool.peak_reserved, pool.reserved);
  blocks.emplace(pointer, Block{size, index, stream});
  return pointer;
}

inline void free_memory(void* pointer) {
  if (pointer == nullptr || owner != getpid()) return;
  Locked locked(lock);
  Block& block = blocks.at(static_cast<char*>(pointer));
  Pool& pool = pools[block.device];
  block.is_used = false, pool.allocated -= block.size, pool.frees++;
  if (block.recorded.empty()) {
    pool.free[{block.stream, block.size}].push_back(static_cast<char*>(pointer));
    return;
  }
  std::map<int, uint64_t> times;
  for (int stream : block.recorded) times[stream] = stream_clocks[stream][stream];
  block.recorded.clear(), pool.waiting.emplace_back(static_cast<char*>(pointer), std::move(times));
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    open_device();
    if (bytes == 0) return {nullptr, nullptr, &free_memory, device_of(-1)};
    Locked locked(lock);
    Pool& pool = pools[current_device];
    size_t size = (bytes + GRANULE - 1) / GRANULE * GRANULE;
    int stream = current_stream(-1);
    collect(pool);
    auto& free = pool.free[{stream, size}];
    char* pointer;
    if (free.empty()) {
      pointer = reserve(pool, current_device, stream, size);
    } else {
      pointer = free.back(), free.pop_back();
      blocks.at(pointer).is_used = true;
    }
    pool.allocated += size, pool.allocations++, pool.peak_allocated = std::max(pool.peak_allocated, pool.allocated);
    memset(shadow_of(pointer), 0xFF, size);  // NaN, or -1, where nobody has written
    return {pointer, pointer, &free_memory, device_of(-1)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(shadow_of(to), shadow_of(from), size); }
  bool initialized() override { return addresses != nullptr; }
  void emptyCache(c10::MempoolId_t) override {
    Locked locked(lock);
    for (Pool& pool : pools) collect(pool), release_unused(pool);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data.get(), stream.device_index() * STREAMS_EACH + int(stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    Locked locked(lock);
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const Pool& pool = pools[index];
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[all].current = int64_t(pool.allocated), stats.allocated_bytes[all].peak = int64_t(pool.peak_allocated);
    stats.reserved_bytes[all].current = int64_t(pool.reserved), stats.reserved_bytes[all].peak = int64_t(pool.peak_reserved);
    stats.allocation[all].allocated = pool.allocations, stats.allocation[all].freed = pool.frees;
    stats.allocation[all].current = pool.allocations - pool.frees;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex index) override {
    Locked locked(lock);
    Pool& pool = pools[index];
    pool.peak_allocated = pool.allocated, pool.peak_reserved = pool.reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    const Pool& pool = pools[index];
    return {pool.capacity - std::min(pool.reserved, pool.capacity), pool.capacity};
  }
};
inline Memory memory;

inline std::map<const char*, size_t> pinned_sizes;  // by the first byte

inline bool is_pinned(const void* pointer) {
  Locked locked(lock);
  auto next = pinned_sizes.upper_bound(static_cast<const char*>(pointer));
  if (next == pinned_sizes.begin()) return false;
  auto [begin, size] = *--next;
  return static_cast<const char*>(pointer) < begin + size;
}

struct PinnedMemory final : c10::Allocator {
  static void free_pinned(void* pointer) {
    if (pointer == nullptr) return;
    Locked locked(lock);
    pinned_sizes.erase(static_cast<char*>(pointer));
    free(pointer);
  }
  c10::DataPtr allocate(size_t bytes) override {
    open_device();
    constexpr size_t line = 64;
    void* pointer = bytes ? aligned_alloc(line, (bytes + line - 1) / line * line) : nullptr;
    Locked locked(lock);
    if (pointer != nullptr) pinned_sizes[static_cast<char*>(pointer)] = bytes;
    return {pointer, pointer, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
inline PinnedMemory pinned_memory;

}  // namespace stand_in

// What the other files share: which device it is, the streams and their clocks, and the books of what has happened.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace stand_in {

using c10::DeviceIndex;

// The same library is "cuda", if `as_cuda` is called before torch is imported, or else the device PrivateUse1.
inline c10::DeviceType device_type = c10::DeviceType::PrivateUse1;
inline c10::DispatchKey dispatch_key = c10::DispatchKey::PrivateUse1;

constexpr int DEVICES = 3;  // the third is for tests of three ranks
constexpr int SHOWN = 2;
constexpr int STREAMS_EACH = 16;
constexpr int STREAMS = DEVICES * STREAMS_EACH;

// One lock for everything: nothing here is to be fast. It is taken again by functions that need it themselves.
inline std::recursive_mutex lock;
using Locked = std::lock_guard<std::recursive_mutex>;

inline std::atomic<int> visible_devices{SHOWN};
inline thread_local DeviceIndex current_device = 0;
inline thread_local std::array<int, DEVICES> current_streams{};

inline c10::Device device_of(DeviceIndex index) { return {device_type, index < 0 ? current_device : index}; }

/// The number of a device's current stream among all streams.
inline int current_stream(DeviceIndex index) {
  index = device_of(index).index();
  return index * STREAMS_EACH + current_streams[index];
}

inline bool is_here(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == device_type; }

// ------------------------------------------------------------------------------------------------------------ what happened

struct Tally {
  int64_t number = 0, bytes = 0;
};
inline std::map<std::string, Tally> tallies;      // by kind: copies in each direction, waits, operators
inline std::map<std::string, int64_t> operators;  // by name
inline py::object* observer = nullptr;            // called with each kind, what it was about, and its bytes

inline void count(const char* kind, const std::string& about = "", int64_t bytes = 0) {
  {
    Locked locked(lock);
    Tally& tally = tallies[kind];
    tally.number++, tally.bytes += bytes;
  }
  if (observer != nullptr) {
    py::gil_scoped_acquire gil;
    (*observer)(kind, about, bytes);
  }
}

/// As of torch.cuda.set_sync_debug_mode.
enum SyncMode { IGNORE, WARN, RAISE };
inline SyncMode sync_mode = IGNORE;

/// The host is about to wait for the device.
inline void wait_begins(const std::string& reason) {
  TORCH_CHECK(sync_mode != RAISE, "called a synchronizing CUDA operation: ", reason);
  if (sync_mode == WARN) TORCH_WARN("called a synchronizing CUDA operation: ", reason);
}

inline std::vector<std::string> races;
inline bool races_raise = true;

inline void race(const std::string& text) {
  {
    Locked locked(lock);
    races.push_back(text);
  }
  TORCH_CHECK(!races_raise, "race: ", text);
}

// ------------------------------------------------------------------------------------------------------------------- clocks

/// For each stream the number of operations that are known to be over.
struct Clock {
  std::array<uint64_t, STREAMS> times{};
  uint64_t& operator[](int stream) { return times[stream]; }
  uint64_t operator[](int stream) const { return times[stream]; }
  void merge(const Clock& other) {
    for (int i = 0; i < STREAMS; i++) times[i] = std::max(times[i], other[i]);
  }
  bool includes(const Clock& other) const {
    for (int i = 0; i < STREAMS; i++)
      if (times[i] < other[i]) return false;
    return true;
  }
};

// What a stream's next operation comes after, and what the host has waited for.
inline std::array<Clock, STREAMS> stream_clocks;
inline Clock host_clock;

/// Begin an operation on a stream. It comes after all that the host has waited for.
inline void launch(int stream) {
  Locked locked(lock);
  stream_clocks[stream].merge(host_clock);
  stream_clocks[stream][stream]++;
  tallies["launch"].number++;
}

}  // namespace stand_in

// Asynchrony, as bookkeeping.
//
// Kernels run at once, in the order in which the process starts them. Which of them a GPU might have run at another time is
// known from clocks: of each stream, of each event, of the host, and of the last uses of each block of memory. An access that
// no event, wait or synchronisation puts after an earlier one of the same block is a race, whatever came first here.
//
// A copy into pinned memory that does not block arrives when the host has waited for it. Until then its destination has 0xAB
// in every byte. One out of pinned memory is compared then: the host must not have changed its source.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <optional>

#include "memory.h"

namespace stand_in {

/// A copy between pinned memory and a device that the host has not waited for.
struct LateCopy {
  int stream;
  uint64_t time;
  bool is_to_host;
  at::Tensor pinned;
  at::Tensor value;  // what will be there, or what was
};
inline std::vector<LateCopy> late_copies;

/// A tensor of the CPU with the sizes of another, over memory that it does not keep.
inline at::Tensor over(const at::Tensor& like, char* data) {
  auto options = at::TensorOptions().dtype(like.scalar_type()).device(at::kCPU);
  auto made = at::from_blob(data, like.sizes(), like.strides(), [](void*) {}, options, at::Device(at::kCPU));
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

inline at::Tensor over_pinned(const at::Tensor& tensor) { return over(tensor, static_cast<char*>(tensor.data_ptr())); }

/// The host has waited for everything up to a clock.
inline void learn(const Clock& clock) {
  std::vector<LateCopy> arrived;
  {
    Locked locked(lock);
    host_clock.merge(clock);
    auto is_over = [](const LateCopy& copy) { return host_clock[copy.stream] >= copy.time; };
    std::copy_if(late_copies.begin(), late_copies.end(), std::back_inserter(arrived), is_over);
    std::erase_if(late_copies, is_over);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  for (const LateCopy& copy : arrived) {
    auto pinned = over_pinned(copy.pinned);
    if (copy.is_to_host) {
      pinned.copy_(copy.value);
    } else if (memcmp(pinned.contiguous().data_ptr(), copy.value.data_ptr(), copy.value.nbytes()) != 0) {
      race("the host changed a pinned tensor of shape " + c10::str(pinned.sizes()) + " while it was copied to the device");
    }
  }
}

inline void learn_stream(int stream) {
  Clock clock;
  {
    Locked locked(lock);
    clock = stream_clocks[stream];
  }
  learn(clock);
}

/// Note that an operation of a stream uses a tensor, and whether something puts it after the uses before.
inline void use(const at::Tensor& tensor, int stream, bool writes, const std::string& by) {
  if (tensor.numel() == 0 || !tensor.has_storage()) return;
  std::string conflict;
  const auto describe = [&](const char* does, const std::string& before, const char* did, int stream_before) {
    conflict = c10::str(by, does, " on stream ", stream, " what ", before, did, " on stream ", stream_before,
                        ", and nothing puts it after that: shape ", tensor.sizes());
  };
  {
    Locked locked(lock);
    Block* block = block_of(tensor.storage().data());
    if (block == nullptr) return;
    const Clock& clock = stream_clocks[stream];
    if (block->writer >= 0 && clock[block->writer] < block->written)
      describe(writes ? " writes" : " reads", block->written_by, " wrote", block->writer);
    if (writes) {
      for (auto& [reader, last] : block->readers)
        if (clock[reader] < last.first) describe(" writes", last.second, " read", reader);
      block->readers.clear();
      block->writer = stream, block->written = clock[stream], block->written_by = by;
    } else {
      block->readers[stream] = {clock[stream], by};
    }
  }
  if (!conflict.empty()) race(conflict);
}

struct Event {
  Clock clock{};
  int unanswered = 0;  // how often it was asked whether it is over, and said no
  std::chrono::steady_clock::time_point time;
};

struct Streams final : c10::impl::DeviceGuardImplInterface {
  static int number(const c10::Stream& stream) { return stream.device_index() * STREAMS_EACH + int(stream.id()); }
  static c10::Stream stream_of(DeviceIndex index, int id) {
    return c10::Stream(c10::Stream::UNSAFE, device_of(index), id);
  }

  c10::DeviceType type() const override { return device_type; }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(visible_devices.load()); }
  c10::Device getDevice() const override { return device_of(-1); }
  void setDevice(c10::Device device) const override {
    if (device.index() < 0) return;
    TORCH_CHECK(device.index() < visible_devices, "invalid device ordinal ", int(device.index()), ": there are ",
                visible_devices.load());
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    DeviceIndex index = device_of(device.index()).index();
    return stream_of(index, current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device.index(), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::array<int, DEVICES> made{};
    Locked locked(lock);
    DeviceIndex index = device_of(device.index()).index();
    // As CUDA's pool, it begins again at its end. The first is the default one, the last that of collectives.
    return stream_of(index, 1 + made[index]++ % (STREAMS_EACH - 2));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = int(stream.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override {
    Locked locked(lock);
    int index = number(stream);
    return host_clock[index] >= stream_clocks[index][index];
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_begins("a stream is waited for"), count("synchronize_stream");
    learn_stream(number(stream));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    wait_begins("a device is waited for"), count("synchronize_device");
    for (int i = 0; i < STREAMS_EACH; i++) learn_stream(device_of(device).index() * STREAMS_EACH + i);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data.get(), number(stream));
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Locked locked(lock);
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {stream_clocks[number(stream)], 0, std::chrono::steady_clock::now()};
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    Locked locked(lock);
    if (event != nullptr) stream_clocks[number(stream)].merge(static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* given) const override {
    auto* event = static_cast<Event*>(given);
    if (event == nullptr) return true;
    // Nothing tells how long a GPU would take: the first answers are no, and a program that asks again goes on.
    if (!host_clock.includes(event->clock) && event->unanswered++ < 3) return false;
    learn(event->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    wait_begins("an event is waited for"), count("synchronize_event");
    learn(static_cast<Event*>(event)->clock);
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    auto between = static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time;
    return std::chrono::duration<double, std::milli>(between).count();
  }
};

}  // namespace stand_in

// What torch asks a device through its hooks.
#pragma once

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "generator.h"
#include "streams.h"
#include "tensors.h"

namespace stand_in {

template <class Interface>
struct Hooks : Interface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return visible_devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return addresses != nullptr; }
  void init() const override { open_device(); }
  DeviceIndex deviceCount() const override { return DeviceIndex(visible_devices.load()); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override { Streams().setDevice({device_type, index}); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Streams().exchangeDevice({device_type, index}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Device getDeviceFromPtr(void* pointer) const override {
    return device_of(DeviceIndex((static_cast<char*>(pointer) - addresses) / ADDRESSES));
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Random>(device_of(index).index());
  }
};

struct HooksOfCuda final : Hooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  DeviceIndex current_device() const override { return stand_in::current_device; }
  int getNumGPUs() const override { return visible_devices; }
  at::Allocator* getCUDADeviceAllocator() const override { return &memory; }
  void deviceSynchronize(DeviceIndex index) const override { Streams().synchronizeDevice(index); }
  std::string showConfig() const override { return "a stand-in for CUDA, which is not there"; }
};

struct HooksOfTwin final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override { resize_storage(storage, size); }
};

}  // namespace stand_in

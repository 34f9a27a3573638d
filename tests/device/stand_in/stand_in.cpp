// An accelerator that is not there, with two devices. See README.md.
#include <torch/library.h>

#include "device.h"
#include "memory.h"
#include "streams.h"
#include "generator.h"
#include "tensors.h"
#include "copies.h"
#include "operators.h"
#include "autocast.h"
#include "hooks.h"
#include "collectives.h"

namespace stand_in {

void register_kernels() {
  static torch::Library all(torch::Library::IMPL, "_", dispatch_key, __FILE__, __LINE__);
  static torch::Library aten(torch::Library::IMPL, "aten", dispatch_key, __FILE__, __LINE__);
  register_operators(all, aten);
  register_tensors(aten);
  register_copies(aten);
}

/// Once everything of torch is there.
void start() {
  if (device_type == c10::DeviceType::PrivateUse1) {
    register_kernels();
    register_autocast();
    at::RegisterPrivateUse1HooksInterface(new HooksOfTwin);
  }
  c10::SetAllocator(device_type, &memory, 255);
  static Streams streams;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(device_type)].store(&streams);
  register_timer();
}

/// What a test may have changed, as it is at the start. What was trained stays.
void reset() {
  Locked locked(lock);
  delete observer;
  observer = nullptr, sync_mode = IGNORE, races_raise = true, keeps_parameters = true, visible_devices = SHOWN;
  current_device = 0, current_streams = {};
  for (Pool& pool : pools) pool.capacity = CAPACITY;
}

std::map<std::string, std::pair<int64_t, int64_t>> tallied() {
  Locked locked(lock);
  std::map<std::string, std::pair<int64_t, int64_t>> all;
  for (auto& [kind, tally] : tallies) all[kind] = {tally.number, tally.bytes};
  return all;
}

std::vector<std::string> take_races() {
  if (addresses != nullptr && owner == getpid()) {  // also those of copies that nobody has waited for
    bool raises = std::exchange(races_raise, false);
    for (int i = 0; i < STREAMS; i++) learn_stream(i);
    races_raise = raises;
  }
  Locked locked(lock);
  return std::exchange(races, {});
}

/// The bytes and the device of each block that somebody keeps, and which operator wrote it last.
std::vector<std::tuple<int, size_t, std::string>> alive() {
  Locked locked(lock);
  std::vector<std::tuple<int, size_t, std::string>> all;
  for (auto& [pointer, block] : blocks)
    if (block.is_used) all.emplace_back(block.device, block.size, block.written_by);
  return all;
}

}  // namespace stand_in

/// Called before torch is imported, since torch looks for the hooks of CUDA while it is, and never again.
extern "C" void as_cuda() {
  using namespace stand_in;
  device_type = c10::DeviceType::CUDA, dispatch_key = c10::DispatchKey::CUDA;
  at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs) { return std::make_unique<HooksOfCuda>(); });
  register_kernels();
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace stand_in;
  start();
  m.def("reset", reset);
  m.def("open", open_device);
  m.def("is_open", [] { return addresses != nullptr; });
  m.def("owner", [] { return int(owner); });

  m.def("device_count", [] { return visible_devices.load(); });
  m.def("set_device_count", [](int count) { visible_devices = count; });
  m.def("get_device", [] { return int(current_device); });
  m.def("set_device", [](int index) { Streams().setDevice({device_type, DeviceIndex(index)}); });
  m.def("exchange_device", [](int index) {
    return int(Streams().exchangeDevice({device_type, DeviceIndex(index)}).index());
  });
  m.def("generator", [](int index) { return default_generator(DeviceIndex(index)); });
  m.def("launch", [] { open_device(), launch(current_stream(-1)); });

  m.def("tallies", tallied);
  m.def("operators", [] { return operators; });
  m.def("set_observer", [](py::object call) {
    delete observer;
    observer = call.is_none() ? nullptr : new py::object(std::move(call));
  });
  m.def("set_sync_mode", [](int mode) { sync_mode = SyncMode(mode); });
  m.def("sync_mode", [] { return int(sync_mode); });
  m.def("take_races", take_races);
  m.def("set_races_raise", [](bool yes) { races_raise = yes; });
  m.def("late_copies", [] { return late_copies.size(); });

  m.def("allocated", [](int index) { return pools[index].allocated; });
  m.def("peak_allocated", [](int index) { return pools[index].peak_allocated; });
  m.def("reserved", [](int index) { return pools[index].reserved; });
  m.def("peak_reserved", [](int index) { return pools[index].peak_reserved; });
  m.def("memory_info", [](int index) { return memory.getMemoryInfo(DeviceIndex(index)); });
  m.def("set_capacity", [](int index, size_t bytes) { pools[index].capacity = bytes; });
  m.def("alive", alive);
  m.def("resize_storage", [](const at::Storage& storage, size_t size) { resize_storage(storage, size); });
  m.def("set_keeps_parameters", [](bool yes) { keeps_parameters = yes; });
  m.def("read_byte", [](size_t address) { return int(*reinterpret_cast<volatile char*>(address)); });

  m.def("declare_collectives", [m]() mutable { declare_collectives(m); });
}

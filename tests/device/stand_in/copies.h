// Copies between the host and the devices. Each is counted, and is either a wait or late.
#pragma once

#include "tensors.h"

namespace stand_in {

inline std::string describe(const at::Tensor& tensor) { return c10::str(tensor.sizes(), " ", tensor.dtype()); }

inline void keep_late(int stream, bool is_to_host, const at::Tensor& pinned, at::Tensor value) {
  Locked locked(lock);
  late_copies.push_back({stream, stream_clocks[stream][stream], is_to_host, pinned, std::move(value)});
}

inline void copy_on_devices(at::Tensor& self, const at::Tensor& source, const at::Tensor& values, int64_t bytes) {
  int stream = current_stream(source.device().index()), to = current_stream(self.device().index());
  // As with CUDA, a copy to another device is after the work of both streams, and before what follows on either.
  const auto join = [&](int after, int before) {
    Locked locked(lock);
    stream_clocks[after].merge(stream_clocks[before]);
  };
  count(stream == to ? "on_device" : "between_devices", describe(self), bytes);
  join(stream, to);
  use(source, stream, false, "copy_"), use(self, stream, true, "copy_");
  on_host(self).copy_(on_host(values));
  join(to, stream);
}

inline void copy_to_device(at::Tensor& self, const at::Tensor& source, const at::Tensor& values, int64_t bytes, bool late) {
  int stream = current_stream(self.device().index());
  bool is_from_pinned = late && is_pinned(source.data_ptr());
  if (!late) wait_begins("a copy to the device");
  // From memory that is not pinned, the driver takes the bytes before it returns: the device is not waited for.
  count(is_from_pinned ? "to_device_late" : (late ? "to_device_unpinned" : "to_device"), describe(self), bytes);
  use(self, stream, true, "copy_");
  on_host(self).copy_(values);
  if (is_from_pinned) {
    keep_late(stream, false, source, over_pinned(source).contiguous().clone());
  } else if (!late) {
    learn_stream(stream);
  }
}

inline void copy_to_host(at::Tensor& self, const at::Tensor& source, const at::Tensor& values, int64_t bytes, bool late) {
  int stream = current_stream(source.device().index());
  bool is_to_pinned = late && is_pinned(self.data_ptr());
  if (!is_to_pinned) wait_begins("a copy to the host");
  count(is_to_pinned ? "to_host_late" : (late ? "to_host_unpinned" : "to_host"), describe(self), bytes);
  use(source, stream, false, "copy_");
  if (is_to_pinned) {
    auto pinned = over_pinned(self);
    if (pinned.is_non_overlapping_and_dense()) memset(pinned.data_ptr(), 0xAB, pinned.nbytes());
    keep_late(stream, true, self, on_host(values).to(self.scalar_type(), false, true));
  } else {
    self.copy_(on_host(values));
    learn_stream(stream);
  }
}

inline at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  open_device();
  c10::DeviceGuard guard(is_here(self) ? self.device() : source.device());
  auto values = source.expand_as(self);
  int64_t bytes = self.numel() * int64_t(source.itemsize());
  launch(current_stream((is_here(source) ? source : self).device().index()));
  at::AutoDispatchBelowADInplaceOrView below;
  if (!is_here(source)) {
    copy_to_device(self, source, values, bytes, non_blocking);
  } else if (!is_here(self)) {
    copy_to_host(self, source, values, bytes, non_blocking);
  } else {
    copy_on_devices(self, source, values, bytes);
  }
  return self;
}

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  return copy(const_cast<at::Tensor&>(to), self, non_blocking);
}

inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy(const_cast<at::Tensor&>(to), self, false);
}

/// What `item`, `float` and `if` ask for.
inline at::Scalar local_scalar_dense(const at::Tensor& self) {
  int stream = current_stream(self.device().index());
  wait_begins("a number is read"), count("number", describe(self), int64_t(self.itemsize()));
  launch(stream), use(self, stream, false, "item");
  learn_stream(stream);
  return at::_local_scalar_dense(on_host(self));
}

inline void register_copies(torch::Library& aten) {
  aten.impl("copy_", copy);
  aten.impl("_copy_from", copy_from);
  aten.impl("_copy_from_and_resize", copy_from_and_resize);
  aten.impl("_local_scalar_dense", local_scalar_dense);
}

}  // namespace stand_in

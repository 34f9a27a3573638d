// Tensors of the device: how they are made, and how their sizes and their memory change. Nothing is computed here.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "streams.h"

namespace stand_in {

/// The bytes of a tensor of the device, as a tensor of the CPU, on which its kernels can work.
inline at::Tensor on_host(const at::Tensor& tensor) {
  const void* data = tensor.storage().data();
  if (data == nullptr) return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  return over(tensor, shadow_of(data) + tensor.storage_offset() * int64_t(tensor.itemsize()));
}

/// The same, of which a kernel may ask for more bytes: it gets them elsewhere, and what it made is copied afterwards.
inline at::Tensor on_host_resizable(const at::Tensor& tensor) {
  char* data = shadow_of(tensor.storage().data()) + tensor.storage_offset() * int64_t(tensor.itemsize());
  size_t size = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  c10::DataPtr pointer(data, data, [](void*) {}, c10::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), size, std::move(pointer), c10::GetCPUAllocator(), true);
  c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return made;
}

inline c10::Device checked(std::optional<c10::Device> device) {
  auto found = device_of(device ? device->index() : -1);
  TORCH_CHECK(found.index() < visible_devices, "invalid device ordinal ", int(found.index()), ": there are ",
              visible_devices.load());
  return found;
}

inline at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                        std::optional<c10::Device> device, std::optional<bool> pin,
                        std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(checked(device));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(dispatch_key), c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                                std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(checked(device));
  c10::DispatchKeySet keys(dispatch_key);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

inline void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  auto data = memory.allocate(bytes);
  if (storage.data() != nullptr && bytes != 0)
    memcpy(shadow_of(data.get()), shadow_of(storage.data()), std::min(bytes, storage.nbytes()));
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

inline void resize_to(const at::Tensor& self, c10::IntArrayRef size, c10::OptionalIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  if (stride) {
    impl->set_sizes_and_strides(size, *stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  if (self.numel() == 0) return;
  size_t bytes =
      at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), size_t(self.storage_offset()));
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
}

inline const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  resize_to(self, size, std::nullopt);
  if (format && *format != c10::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

inline at::Tensor& set_part(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                            c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  resize_to(self, size, stride.data() == nullptr ? c10::OptionalIntArrayRef() : c10::OptionalIntArrayRef(stride));
  return self;
}

inline at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  int64_t length = int64_t(storage.nbytes() / self.itemsize());
  return set_part(self, std::move(storage), 0, {length}, {});
}

inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_part(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline at::Tensor& set_nothing(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  return set_part(self, {c10::Storage::use_byte_size_t(), 0, memory.allocate(0), &memory, true}, 0, {0}, {});
}

inline at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                             std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

inline void record_stream_of(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data(), Streams::number(stream));
}

// Torch says no for PrivateUse1, whereupon Module.to makes new parameters. "cuda" keeps them; a test may want either.
inline bool keeps_parameters = true;
inline bool has_compatible_shallow_copy_type(const at::Tensor&, const at::Tensor&) { return keeps_parameters; }

inline void register_tensors(torch::Library& aten) {
  aten.impl("empty.memory_format", empty);
  aten.impl("empty_strided", empty_strided);
  aten.impl("as_strided", as_strided);
  aten.impl("view", TORCH_FN(at::native::view));
  aten.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  aten.impl("unfold", TORCH_FN(at::native::unfold));
  aten.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  aten.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  aten.impl("resize_", resize_);
  aten.impl("set_.source_Storage_storage_offset", set_part);
  aten.impl("set_.source_Storage", set_storage);
  aten.impl("set_.source_Tensor", set_tensor);
  aten.impl("set_", set_nothing);
  aten.impl("record_stream", record_stream_of);
  if (dispatch_key == c10::DispatchKey::PrivateUse1)
    aten.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

}  // namespace stand_in

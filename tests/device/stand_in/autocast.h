// Autocasting of the twin. That of "cuda" is within torch.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace stand_in {

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT_BY_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

inline void register_autocast() {
  using namespace at::autocast;
  constexpr auto key = c10::DispatchKey::AutocastPrivateUse1;
  static torch::Library all(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  all.fallback(torch::CppFunction::makeFallthrough());
  static torch::Library m(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT_BY_DTYPE)
  AT_FORALL_PROMOTE(WIDEST)
}

#undef LOWER
#undef FLOAT
#undef FLOAT_BY_DTYPE
#undef WIDEST

}  // namespace stand_in

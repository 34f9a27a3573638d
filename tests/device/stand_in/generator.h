// Random numbers: a seed and an offset, 16 bytes of state, as CUDA's generators have.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include "memory.h"

namespace stand_in {

inline uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

struct Random final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit Random(DeviceIndex index) : GeneratorImpl(device_of(index), c10::DispatchKeySet(dispatch_key)) {}
  static c10::DeviceType device_type() { return stand_in::device_type; }

  uint64_t current_seed() const override { return seed_; }
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  uint64_t get_offset() const override { return offset_; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, c10::kByte);
    auto* data = static_cast<char*>(state.data_ptr());
    memcpy(data, &seed_, 8), memcpy(data + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    const auto* data = static_cast<const char*>(state.data());
    memcpy(&seed_, data, 8), memcpy(&offset_, data + 8, 8);
  }
  Random* clone_impl() const override {
    auto* made = new Random(device_.index());
    made->seed_ = seed_, made->offset_ = offset_;
    return made;
  }

  /// The generator of the CPU from which the next operator draws: other numbers than those of a CPU that has the same seed.
  at::Generator next() { return at::detail::createCPUGenerator(mix(seed_ + mix(offset_++))); }
};

inline const at::Generator& default_generator(DeviceIndex index) {
  static std::array<at::Generator, DEVICES> all = {at::make_generator<Random>(0), at::make_generator<Random>(1),
                                                     at::make_generator<Random>(2)};
  return all[device_of(index).index()];
}

}  // namespace stand_in

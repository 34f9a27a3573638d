// Operators: each is done by the CPU's kernel, on the memory behind the device's addresses.
//
// at::native::cpu_fallback would do for the results. It copies every argument, though, takes tensors of several devices, and
// draws random numbers from the CPU's generator, and so hides what these tests are for.
#pragma once

#include "copies.h"
#include "generator.h"

namespace stand_in {

using Names = std::set<std::string>;

/// Operators that take a tensor of the host beside those of the device.
inline const Names TAKE_BOTH = {"aten::index.Tensor",    "aten::index_put_",  "aten::_index_put_impl_", "aten::index.Tensor_out",
                                "aten::_foreach_copy_",  "aten::_fused_adam_", "aten::_fused_adamw_",   "aten::_fused_sgd_"};

/// Losses whose kernel of the CPU gives its output a shape of its own first, and warns.
inline const Names RESHAPE = {"aten::mse_loss.out", "aten::smooth_l1_loss.out"};

/// Operators of which CUDA's kernels wait for the device, though their schema does not tell.
inline const Names WAIT = {"aten::bincount", "aten::equal", "aten::linalg_inv_ex_"};

/// Operators of which CUDA has no deterministic kernel: from the documentation of torch.use_deterministic_algorithms.
inline const Names VARY = {
    "aten::histc", "aten::histc.out", "aten::kthvalue", "aten::kthvalue.values", "aten::median.dim",
    "aten::median.dim_values", "aten::put_", "aten::nll_loss2d_forward", "aten::_ctc_loss", "aten::_ctc_loss_backward",
    "aten::adaptive_max_pool2d_backward.grad_input", "aten::_adaptive_avg_pool2d_backward",
    "aten::upsample_bilinear2d_backward.grad_input", "aten::upsample_bicubic2d_backward.grad_input",
    "aten::reflection_pad1d_backward.grad_input", "aten::reflection_pad2d_backward",
    "aten::replication_pad1d_backward.grad_input", "aten::replication_pad2d_backward", "aten::grid_sampler_2d_backward",
    "aten::max_pool3d_with_indices_backward", "aten::avg_pool3d_backward.grad_input",
    "aten::fractional_max_pool2d_backward.grad_input", "aten::max_unpool2d", "aten::resize_"};

inline bool is_written(const c10::AliasInfo* alias) { return alias != nullptr && alias->isWrite(); }

/// A result of the CPU's kernel, moved to the device.
inline at::Tensor moved(const at::Tensor& made, c10::Device device, int stream, const std::string& by) {
  if (!made.defined() || !made.is_cpu()) return made;
  auto moved = made.is_non_overlapping_and_dense()
                   ? empty_strided(made.sizes(), made.strides(), made.scalar_type(), {}, device, {})
                   : empty(made.sizes(), made.scalar_type(), {}, device, {}, {});
  if (made.numel() != 0) on_host(moved).copy_(made), use(moved, stream, true, by);
  if (made.unsafeGetTensorImpl()->is_wrapped_number()) moved.unsafeGetTensorImpl()->set_wrapped_number(true);
  return moved;
}

/// One call of an operator that has no kernel of its own here.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), stack_(stack), schema_(op.schema()), name_(c10::toString(op.operator_name())),
        first_(stack.size() - schema_.arguments().size()), given_(stack.begin() + int64_t(first_), stack.end()) {}

  void run() {
    find_device();
    c10::OptionalDeviceGuard guard(device_);
    index_ = device_of(device_ ? device_->index() : -1).index(), stream_ = current_stream(index_);
    if (waits()) {
      wait_begins(name_), count("size", name_);
      learn_stream(stream_);
    }
    if (varies()) at::globalContext().alertNotDeterministic(name_);
    launch(stream_);
    {
      Locked locked(lock);
      operators[name_]++;
    }
    for (size_t i = 0; i < given_.size(); i++) convert_argument(i);
    compute();
    for (auto& [tensor, made] : resized_) take_over(tensor, made);
    return_results();
  }

 private:
  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const c10::FunctionSchema& schema_;
  std::string name_;
  size_t first_;
  std::vector<c10::IValue> given_;
  std::optional<c10::Device> device_;
  DeviceIndex index_ = 0;
  int stream_ = 0;
  bool has_mask_ = false, has_generator_ = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> resized_;  // outputs, and what the kernel writes instead

  template <class Visit>
  static void for_each_tensor(const c10::IValue& value, Visit visit) {
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector())
        if (tensor) visit(*tensor);
    }
  }

  void find_device() {
    for (const auto& value : given_) {
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        if (value.isOptionalTensorList() && tensor.defined())
          has_mask_ = has_mask_ || tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
        if (!is_here(tensor)) return;
        if (!device_) device_ = tensor.device();
        TORCH_CHECK(*device_ == tensor.device(), refusal(tensor.device()));
      });
    }
    for (const auto& value : given_)
      if (value.isDevice() && !device_) device_ = checked(value.toDevice());
  }

  std::string refusal(c10::Device second) const {
    return c10::str("Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ", second,
                    "! (", name_, ")");
  }

  bool waits() const {
    bool returns_number = std::any_of(schema_.returns().begin(), schema_.returns().end(), [](const c10::Argument& returned) {
      auto kind = returned.type()->kind();
      return kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
    });
    return returns_number || has_mask_ || op_.hasTag(at::Tag::dynamic_output_shape) ||
           op_.hasTag(at::Tag::data_dependent_output) || WAIT.count(name_);
  }

  bool varies() const {
    if (name_ == "aten::bincount") return given_[1].isTensor();
    if (name_.rfind("aten::cumsum", 0) == 0) return at::isFloatingType(given_[0].toTensor().scalar_type());
    return VARY.count(name_);
  }

  at::Tensor convert(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    if (!is_here(tensor)) {
      bool is_number = tensor.dim() == 0 && name_ != "aten::equal";
      bool is_allowed = is_number || !device_ || TAKE_BOTH.count(name_) || schema_.returns().empty();
      TORCH_CHECK(is_allowed || !tensor.is_cpu(), refusal(tensor.device()));
      return tensor;
    }
    use(tensor, stream_, writes, name_);
    bool is_out = writes && (tensor.numel() == 0 || name_.find("out") != std::string::npos);
    if (!is_out) return on_host(tensor);
    bool is_new = tensor.numel() == 0 || RESHAPE.count(name_);
    auto sizes = RESHAPE.count(name_) ? std::vector<int64_t>{0} : tensor.sizes().vec();
    auto instead = is_new ? at::empty(sizes, tensor.options().device(at::kCPU)) : on_host_resizable(tensor);
    resized_.emplace_back(tensor, instead);
    return instead;
  }

  void convert_argument(size_t i) {
    const auto& argument = schema_.arguments()[i];
    bool writes = is_written(argument.alias_info());
    auto& value = stack_[first_ + i];
    if (value.isTensor()) {
      value = convert(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor, writes));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional(convert(*tensor, writes)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    } else if (argument.type()->str().find("Generator") != std::string::npos) {
      at::Generator given = value.isNone() ? default_generator(index_) : value.toGenerator();
      TORCH_CHECK(given.device().type() == device_type, "Expected a '", c10::Device(device_type),
                  "' device type for generator but found '", given.device(), "'");
      std::lock_guard<std::mutex> guard(given.mutex());
      value = static_cast<Random*>(given.unsafeGetGeneratorImpl())->next(), has_generator_ = true;
    }
  }

  void compute() {
    const auto redispatch = [&] { op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_); };
    if (!op_.hasTag(at::Tag::nondeterministic_seeded) || has_generator_) return redispatch();
    // An operator without a generator among its arguments, such as dropout, draws from the CPU's default one. That has the
    // state of ours meanwhile, and its own again afterwards.
    struct Swapped {
      at::Generator generator = at::detail::getDefaultCPUGenerator();
      at::Tensor state = generator.get_state();
      ~Swapped() { generator.set_state(state); }
    } swapped;
    swapped.generator.set_state(static_cast<Random*>(default_generator(index_).unsafeGetGeneratorImpl())->next().get_state());
    redispatch();
  }

  void take_over(const at::Tensor& tensor, const at::Tensor& made) {
    if (tensor.numel() != 0 && made.sizes() == tensor.sizes()) {
      if (made.storage().data() != on_host(tensor).data_ptr()) on_host(tensor).copy_(made);
    } else if (made.numel() != 0 || made.sizes() != tensor.sizes()) {
      resize_to(tensor, made.sizes(), made.strides());
      if (made.numel() != 0) on_host(tensor).copy_(made);
      use(tensor, stream_, true, name_);
    }
  }

  void return_results() {
    const auto& returned = schema_.returns();
    const auto& arguments = schema_.arguments();
    const auto move = [&](const at::Tensor& tensor) {
      return device_ ? moved(tensor, *device_, stream_, name_) : tensor;
    };
    for (size_t i = 0; i < returned.size(); i++) {
      auto& value = stack_[stack_.size() - returned.size() + i];
      const auto* alias = returned[i].alias_info();
      TORCH_CHECK(alias == nullptr || alias->isWrite(), name_, " makes a view, and has no kernel here");
      if (alias != nullptr) {  // what was given is returned
        for (size_t j = 0; j < given_.size(); j++)
          if (arguments[j].alias_info() != nullptr && *arguments[j].alias_info() == *alias) value = given_[j];
      } else if (value.isTensor()) {
        value = move(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(move(tensor));
        value = list;
      }
    }
  }
};

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  open_device();
  Call(op, *stack).run();
}

// PrivateUse1 has operators of its own for convolutions, of which the CPU has no kernels.
inline at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                              c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                              c10::IntArrayRef output_padding, int64_t groups) {
  c10::DeviceGuard guard(x.device());
  int stream = current_stream(x.device().index());
  launch(stream), use(x, stream, false, "convolution"), use(weight, stream, false, "convolution");
  auto added = bias && bias->defined() ? std::optional(on_host(*bias)) : std::nullopt;
  auto made = at::convolution(on_host(x), on_host(weight), added, stride, padding, dilation, transposed, output_padding, groups);
  return moved(made, x.device(), stream, "convolution");
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight, c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  c10::DeviceGuard guard(x.device());
  int stream = current_stream(x.device().index());
  const char* name = "convolution_backward";
  launch(stream);
  for (const auto& tensor : {gradient, x, weight}) use(tensor, stream, false, name);
  std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [dx, dw, db] = at::convolution_backward(
      on_host(gradient), on_host(x), on_host(weight), mask[2] ? at::OptionalIntArrayRef(bias_sizes) : at::OptionalIntArrayRef(),
      stride, padding, dilation, transposed, output_padding, groups, mask);
  const auto move = [&](const at::Tensor& tensor) { return moved(tensor, x.device(), stream, name); };
  return {move(dx), move(dw), move(db)};
}

/// Attention in terms of other operators: 0 is SDPBackend::math.
inline int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                double, bool, std::optional<double>, bool) {
  return 0;
}

inline void register_operators(torch::Library& all, torch::Library& aten) {
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  aten.impl("convolution_overrideable", convolution);
  aten.impl("convolution_backward_overrideable", convolution_backward);
  aten.impl("_fused_sdp_choice", choose_attention);
}

}  // namespace stand_in

// Collectives of the device, in place of NCCL: those of gloo, on the memory behind the device's addresses.
//
// They are on a stream of their own, after what the caller's stream does; `wait` puts them before what it does next. Gloo is
// waited for at once, but for `send` and `recv`, of which the other side may come later.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "streams.h"
#include "tensors.h"

namespace stand_in {

using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;
using c10d::OpType;

inline int stream_of_collectives(DeviceIndex index) { return (index + 1) * STREAMS_EACH - 1; }

class Exchange final : public c10d::Work {
 public:
  Exchange(int rank, OpType type, DeviceIndex index, Tensors outputs, WorkPointer inner)
      : Work(rank, type), index_(index), outputs_(std::move(outputs)), inner_(std::move(inner)) {
    Locked locked(lock);
    end_ = stream_clocks[stream_of_collectives(index)];
  }
  bool isCompleted() override { return !inner_ || inner_->isCompleted(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (inner_) {
      py::gil_scoped_release released;
      inner_->wait(timeout);
    }
    Locked locked(lock);
    stream_clocks[current_stream(index_)].merge(end_);
    return true;
  }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto type = c10::ListType::create(c10::TensorType::get());
    auto future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{device_of(index_)});
    c10::StreamGuard guard(Streams::stream_of(index_, STREAMS_EACH - 1));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  DeviceIndex index_;
  Tensors outputs_;
  WorkPointer inner_;
  Clock end_;
};

inline Tensors on_host(const Tensors& tensors) {
  Tensors made;
  for (const auto& tensor : tensors) made.push_back(on_host(tensor));
  return made;
}

inline std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> made;
  for (const auto& list : lists) made.push_back(on_host(list));
  return made;
}

inline Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

class Collectives final : public c10d::Backend {
 public:
  Collectives(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : Backend(rank, size), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "nccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number_; }
  void eagerConnectSingleDevice(at::Device) override {}
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run(OpType::BROADCAST, "broadcast", {}, tensors, [&] {
      auto all = on_host(tensors);
      return gloo_->broadcast(all, options);
    });
  }
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run(OpType::ALLREDUCE, "allreduce", {}, tensors, [&] { return reduce_all(on_host(tensors), options.reduceOp); });
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return run(OpType::ALLREDUCE_COALESCED, "allreduce_coalesced", {}, tensors,
               [&] { return reduce_all(on_host(tensors), options.reduceOp); });
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run(OpType::REDUCE, "reduce", {}, tensors, [&] {
      auto all = on_host(tensors);
      return gloo_->reduce(all, options);
    });
  }
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(OpType::ALLGATHER, "allgather", inputs, flat(outputs), [&] {
      auto to = on_host(outputs);
      auto from = on_host(inputs);
      return gloo_->allgather(to, from, options);
    });
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return run(OpType::_ALLGATHER_BASE, "_allgather_base", {input}, {output}, [&] { return gather_all(output, input, options); });
  }
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) override {
    return run(OpType::COALESCED, "allgather_into_tensor_coalesced", inputs, outputs, [&] {
      for (size_t i = 0; i < outputs.size(); i++) gather_all(outputs[i], inputs[i], options)->wait();
      return WorkPointer();
    });
  }
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return run(OpType::GATHER, "gather", inputs, flat(outputs), [&] {
      auto to = on_host(outputs);
      auto from = on_host(inputs);
      return gloo_->gather(to, from, options);
    });
  }
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return run(OpType::SCATTER, "scatter", flat(inputs), outputs, [&] {
      auto to = on_host(outputs);
      auto from = on_host(inputs);
      return gloo_->scatter(to, from, options);
    });
  }
  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ReduceScatterOptions& options) override {
    return run(OpType::REDUCE_SCATTER, "reduce_scatter", flat(inputs), outputs, [&] {
      Tensors rows;
      for (auto& tensor : on_host(inputs[0])) rows.push_back(tensor.reshape(-1));
      return scatter_sum(outputs[0], at::cat(rows), options.reduceOp);
    });
  }
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override {
    return run(OpType::_REDUCE_SCATTER_BASE, "_reduce_scatter_base", {input}, {output},
               [&] { return scatter_sum(output, on_host(input), options.reduceOp); });
  }
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& options) override {
    return run(OpType::COALESCED, "reduce_scatter_tensor_coalesced", inputs, outputs, [&] {
      for (size_t i = 0; i < outputs.size(); i++) scatter_sum(outputs[i], on_host(inputs[i]), options.reduceOp);
      return WorkPointer();
    });
  }
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                            std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    return run(OpType::ALLTOALL_BASE, "alltoall_base", {input}, {output}, [&] {
      auto to = on_host(output), from = on_host(input);
      return gloo_->alltoall_base(to, from, output_sizes, input_sizes, options);
    });
  }
  WorkPointer send(Tensors& tensors, int to, int tag) override {
    const auto call = [&] {
      auto all = on_host(tensors);
      return gloo_->send(all, to, tag);
    };
    return run(OpType::SEND, "send", tensors, {}, call, /*is_later=*/true);
  }
  WorkPointer recv(Tensors& tensors, int from, int tag) override {
    const auto call = [&] {
      auto all = on_host(tensors);
      return gloo_->recv(all, from, tag);
    };
    return run(OpType::RECV, "recv", {}, tensors, call, /*is_later=*/true);
  }
  WorkPointer barrier(const c10d::BarrierOptions&) override {
    Tensors flag{at::zeros({1}, at::TensorOptions().device(device_of(-1)))};
    return allreduce(flag, {});
  }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  uint64_t number_ = 0;

  template <class Function>
  WorkPointer run(OpType type, const char* name, const Tensors& read, const Tensors& written, Function function,
                  bool is_later = false) {
    const auto& any = written.empty() ? read : written;
    TORCH_CHECK(!any.empty(), name, " of no tensors");
    for (const auto& list : {read, written})
      for (const auto& tensor : list) TORCH_CHECK(is_here(tensor), "No backend type associated with device type cpu");
    DeviceIndex index = any[0].device().index();
    int stream = stream_of_collectives(index);
    {
      Locked locked(lock);
      stream_clocks[stream].merge(stream_clocks[current_stream(index)]);
    }
    launch(stream), count("collective", name);
    for (const auto& tensor : read) use(tensor, stream, false, name);
    for (const auto& tensor : written) use(tensor, stream, true, name);
    number_++;
    at::AutoDispatchBelowADInplaceOrView below;
    WorkPointer inner = function();
    if (!is_later && inner) {
      inner->wait();
      inner.reset();
    }
    return c10::make_intrusive<Exchange>(getRank(), type, index, written, inner);
  }

  WorkPointer gather_all(const at::Tensor& output, const at::Tensor& input, const c10d::AllgatherOptions& options) {
    auto to = on_host(output), from = on_host(input).clone();  // the input may be a part of the output
    return gloo_->_allgather_base(to, from, options);
  }

  /// As NCCL does it, with means, of which gloo has none, and of tensors of any strides.
  WorkPointer reduce_all(Tensors tensors, const c10d::ReduceOp& op) {
    bool is_mean = op == c10d::ReduceOp::AVG;
    for (auto& tensor : tensors) {
      c10d::AllreduceOptions options;
      options.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
      Tensors dense{tensor.contiguous()};
      gloo_->allreduce(dense, options)->wait();
      if (is_mean) dense[0].div_(getSize());
      if (!dense[0].is_same(tensor)) tensor.copy_(dense[0]);
    }
    return {};
  }

  WorkPointer scatter_sum(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) {
    auto sum = input.contiguous().clone();
    reduce_all({sum}, op);
    on_host(output).copy_(sum.reshape(-1).chunk(getSize())[getRank()].view_as(output));
    return {};
  }
};

/// DistributedDataParallel takes the time of its steps, by one of these.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to && *to >= *from ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};

inline void register_timer() {
  c10d::TimerRegistry()->Register(device_type, [](c10::Device device) { return std::make_unique<Timer>(device); });
}

inline void declare_collectives(py::module& m) {
  py::module::import("torch._C._distributed_c10d");
  py::class_<Collectives, c10::intrusive_ptr<Collectives>, c10d::Backend>(m, "Collectives")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, int, int>())
      .def("_set_sequence_number_for_group", [](Collectives&) {});
}

}  // namespace stand_in

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "cuda/launch.h"
#include "cuda/packet.h"

// Ops that write one buffer as a function of others, element by element.
namespace pyparallel::cuda {

template <typename Inputs, typename Scalars>
__global__ void scalars_kernel(Inputs inputs, Scalars* scalars) {
  *scalars = inputs.scalars();
}

template <int COUNT>
struct MapStreams {
  Stream in[COUNT], out;
};

// out[i] = element(scalars, in, i), with the scalars passed as kernel arguments or, if some of
// their inputs are on the device, read from there. The launch bounds request two blocks of 512
// threads per multiprocessor: by default ptxas aims at three, and spills.
template <typename Shape, typename Element, typename Scalars, int COUNT>
__global__ void __launch_bounds__(Shape::kThreads, 1024 / Shape::kThreads)
    map_kernel(Element element, Scalars on_host, const Scalars* on_device, int64_t numel,
               bool aligned, MapStreams<COUNT> streams) {
  const Place<Shape> place = place_of_thread<Shape>(numel, aligned);
  const Scalars scalars = on_device ? *on_device : on_host;
  Packet<Shape> packets[COUNT];
  in_one_branch(place, [&](const Place<Shape>& place) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) packets[k] = load_packet(streams.in[k], place);
  });
  float values[COUNT][Shape::kEach];
#pragma unroll
  for (int k = 0; k < COUNT; ++k) unpack(packets[k], streams.in[k].dtype, values[k]);
  float result[Shape::kEach];
#pragma unroll
  for (int i = 0; i < Shape::kEach; ++i) result[i] = element(scalars, values, i);
  store_together(pack<Shape>(result, streams.out.dtype), streams.out, place);
}

// One launch, preceded by one of a single thread if a scalar is on the device.
template <typename Element, typename Inputs, typename... In>
void launch_map(const Element& element, const Inputs& inputs, const Tensor& out, const In&... in) {
  using Scalars = decltype(inputs.scalars());
  if (out.numel() == 0) return;
  const cudaStream_t stream = current_stream(out);
  const MapStreams<sizeof...(In)> streams{{Stream(in)...}, Stream(out)};
  const bool aligned = is_aligned(out.data_ptr()) && (is_aligned(in.data_ptr()) && ...);
  Scalars on_host{};
  Scalars* on_device = nullptr;
  Tensor scratch;  // freed at the end, for later work of this stream alone
  if (inputs.any_on_device()) {
    scratch = torch::stable::new_empty(out, {int64_t{sizeof(Scalars)}}, ScalarType::Byte);
    on_device = static_cast<Scalars*>(scratch.mutable_data_ptr());
    launch(scalars_kernel<Inputs, Scalars>, 1, 1, stream, inputs, on_device);
  } else {
    on_host = inputs.scalars();
  }
  launch(map_kernel<DefaultTile, Element, Scalars, static_cast<int>(sizeof...(In))>,
         num_blocks(out.numel()), kThreads, stream, element, on_host, on_device, out.numel(),
         aligned, streams);
}

}  // namespace pyparallel::cuda

// Times every kernel of variants.h on the current GPU, and prints a row for each as CSV.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#include "variants.h"

namespace pyparallel::tiles {
namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "sweep: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// Positive and close to one: valid as parameters, second moments and masses alike.
__global__ void fill_kernel(uint32_t* words, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const uint32_t bits = static_cast<uint32_t>(i) * 2654435761u;
  if (i < count) words[i] = 0x3f803f80u | (bits & 0x007f0000u) | (bits >> 8 & 0x7fu);
}

struct Variant {
  const char *op, *name;
  int threads, each, run, num_bytes;  // bytes of an element
  std::function<void()> launch;
  std::vector<float> milliseconds;
};

float time(const std::function<void()>& launch, int repeats) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  check(cudaEventRecord(begin));
  for (int i = 0; i < repeats; ++i) launch();
  check(cudaEventRecord(end));
  check(cudaEventSynchronize(end));
  float elapsed = 0;
  check(cudaEventElapsedTime(&elapsed, begin, end));
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  return elapsed / repeats;
}

std::vector<Variant> variants(const Buffers& buffers) {
  std::vector<Variant> all;
  for_each_tile([&](auto tile) {
    using Shape = decltype(tile);
    for_each_kernel<Shape>([&](const char* op, const char* name, auto kernel) {
      const auto launch = [buffers] {
        decltype(kernel)::run(buffers, [&](auto function, const auto&... arguments) {
          const auto blocks = static_cast<unsigned>(num_blocks<Shape>(buffers.numel));
          function<<<blocks, Shape::kThreads>>>(arguments...);
          check(cudaGetLastError());
        });
      };
      all.push_back({op, name, Shape::kThreads, Shape::kEach, Shape::kRun, kernel.kBytes, launch});
    });
  });
  all.push_back({"copy", "float32", 0, 0, 0, 8, [buffers] {
                   check(cudaMemcpyAsync(buffers.at[1], buffers.at[0], buffers.numel * 4,
                                         cudaMemcpyDeviceToDevice));
                 }});
  return all;
}

float quantile(std::vector<float> times, double share) {
  std::sort(times.begin(), times.end());
  return times[static_cast<size_t>(share * static_cast<double>(times.size() - 1) + 0.5)];
}

void sweep(int64_t numel, int turns) {
  Buffers buffers{};
  buffers.numel = numel;
  for (void*& buffer : buffers.at) {
    check(cudaMalloc(&buffer, numel * 4));
    fill_kernel<<<static_cast<unsigned>((numel + 511) / 512), 512>>>(static_cast<uint32_t*>(buffer),
                                                                     numel);
  }
  const double masses[2] = {1, 1};
  check(cudaMalloc(&buffers.mass, sizeof masses));
  check(cudaMemcpy(buffers.mass, masses, sizeof masses, cudaMemcpyHostToDevice));

  std::vector<Variant> all = variants(buffers);
  std::mt19937 random(0);
  std::vector<int> order(all.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  const int repeats = static_cast<int>(std::max(int64_t{1}, (int64_t{1} << 28) / numel));
  for (int turn = 0; turn < turns + 2; ++turn) {  // the first two warm up
    std::shuffle(order.begin(), order.end(), random);
    for (const int i : order) {
      const float elapsed = time(all[i].launch, repeats);
      if (turn >= 2) all[i].milliseconds.push_back(elapsed);
    }
  }

  const double copied = 8 / quantile(all.back().milliseconds, 0.5);
  for (const Variant& each : all) {
    const double median = quantile(each.milliseconds, 0.5);
    std::printf("%s,\"%s\",%d,%d,%d,%lld,%.4f,%.4f,%.4f,%.2f,%.3f\n", each.op, each.name,
                each.threads, each.each, each.run, static_cast<long long>(numel), median,
                quantile(each.milliseconds, 0.2), quantile(each.milliseconds, 0.8),
                each.num_bytes * static_cast<double>(numel) / median / 1e6,
                each.num_bytes / median / copied);
  }
}

}  // namespace
}  // namespace pyparallel::tiles

int main(int num_arguments, char** arguments) {
  if (num_arguments != 3) {
    std::fprintf(stderr, "usage: sweep NUMEL TURNS\n");
    return 2;
  }
  pyparallel::tiles::sweep(std::atoll(arguments[1]), std::atoi(arguments[2]));
}

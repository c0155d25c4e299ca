"""Where the last block has idle warps, the amax is an earlier launch's without the patch only."""

from patches.proof import Proof

RUNS_IN = "cpu"
EMULATED = (
    "the kernel, its loads and stores and its reduction are upstream's own text, compiled for the CPU; a GPU of one "
    "multiprocessor is emulated with a thread of the CPU for each of its own, FP8 with rounded float32, and the recipe "
    "with 448 / amax"
)

# Two launches of the kernel on one multiprocessor, each with its own amax: all 512 threads have a vector in the first,
# `threads` of them in the second, whose values are a millionth of the first's. Nothing clears shared memory between
# them, as on a GPU. Prints the amax of each, and how many outputs of the second are 0 when it runs again with the scale
# that its amax gives.
KERNEL = """
import os, subprocess

def text(file, first, last):
    with open("transformer_engine/common/" + file) as header:
        whole = header.read()
    start = whole.rindex("template <", 0, whole.index(first))
    return whole[start : whole.index(last, whole.index(first))]

program = r'''
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __forceinline__
#define __launch_bounds__(threads)
#define __shared__ static
#define __builtin_assume(condition)

constexpr int THREADS_PER_WARP = 32, BLOCK = 512;
thread_local struct { size_t x; } threadIdx;
struct { size_t x; } blockIdx = {0}, blockDim = {BLOCK}, gridDim = {1};

std::unique_ptr<std::barrier<>> block, warps[BLOCK / THREADS_PER_WARP];
float lanes[BLOCK];
std::mutex atomics;

void __syncthreads() { block->arrive_and_wait(); }

float __shfl_down_sync(unsigned, float value, int delta) {
  auto& warp = *warps[threadIdx.x / THREADS_PER_WARP];
  lanes[threadIdx.x] = value;
  warp.arrive_and_wait();
  const size_t from = threadIdx.x + delta;
  if (from / THREADS_PER_WARP == threadIdx.x / THREADS_PER_WARP) value = lanes[from];
  warp.arrive_and_wait();
  return value;
}

void atomicMaxFloat(float* to, float value) {
  std::lock_guard<std::mutex> guard(atomics);
  *to = std::max(*to, value);
}

struct fp8 {  // E4M3: a sign, 4 bits of exponent, 3 of mantissa
  float value;
  explicit fp8(float exact = 0) {
    const float step = std::ldexp(1.0f, std::max(exact == 0 ? -6 : std::ilogb(exact), -6) - 3);
    value = std::clamp(std::nearbyint(exact / step) * step, -448.0f, 448.0f);
  }
};
template <typename T> struct is_fp8 : std::is_same<T, fp8> {};
namespace transformer_engine {
template <int bytes> struct BytesToType { static_assert(bytes == 4); using Type = uint32_t; };
}
struct Empty {};
float identity(const float value, const Empty&) { return value; }

REDUCTION
VECTORS
KERNEL

float launch(const std::vector<float>& input, std::vector<fp8>& output, float scale) {
  float amax = 0;
  block = std::make_unique<std::barrier<>>(BLOCK);
  for (auto& warp : warps) warp = std::make_unique<std::barrier<>>(THREADS_PER_WARP);
  std::vector<std::thread> threads;
  for (size_t id = 0; id < BLOCK; ++id)
    threads.emplace_back([&, id] {
      threadIdx.x = id;
      gated_act_kernel<1, true, float, Empty, identity>(
          input.data(), output.data(), &scale, &amax, 1, output.size(), Empty{}, output.size());
      warps[id / THREADS_PER_WARP]->arrive_and_drop();  // a barrier waits no more for a thread that is done
      block->arrive_and_drop();
    });
  for (auto& thread : threads) thread.join();
  return amax;
}

int main() {
  for (size_t threads : {512, 256}) {
    std::vector<float> large(2 * BLOCK, 1000), small(2 * threads, 1);
    std::vector<fp8> output(BLOCK), outputs(threads);
    const float first = launch(large, output, 1), second = launch(small, outputs, 1);
    launch(small, outputs, 448 / second);
    const auto zeros = std::count_if(outputs.begin(), outputs.end(), [](fp8 output) { return output.value == 0; });
    std::printf("%zu of 512 threads: amax %g, then %g; with its scale %zu outputs are 0\\n",
                threads, first, second, size_t(zeros));
  }
}
'''
pieces = {
    "REDUCTION": text("utils.cuh", "float warp_reduce_max(", "// Works only on positive values"),
    "VECTORS": text("util/vectorized_pointwise.h", "class VectorizedStorage", "template <int nvec, bool aligned,"),
}
pieces["KERNEL"] = text("util/vectorized_pointwise.h", "void gated_act_kernel(", "\\n}\\n") + "\\n}\\n"
for name, piece in pieces.items():
    program = program.replace("\\n" + name + "\\n", "\\n" + piece + "\\n")
with open(os.environ["TMPDIR"] + "/kernel.cpp", "w") as file:
    file.write(program)
subprocess.run(["g++", "-std=c++20", "-pthread", file.name, "-o", file.name[:-4]], check=True)
subprocess.run([file.name[:-4]], check=True)
"""


def test_idle_warps_have_no_part_in_the_amax_with_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(KERNEL)
    line = "{} of 512 threads: amax 1e+06, then {}; with its scale {} outputs are 0"
    full = line.format(512, 1, 0)
    assert pristine.stdout.splitlines() == [full, line.format(256, "1e+06", 256)], pristine.stderr
    assert patched.stdout.splitlines() == [full, line.format(256, 1, 0)], patched.stderr

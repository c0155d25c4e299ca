"""Where warps of the last block have no vector, the amax is what lay in shared memory without the patch only."""

from patches.proof import Proof

RUNS_IN = "cpu"
EMULATED = "the kernel's own text is compiled for the CPU, where a block's threads run one after another"

# Prints the amax for 160 rows of as many vectors that all blocks are full, and that half of the last one is idle. The
# largest value is the last. Each block runs twice: its threads leave their maxima in shared memory, then take them.
KERNEL = """
import os, subprocess

with open("transformer_engine/common/util/vectorized_pointwise.h") as header:
    text = header.read()
name = text.index("void gated_act_kernel(")
kernel = text[text.rindex("template <", 0, name) : text.index("\\n}\\n", name) + 3]

program = r'''
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <type_traits>
#include <vector>

#define __global__
#define __launch_bounds__(threads)
#define __builtin_assume(condition)

constexpr int unary_kernel_threads = 512, THREADS_PER_WARP = 32;
constexpr float GARBAGE = 1e30f;
struct { size_t x; } threadIdx, blockIdx, blockDim = {unary_kernel_threads}, gridDim;
float staging[unary_kernel_threads / THREADS_PER_WARP];
bool staged;

struct fp8 {
  float value;
  explicit fp8(float value = 0) : value(value) {}
};
template <typename T> struct is_fp8 : std::is_same<T, fp8> {};
struct Empty {};
float identity(const float value, const Empty&) { return value; }

template <typename T, int nvec, bool aligned> struct VectorizedLoader {
  const T* from;
  const T* vector;
  VectorizedLoader(const T* from, size_t) : from(from) {}
  void load(size_t id, size_t) { vector = from + id * nvec; }
  const T* separate() { return vector; }
};

template <typename T, int nvec, bool aligned> struct VectorizedStorer {
  T* to;
  T vector[nvec];
  VectorizedStorer(T* to, size_t) : to(to) {}
  T* separate() { return vector; }
  void store(size_t id, size_t) { std::copy_n(vector, nvec, to + id * nvec); }
};

template <int warps> float reduce_max(float max, int warp) {
  if (staged) return *std::max_element(staging, staging + warps);
  staging[warp] = staging[warp] == GARBAGE ? max : std::max(staging[warp], max);
  return 0;
}

void atomicMaxFloat(float* to, float value) { *to = std::max(*to, value); }

KERNEL

int main() {
  constexpr size_t rows = 160;
  for (size_t n : {16, 24}) {
    std::vector<float> input(rows * n * 2, 1);
    std::vector<fp8> output(rows * n);
    input.back() = 3;
    float scale = 1, amax = 0;
    gridDim.x = (rows * n + blockDim.x - 1) / blockDim.x;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
      std::fill(std::begin(staging), std::end(staging), GARBAGE);
      for (bool second : {false, true}) {
        staged = second;
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
          gated_act_kernel<1, true, float, Empty, identity>(
              input.data(), output.data(), &scale, &amax, rows, n, Empty{}, n);
      }
    }
    std::printf("%zu vectors: amax %g, last output %g\\n", rows * n, amax, output.back().value);
  }
}
'''
with open(os.environ["TMPDIR"] + "/kernel.cpp", "w") as file:
    file.write(program.replace("KERNEL", kernel))
subprocess.run(["g++", "-std=c++17", file.name, "-o", file.name[:-4]], check=True)
subprocess.run([file.name[:-4]], check=True)
"""


def test_idle_warps_have_no_part_in_the_amax_with_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(KERNEL)
    full, idle = "2560 vectors: amax 3, last output 3", "3840 vectors: amax {}, last output 3"
    assert pristine.stdout.splitlines() == [full, idle.format("1e+30")], pristine.stderr
    assert patched.stdout.splitlines() == [full, idle.format("3")], patched.stderr

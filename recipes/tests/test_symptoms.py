"""Error texts are explained: each row of symptoms.toml by its example, several causes in order, and none wrongly."""

from __future__ import annotations

import re

import pytest

from recipes.catalogue import symptoms
from recipes.catalogue.load import Catalogue
from recipes.catalogue.schema import Symptom
from recipes.files import ROOT
from recipes.tests.conftest import Checkout

ROWS = symptoms.read(ROOT)
OWN = [row for row in ROWS if row.pattern != row.example]


def test_there_are_many() -> None:
    assert len(OWN) >= 60


@pytest.mark.parametrize("row", OWN, ids=lambda row: f"{row.pattern}-{row.thread.rpartition('/')[2]}")
def test_the_example_of_a_row_leads_to_it(row: Symptom) -> None:
    """In a longer text too; only rows with the same pattern come before."""
    causes = symptoms.diagnoses(ROWS, f"compiling\n{row.example}\nmake: *** [all] Error 1\n")
    alike = [other.thread for other in ROWS if other.pattern == row.pattern]
    assert [cause.thread for cause in causes] == alike
    assert not any(re.search(r"\{(\d|package)\}", cause.cause + cause.fix) for cause in causes)


DENIED = "PermissionError: [Errno 13] Permission denied: '/data/out'"


def test_a_general_row_speaks_only_where_no_other_does() -> None:
    """Whatever the order of the lines: a more telling one is the cause, and the general one beside it would mislead."""
    (alone,) = symptoms.diagnoses(ROWS, DENIED)
    assert alone.thread.endswith("datasets/issues/7900") and "/tmp" not in alone.fix
    full = "OSError: [Errno 28] No space left on device"
    for text in (f"{DENIED}\n{full}", f"{full}\n{DENIED}"):
        assert [cause.line for cause in symptoms.diagnoses(ROWS, text)] == [full]


HEADERS = {
    "gcc": "x.cpp:1:10: fatal error: cudnn.h: No such file or directory",
    "clang": "x.cpp:1:10: fatal error: 'cudnn.h' file not found",
    "nvcc": 'x.cu(1): catastrophic error: cannot open source file "cudnn.h"',
}


@pytest.mark.parametrize("compiler", HEADERS)
def test_a_missing_header_is_named_whole(compiler: str) -> None:
    (cause,) = symptoms.diagnoses(ROWS, HEADERS[compiler].replace("cudnn.h", "some/other.h"))
    assert " some/other.h:" in cause.cause


@pytest.mark.parametrize("compiler", HEADERS)
def test_a_header_that_is_not_found_is_known_in_the_words_of_each_compiler(compiler: str) -> None:
    (cause,) = symptoms.diagnoses(ROWS, HEADERS[compiler])
    assert cause.cause == "the headers of cuDNN are not where the compiler looks"


CODES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "CUDA out of memory",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "no kernel image is available for execution on the device",
    "cudaErrorUnsupportedPtxVersion": "the provided PTX was compiled with an unsupported toolchain",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "system has unsupported display driver / cuda driver combination",
    "CUDA_ERROR_SYSTEM_NOT_READY": "system not yet initialized",
    "cudaErrorAssert": "CUDA error: device-side assert triggered",
}


@pytest.mark.parametrize("code", CODES)
def test_the_name_of_an_error_of_cuda_means_what_its_text_means(code: str) -> None:
    by_name, by_text = (symptoms.diagnoses(ROWS, text)[0].cause for text in (f"call failed: {code}", CODES[code]))
    assert by_name == by_text


SHARED = {
    "from torch._six import string_classes\nModuleNotFoundError: No module named 'torch._six'": ("apex", "1724"),
    "ModuleNotFoundError: No module named 'amp_C'": ("apex", "1764"),
    "RuntimeError: Numpy is not available": ("torch", "132179"),
    "ImportError: cannot import name 'packaging' from 'pkg_resources' (x)": ("torch", "4385"),
    "error: cannot convert ‘const at::DeprecatedTypeProperties’ to ‘c10::ScalarType’": ("apex", "1897"),
    "cannot import name 'log' from 'torch.distributed.elastic.agent.server.api' (x)": (
        "deepspeed",
        "5337",
    ),
    '#error "You\'re trying to build PyTorch with a too old version of GCC. We need GCC 9 or later."': (
        "torch",
        "120126",
    ),
    "ImportError: cannot import name 'BUFSIZE' from 'numpy' (x)": ("deepspeed", "5671"),
    "TypeError: Accelerator.__init__() got an unexpected keyword argument 'dispatch_batches'": (
        "transformers",
        "34714",
    ),
    "ImportError: liger-kernel requires transformers >= 5.0.0, got 4.45.2. Please upgrade": ("liger-kernel", "47"),
    "AttributeError: module 'torch.compiler' has no attribute 'is_compiling'": ("deepspeed", "6656"),
    "ImportError: x: you need flash_attn package version to be greater or equal than 2.1.0.": ("transformers", "3464"),
    'mathcalls.h(79): error: exception specification is incompatible with that of previous function "cospi"': (
        "cuda",
        "378",
    ),
}


@pytest.mark.parametrize("text", SHARED)
def test_a_limit_explains_the_error_that_follows_where_it_is_broken(text: str) -> None:
    package, thread = SHARED[text]
    cause = symptoms.diagnoses(ROWS, text)[0]
    assert cause.cause.startswith(f"{package} ") and " needs " in cause.cause
    assert cause.thread.endswith(thread) and "nox -s plan" in cause.fix


def test_each_limit_with_a_symptom_is_tried() -> None:
    limits = [limit for limit in Catalogue(ROOT).limits if limit.symptom]
    assert {limit.thread.rpartition("/")[2] for limit in limits} == {thread for _, thread in SHARED.values()}


def test_causes_are_ranked_and_versions_rule_some_out() -> None:
    text = "CUDA driver version is insufficient for CUDA runtime version\nfatal error: Python.h: No such file\n"
    causes = [cause.thread.rpartition("/")[2] for cause in symptoms.diagnoses(ROWS, text)]
    assert causes == ["1117", "702", "400"]
    old = "#error C++17 or later compatible compiler is required to use PyTorch."
    assert symptoms.diagnoses(ROWS, old, {"torch": ["2.1.2"]})
    assert not symptoms.diagnoses(ROWS, old, {"torch": ["1.12.1"]})


HARMLESS = """
warning: 'at::DeprecatedTypeProperties& at::Tensor::type() const' is deprecated
[3/40] c++ -MMD -MF flash_api.o.d -lcuda -lcurand -std=c++20
Precompiled wheel not found. Building from source...
Successfully built flash-attn
12 passed, 3 skipped in 4.1s
"""


def test_a_text_without_an_error_has_no_cause() -> None:
    assert not symptoms.diagnoses(ROWS, HARMLESS)


# Texts of threads, and the end of the thread of the row that explains them first.
THREADS = {
    "ibvwrap.cc:190 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory": "nccl-tests/issues/206",
    "    self.pid = os.fork()\nOSError: [Errno 12] Cannot allocate memory": "pytorch/issues/4387",
    "[W socket.cpp:601] [c10d] The IPv6 network addresses of (i-7840, 37340) cannot be retrieved (gai error: -2 - "
    "Name or service not known).": "Grendel-GS/issues/9",
    "socket.gaierror: [Errno -2] Name or service not known": "hpc-stack/issues/357",
    "[16:10:33] INFO OutOfResources: out of resource: shared memory, Required: 98304, Hardware limit: 65536.": (
        "triton/issues/8182"
    ),
    "ImportError: libstdc++.so.6: version `CXXABI_1.3.15' not found (required by x.so)": "pytorch/issues/157709",
    "Tensor dimensions are not compatible for FP8 execution: (2048 % 8 != 0, 767 % 16 != 0)": (
        "TransformerEngine/issues/1422"
    ),
    "Expected both dimensions of mat2 to be divisble by 16 but got torch.Size([32, 15])": "ao/issues/571",
    "stderr: nvidia-container-cli: ldcache error: process /sbin/ldconfig failed with error code: 127": (
        "nvidia-docker/issues/587"
    ),
    "ERROR  : Failed to create container process: No space left on device": "apptainer/issues/2455",
    "/.singularity.d/libs/fakeroot: eval: line 140: /.singularity.d/libs/faked: not found": "apptainer/issues/783",
    "[0]:ncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2) nor AF_INET6(10)": (
        "nccl/issues/1837"
    ),
    "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable": "DIGITS/issues/2005",
    "c++: internal compiler error: Killed (program cc1plus)": "onnxruntime/issues/18579",
    "c++: fatal error: Killed signal terminated program cc1plus": "onnxruntime/issues/18579",
    "ERROR:torch.distributed.elastic:failed (exitcode: -9) local_rank: 3 (pid: 812917)": "3DRS/issues/7",
    "[launch.py:184:sigkill_handler] ['python', 'x.py'] exits with return code = -9": "3DRS/issues/7",
    "/var/slurm_script: line 28:  8156 Killed                  python3 main.py": "3DRS/issues/7",
    "Epoch: [0][511/1736] Loss 0.5113\nKilled": "3DRS/issues/7",
    "UserWarning: flash_attn was requested, but nvcc was not found.\n"
    "NameError: name 'bare_metal_version' is not defined": "flash-attention/issues/509",
    "FileNotFoundError: [Errno 2] No such file or directory: 'ninja': 'ninja'": "xlstm/issues/76",
    "ERROR: git@github.com: Permission denied (publickey).": "heterocl/issues/482",
    "RuntimeError: CUDA error: out of memory": "pytorch/issues/173049",
    '  File "/home/u/train.py", line 2, in <module>\n    import torch\n    ^^^^^^^^^^^^\n'
    "ModuleNotFoundError: No module named 'torch'": "pytorch-chatbot/issues/7",
    '  File "/tmp/pip-install-x/apex/setup.py", line 2, in <module>\n    import torch\n'
    "ModuleNotFoundError: No module named 'torch'": "flash-attention/issues/246",
    "  File \"<string>\", line 22, in <module>\nModuleNotFoundError: No module named 'torch'": (
        "flash-attention/issues/246"
    ),
    "  ├─▶ error decoding response body\n  ├─▶ request or response body error\n  ╰─▶ operation timed out": (
        "TransPixeler/issues/5"
    ),
    "ERROR: Cannot install a==0.0.0 and b because these package versions have conflicting dependencies.": (
        "GaussianAnything/issues/9"
    ),
    "Unsupported global: GLOBAL deepspeed.runtime.zero.config.ZeroStageEnum": "ms-swift/issues/5808",
    "[ERROR] URL https://a.b/v2/x returned error code: 401 Unauthorized": "enroot/issues/161",
    "AttributeError(\"module 'triton.language' has no attribute '_tensor_descriptor_load'\")": "triton/issues/2024",
    "python: relocation error: /usr/local/cuda-11.1/lib64/libcublas.so: symbol runGemmShortApi, version "
    "libcublasLt.so.11 not defined in file libcublasLt.so.11 with link time reference": "onnxruntime/issues/8594",
    "INFO:     Waiting for application startup.\n"
    "Unable to load any of {libcudnn_ops.so.9.1.0, libcudnn_ops.so.9.1, libcudnn_ops.so.9, libcudnn_ops.so}\n"
    "Invalid handle. Cannot load symbol cudnnCreateTensorDescriptor\n"
    "fish: Job 1, 'whisperlivekit-server --host 0.…' terminated by signal SIGABRT (Abort)": (
        "whisper-diarization/issues/259"
    ),
    "Loading Whisper Model!\n"
    "Could not load library libcudnn_ops_infer.so.8. Error: libcudnn_ops_infer.so.8: cannot open shared object "
    "file: No such file or directory\n"
    "Aborted (core dumped)": "TransformerEngine/issues/1853",
    "RuntimeError: nvrtc: error: failed to open libnvrtc-builtins.so.11.1.\n"
    "  Make sure that libnvrtc-builtins.so.11.1 is installed correctly.\n"
    "nvrtc compilation failed:": "TRIPS/issues/13",
    "3\n"
    '  File "/root/venv/lib/python3.8/sklearn/__check_build/__init__.py", line 48, in <module>\n'
    "4\n"
    "    from ._check_build import check_build  # noqa\n"
    "5\n"
    "ImportError: "
    "/root/venv/lib/python3.8/sklearn/__check_build/../../scikit_learn.libs/libgomp-d22c30c5.so.1.0.0: cannot "
    "allocate memory in static TLS block": "opencv/issues/14884",
    "CUDA SETUP: Required library version not found: libbitsandbytes_cuda118.so. Maybe you need to compile it "
    "from source?\n"
    "CUDA SETUP: Defaulting to libbitsandbytes_cpu.so...": "bitsandbytes/issues/492",
    "(.init+0xb): relocation truncated to fit: R_X86_64_REX_GOTPCRELX against undefined symbol "
    "`__gmon_start__'\n"
    "/share/flashattn/build/temp.linux-x86_64-3.10/csrc/flash_attn/src/flash_bwd_hdim128_bf16_causal_densemask_sm80.o: "
    "in function `__cudaUnregisterBinaryUtil()':\n"
    "tmpxft_000c05c2_00000000-6_flash_bwd.compute_90.cudafe1.cpp:(.text+0x7): relocation truncated to fit: "
    "R_X86_64_PC32 against `.bss'\n"
    "collect2: error: ld returned 1 exit status": "Paddle/issues/73928",
    "CMake Error at CMakeLists.txt:1 (cmake_minimum_required):\r\n"
    "  CMake 3.15 or higher is required.  You are running version 3.10.2": "InfiniTime/issues/15",
    'CMake Error: CMake was unable to find a build program corresponding to "Ninja".  CMAKE_MAKE_PROGRAM is '
    "not set.  You probably need to select a different build tool.\n"
    "CMake Error: CMAKE_C_COMPILER not set, after EnableLanguage": "NyuziProcessor/issues/184",
    "/usr/lib/ccache/cc   -g -O2 -o CMakeFiles/cmTC_5f45a.dir/testCCompiler.c.o -c testCCompiler.c\n"
    "ccache: error: Failed to create temporary file for /run/user/0/ccache-tmp/tmp.cpp_stdout.x83PCf: "
    "Permission denied": "ccache/issues/984",
    "  running build_rust\n"
    "  error: can't find Rust compiler\n"
    "\n"
    "  If you are using an outdated pip version, it is possible a prebuilt wheel is available for this package "
    "but pip is not able to install from it. Installing from the wheel would avoid the need for a Rust "
    "compiler.\n"
    "  ----------------------------------------\n"
    "  ERROR: Failed building wheel for tokenizers": "Parrot_Paraphraser/issues/41",
    "-- The CUDA compiler identification is unknown\n"
    "CMake Error at /usr/share/cmake-3.24/Modules/CMakeDetermineCUDACompiler.cmake:602 (message):\n"
    "  Failed to detect a default CUDA architecture.\n"
    "\n"
    "  Compiler output:": "O-CNN/issues/139",
    "CMake Error at E:/Software/cmake/share/cmake-3.23/Modules/CMakeDetermineCUDACompiler.cmake:311 "
    "(message):\n"
    "  CMAKE_CUDA_ARCHITECTURES must be valid if set.": "NNPOps/issues/43",
    "2025-02-11T22:19:10.4507601Z   CMake Error at /home/conda/share/cmake/Caffe2/public/cuda.cmake:162 "
    "(set_property):\n"
    '2025-02-11T22:19:10.4519742Z     The link interface of target "torch::nvtoolsext" contains:\n'
    "2025-02-11T22:19:10.4529732Z \n"
    "2025-02-11T22:19:10.4540072Z       CUDA::nvToolsExt\n"
    "2025-02-11T22:19:10.4552673Z \n"
    "2025-02-11T22:19:10.4562050Z     but the target was not found.  Possible reasons include:\n"
    "2025-02-11T22:19:10.4580565Z       * There is a typo in the target name.": "warpx/pull/5345",
    '  File "train.py", line 62, in train\n'
    "    from apex import amp\n"
    '  File "/root/miniconda3/lib/python3.8/site-packages/apex/__init__.py", line 13, in <module>\n'
    "    from pyramid.session import UnencryptedCookieSessionFactoryConfig\n"
    "ImportError: cannot import name 'UnencryptedCookieSessionFactoryConfig' from 'pyramid.session' (unknown "
    "location)": "apex/issues/1063",
    "    from huggingface_hub import HfFolder, cached_download, hf_hub_download, model_info\n"
    "ImportError: cannot import name 'cached_download' from 'huggingface_hub' "
    "(/usr/local/lib/python3.11/dist-packages/huggingface_hub/__init__.py)": "lincir/issues/22",
    '  File "/opt/venv/lib/python3.11/site-packages/torch/_inductor/runtime/hints.py", line 36, in <module>\n'
    "    from triton.compiler.compiler import AttrsDescriptor\n"
    "ImportError: cannot import name 'AttrsDescriptor' from 'triton.compiler.compiler' "
    "(/opt/venv/lib/python3.11/site-packages/triton/compiler/compiler.py)": "pytorch/issues/127271",
    "  File "
    '"/opt/rocm_sdk_612/lib/python3.11/site-packages/bitsandbytes/triton/int8_matmul_mixed_dequantize.py", '
    "line 12, in <module>\n"
    "    from triton.ops.matmul_perf_model import early_config_prune, estimate_matmul_time\n"
    "ModuleNotFoundError: No module named 'triton.ops'": "bitsandbytes/issues/1492",
    '  File "C:\\Users\\leolo\\anaconda3\\envs\\net\\lib\\site-packages\\numpy\\__init__.py", line 305, in '
    "__getattr__\r\n"
    "    raise AttributeError(__former_attrs__[attr])\r\n"
    "AttributeError: module 'numpy' has no attribute 'float'.\r\n"
    "`np.float` was a deprecated alias for the builtin `float`. To avoid this error in existing code, use "
    "`float` by itself.": "ASFFNet512/issues/8",
    '  File "/usr/local/lib/python3.10/dist-packages/torchvision/_meta_registrations.py", line 164, in '
    "<module>\n"
    "    def meta_nms(dets, scores, iou_threshold):\n"
    '  File "/usr/local/lib/python3.10/dist-packages/torch/library.py", line 467, in inner\n'
    "    handle = entry.abstract_impl.register(func_to_register, source)\n"
    '    if torch._C._dispatch_has_kernel_for_dispatch_key(self.qualname, "Meta"):\n'
    "RuntimeError: operator torchvision::nms does not exist": "pytorch/issues/157648",
    "[rank0]: KeyError: 'qwen3'\n"
    "[rank0]: \n"
    "[rank0]: During handling of the above exception, another exception occurred:\n"
    "[rank0]: \n"
    "[rank0]: ValueError: The checkpoint you are trying to load has model type `qwen3` but Transformers does "
    "not recognize this architecture. This could be because of an issue with the checkpoint, or because your "
    "version of Transformers is out of date.": "ComfyUI-QwenVL/issues/30",
    "Solving environment: failed\n"
    "\n"
    "LibMambaUnsatisfiableError: Encountered problems while solving:\n"
    "  - package torchaudio-2.0.2-py310_cu117 requires pytorch-cuda 11.7.*, but none of the providers can be "
    "installed": "hydroDL/issues/24",
    "#13 73.79 error: RPC failed; curl 92 HTTP/2 stream 0 was not closed cleanly: CANCEL (err 8)\n"
    "#13 73.79 error: 3198 bytes of body are still expected\n"
    "#13 73.80 fetch-pack: unexpected disconnect while reading sideband packet\n"
    "#13 73.80 fatal: early EOF\n"
    "#13 73.80 fatal: index-pack failed": "NotepadNext/issues/533",
    "error: uninstall-distutils-installed-package\n"
    "\n"
    "× Cannot uninstall blinker 1.4\n"
    "╰─> It is a distutils installed project and thus we cannot accurately determine which files belong to it "
    "which would lead to only a partial uninstall.": "KISS-Matcher/issues/60",
    "  configuration error: `project.license` must be valid exactly by one definition (2 matches found):\n"
    "\n"
    "      - keys:\n"
    "  'file': {type: string}": "mrab-regex/issues/581",
    "The virtual environment was not created successfully because ensurepip is not\n"
    "available.  On Debian/Ubuntu systems, you need to install the python3-venv\n"
    "package using the following command.\n"
    "\n"
    "    apt-get install python3-venv": "build/issues/224",
    "[2025-07-15T19:41:39.043Z] CondaToSNonInteractiveError: Terms of Service have not been accepted for the "
    "following channels. Please accept or remove them before proceeding:": "cuml-spark/pull/963",
    "0.371 Using Python 3.11.2 environment at /usr  \n"
    "0.372 error: The interpreter at /usr is externally managed, and indicates the following:": "features/issues/743",
    "  0%|  | 0/163 [00:00<?, ?it/s]\n"
    '    with safe_open(file_path, framework="pt", device="cpu") as f:\n'
    "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge": "MFTCoder/issues/20",
    "OSError: You are trying to access a gated repo.\n"
    "Make sure to have access to it at https://huggingface.co/mistralai/Mistral-7B-Instruct-v0.2.\n"
    "401 Client Error. (Request ID: Root=1-66867938-63a777574abdc5a517fda5e0;15ff67d1)": "private-gpt/issues/1985",
    "WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) after connection "
    "broken by 'ConnectTimeoutError(<pip._vendor.urllib3.connection.VerifiedHTTPSConnection object at 0x7f>, "
    "'Connection to index.example timed out. (connect timeout=15)')': /simple/pandas/\n"
    "ERROR: Could not find a version that satisfies the requirement pandas (from versions: none)\n"
    "ERROR: No matching distribution found for pandas": "pip/issues/3899",
    "ERROR 05-02 10:22:18 [core.py:396] RuntimeError: Worker failed with error 'at 1:0:\n"
    "ERROR 05-02 10:22:18 [core.py:396] def triton_poi_fused__to_copy_0(in_ptr0, out_ptr0, xnumel, XBLOCK : "
    "tl.constexpr):\n"
    "ERROR 05-02 10:22:18 [core.py:396] ^\n"
    'ERROR 05-02 10:22:18 [core.py:396] ValueError("type fp8e4nv not supported in this architecture. The '
    "supported fp8 dtypes are ('fp8e4b15', 'fp8e5')\")', please check the stack trace above for the root cause": (
        "Qwen3.8-Flash-Next/issues/7"
    ),
    "(EngineCore_0 pid=1810465) ERROR 09-03 11:03:37 [core.py:712]     raise ValueError(\n"
    "(EngineCore_0 pid=1810465) ERROR 09-03 11:03:37 [core.py:712] ValueError: Free memory on device "
    "(7.34/139.72 GiB) on startup is less than desired GPU memory utilization (0.9, 125.75 GiB). Decrease GPU "
    "memory utilization or reduce GPU memory used by other processes.": "vllm/issues/20305",
    "../aten/src/ATen/native/cuda/Indexing.cu:1284: indexSelectLargeIndex: block: [134,0,0], thread: [0,0,0] "
    "Assertion `srcIndex < srcSelectDimSize` failed.\n"
    "../aten/src/ATen/native/cuda/Indexing.cu:1284: indexSelectLargeIndex: block: [134,0,0], thread: [1,0,0] "
    "Assertion `srcIndex < srcSelectDimSize` failed.\n"
    "RuntimeError: CUDA error: device-side assert triggered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might "
    "be incorrect.": "lm-evaluation-harness/issues/2293",
    "[root@bh174 chenyang]# nvidia-smi \n"
    "Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error": "open-gpu-kernel-modules/issues/507",
    "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0\n"
    "  NVRM: (PCI ID: 10de:26b5) installed in this system has\n"
    "  NVRM: fallen off the bus and is not responding to commands.\n"
    "[ 1843.439662] NVRM: The NVIDIA probe routine failed for 1 device(s).": "open-gpu-kernel-modules/issues/507",
    "$ nvidia-smi\n"
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure\n"
    "that the latest NVIDIA driver is installed and running.": "compute-gpu-installation/pull/18",
    "[default0]:  File "
    '"/home/xxxx/miniconda3/envs/flagscale/lib/python3.10/site-packages/transformer_engine/pytorch/attention.py", '
    "line 8320, in forward\n"
    '[default0]:    raise ValueError("No dot product attention support for the provided inputs!")\n'
    "[default0]:ValueError: No dot product attention support for the provided inputs!": (
        "TransformerEngine/issues/1821"
    ),
    "The worker fails with {0: ProcessFailure(local_rank=0, pid=54, exitcode=-7, error_file='<N/A>', "
    "error_file_data={'message': '<NONE>'}, message='Signal 7 (SIGBUS) received by PID 54', "
    "timestamp=1711419181)}": "DeepSpeed/issues/4002",
    "Docker: Error response from daemon: OCI runtime create failed: unable to retrieve OCI runtime error exec: "
    '"nvidia-container-runtime": executable file not found in $PATH: : unknown.': "3dgrut/issues/71",
    "docker: Error response from daemon: OCI runtime create failed: container_linux.go:367: starting container "
    "process caused: process_linux.go:495: container init caused: Running hook #0:: error running hook: exit "
    "status 1, stdout: , stderr: nvidia-container-cli: device error: 1: unknown device: unknown.": (
        "nvidia-docker/issues/1283"
    ),
    "   1 | >>> FROM nvidia/cuda:10.2-cudnn7-devel-ubuntu18.04\n"
    "   2 |     \n"
    "--------------------\n"
    "ERROR: failed to solve: nvidia/cuda:10.2-cudnn7-devel-ubuntu18.04: "
    "docker.io/nvidia/cuda:10.2-cudnn7-devel-ubuntu18.04: not found": "nvidia-docker/issues/1768",
    "STEP 1/26: FROM docker.io/nvidia/cuda:10.2-cudnn7-devel-ubuntu18.04\n"
    "Trying to pull docker.io/nvidia/cuda:10.2-cudnn7-devel-ubuntu18.04...\n"
    "Error: error creating build container: initializing source "
    "docker://nvidia/cuda:10.2-cudnn7-devel-ubuntu18.04: reading manifest 10.2-cudnn7-devel-ubuntu18.04 in "
    "docker.io/nvidia/cuda: manifest unknown: manifest unknown": "nvidia-docker/issues/1768",
    "standard_init_linux.go:228: exec user process caused: exec format error": "mysql/issues/228",
    "FATAL:   container creation failed: mount hook function failure: mount "
    "/proc/self/fd/3->/usr/local/var/apptainer/mnt/session/rootfs error: while mounting image /proc/self/fd/3: "
    "kernel reported a bad superblock for squashfs image partition, possible causes are that your kernel "
    "doesn't support the compression algorithm or the image is corrupted": "apptainer/issues/2458",
    "usage: trainval_distributed.py [-h] [--work-dir WORK_DIR] [--local_rank LOCAL_RANK]\n"
    "trainval_distributed.py: error: unrecognized arguments: --local-rank=1\n"
    "[2023-12-08 01:40:46,962] torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: 2) "
    "local_rank: 0 (pid: 53342) of binary: /home/ashitha/miniconda3/envs/Ashenv/bin/python": (
        "pytorch-image-models/issues/1728"
    ),
    "[rank1]: RuntimeError: Expected to have finished reduction in the prior iteration before starting a new "
    "one. This error indicates that your module has parameters that were not used in producing loss. You can "
    "enable unused parameter detection by passing the keyword argument\n"
    "[rank1]: `find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by \n"
    "[rank1]: making sure all `forward` function outputs participate in calculating loss.": "pytorch/issues/43259",
    '│    893 │   │   │   f"{train_batch} != {micro_batch} * {grad_acc} *  │\n'
    "╰─────────────────────────────────────────────────────────────────────╯\n"
    "AssertionError: Check batch related parameters. train_batch_size is not\n"
    "equal to micro_batch_per_gpu * gradient_acc_step * world_size 64 != 4 *\n"
    "8 * 1": "starcoder/issues/41",
    "    return TCPStore(\n"
    "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.": (
        "pytorch/pull/111805"
    ),
    "torch.distributed.DistBackendError: NCCL error in: "
    "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a network "
    "error, NCCL version 2.21.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "Last error:\n"
    "socketProgressOpt: Call to recv from 172.1.1.1<33759> failed : Connection reset by peer": "nccl/issues/2076",
    "slurmstepd: *** JOB 830329 CANCELLED AT 2018-08-06T17:21:44 DUE TO TIME LIMIT on n447 ***": "canu/issues/1052",
    "06/26/25 16:17:42 EDT :: build.xml :: WARNING: job submission failed: sbatch: error: Batch job submission "
    "failed: Invalid account or account/partition combination specified": "ondemand/issues/3253",
    "OpenBLAS blas_thread_init: pthread_create failed for thread 33 of 64: Resource temporarily unavailable\n"
    "OpenBLAS blas_thread_init: RLIMIT_NPROC 4096 current, 513046 max": "worms/issues/2",
    "Installing collected packages: nvidia-cusparselt-cu13, mpmath, cuda-toolkit, torch\n"
    "\n"
    "ERROR: Could not install packages due to an OSError: [Errno 122] Disk quota exceeded": "FastVideo/issues/1490",
    "error: failed to solve: executor failed running [/bin/sh -c pip install -r /tmp/requirements.txt && rm "
    "/tmp/requirements.txt]: exit code: 137": "3DRS/issues/7",
    "    from flash_attn.flash_attn_interface import flash_attn_unpadded_qkvpacked_func\n"
    "ImportError: cannot import name 'flash_attn_unpadded_qkvpacked_func' from "
    "'flash_attn.flash_attn_interface' "
    "(~/miniconda3/envs/muffin/lib/python3.10/site-packages/flash_attn-2.4.2.egg/flash_attn/flash_attn_interface.py)": (
        "LLM-Shearing/issues/33"
    ),
    "> from colbert import Trainer\n"
    "Traceback (most recent call last):\n"
    '  File "colbert/training/training.py", line 7, in <module>\n'
    "    from transformers import AdamW, get_linear_schedule_with_warmup\n"
    "ImportError: cannot import name 'AdamW' from 'transformers' (transformers/__init__.py)": (
        "autodistill-grounded-sam-2/issues/13"
    ),
    "!!! Exception during processing !!! No package metadata was found for flash_attn\n"
    "Traceback (most recent call last):\n"
    '  File "importlib\\metadata\\__init__.py", line 397, in from_name\n'
    "StopIteration": "HunyuanDiT/issues/245",
    "CMake Error at CMakeLists.txt:12 (find_package):\n"
    '  By not providing "Findpybind11.cmake" in CMAKE_MODULE_PATH this project has\n'
    '  asked CMake to find a package configuration file provided by "pybind11",\n'
    "  but CMake did not find one.": "pybind11/issues/1379",
    "[INFO] Creating squashfs filesystem...\n"
    "\n"
    'enroot-mksquashovlfs: Compressor "lzo" is not supported!\n'
    "enroot-mksquashovlfs: Compressors available:": "enroot/issues/276",
    'ERROR: mksquashfs error: exec: "mksquashfs": executable file not found in $PATH:': "singularity/issues/2542",
    "'(MaxRetryError(\"HTTPSConnectionPool(host='a.b', port=443): Max retries exceeded with url: /x (Caused by "
    "NewConnectionError('x: Failed to establish a new connection: [Errno 101] Network is unreachable'))\"), '(Request "
    "ID: 1)')' thrown while requesting HEAD": "stable-diffusion-webui/issues/17165",
    "RuntimeError: CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call": "pytorch/issues/42077",
    "NLLLoss2d.cu:103: nll_loss2d_forward_kernel: block: [3,0,0], thread: [929,0,0] Assertion `t >= 0 && t < n_classes`"
    " failed.\nRuntimeError: CUDA error: device-side assert triggered": "Pytorch-UNet/issues/375",
    "_pickle.UnpicklingError: invalid load key, 'v'.": "stable-diffusion/issues/93",
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda \n"
    "functions before calling NumCudaDevices() that might have already set an error? \n"
    "Error 804: forward compatibility was attempted on non supported HW": "ICRA2024-Sim2Real-AXS/issues/5",
    "ImportError: cannot import name 'is_flash_attn_greater_or_equal_2_10' from\n"
    "'transformers.modeling_flash_attention_utils' (/usr/local/lib/python3.12/dist-packages/transformers/x.py)": (
        "evalscope/issues/864"
    ),
    "ImportError: cannot import name 'is_torch_tpu_available' from 'transformers'": "evalscope/issues/864",
    "AttributeError: module 'torch.library' has no attribute 'register_fake'": "ao/issues/2783",
    "partially initialized module 'torchvision' has no attribute 'extension' (most likely due to a circular import)": (
        "pytorch/issues/157648"
    ),
    "CMake Error at FindPackageHandleStandardArgs.cmake:230 (message):\n"
    "  Could NOT find Python (missing: Python_LIBRARIES Python_INCLUDE_DIRS\n"
    '  Development) (found version "3.9.7")': "nest-simulator/issues/2209",
    "gcc: fatal error: cannot execute ‘cc1plus’: execvp: No such file or directory\n"
    "nvcc fatal   : Failed to preprocess host compiler properties.": "vision/issues/8540",
    '  File "_in_process.py", line 77, in _build_backend\n    obj = import_module(mod_path)\n'
    "ModuleNotFoundError: No module named 'setuptools'": "pip/issues/6264",
    "ERROR: Directory '.' is not installable. Neither 'setup.py' nor 'pyproject.toml' found.": "VidDetours/issues/3",
    "fatal: unable to access 'https://a.b/c/': SSL certificate problem: unable to get local issuer certificate": (
        "pip/issues/9568"
    ),
    "git-lfs smudge 'x.jar': git-lfs: command not found": "openmoonray/issues/189",
    "[208153.361842] NVRM: API mismatch: the client has the version 570.86.15, but\n"
    "[208153.361842] NVRM: this kernel module has the version 565.57.01.": ("ubuntu-packaging-nvidia-driver/issues/3"),
    "$ nvidia-smi\nNo devices were found": "open-gpu-kernel-modules/issues/789",
    "NVRM: Xid (PCI:0000:c1:00): 79, pid=1, name=python, GPU has fallen off the bus.": (
        "open-gpu-kernel-modules/issues/507"
    ),
    "node08:27106:27302 [0] include/shm.h:27 NCCL WARN Call to shm_open failed : Permission denied": (
        "pytorch/issues/37004"
    ),
    "[rank0]: RuntimeError: NCCL Error 2: unhandled system error (run with NCCL_DEBUG=INFO for details)\n"
    "failed (exitcode: 1) local_rank: 1 (pid: 6833) of binary: /opt/conda/bin/python": "nccl/issues/207",
    "  exitcode  : -11 (pid: 3304209)\n  error_file: <N/A>\n"
    "  traceback : Signal 11 (SIGSEGV) received by PID 3304209": "pytorch/issues/6194",
    "[E socket.cpp:860] [c10d] The client socket has timed out after 60s while trying to connect to a:1": (
        "pytorch/issues/67547"
    ),
    "/bin/sh: 1: cmake: not found": "ClickHouse/issues/14036",
    "c/_cffi_backend.c:13:17: fatal error: ffi.h: No such file or directory\n     #include <ffi.h>": (
        "bpython/issues/565"
    ),
    'Error response from daemon: Head "https://a.b/v2/x/manifests/latest": denied: denied': "varne/issues/161",
    "  ╰─▶ Call to `setuptools.build_meta:__legacy__.build_wheel` failed (exit status: 1)\n      [stdout]\n"
    "      Building cuda extension requires PyTorch (>=1.13.0) being installed, please install PyTorch first: No\n"
    "      module named 'torch'": "flash-attention/issues/246",
    "OSError: [Errno 16] Device or resource busy: '/root/.triton/cache/x/cuda_utils.so' -> '/root/y'": (
        "pytorch/issues/173679"
    ),
    "E: GPG error: https://a.b/x86_64 Release: Signed file isn't valid, got 'NODATA' (does the network require "
    "authentication?)": "nvidia-docker/issues/1369",
    "UnsatisfiableError: The following specifications were found to be in conflict:\n  - python=3.7.1": (
        "hydroDL/issues/24"
    ),
    "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same": "smollm/issues/32",
    "Input type (c10::BFloat16) and bias type (float) should be the same": "LlamaFactory/issues/567",
    "subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.\n"
    "The above exception was the direct cause of the following exception:\n"
    "RuntimeError: Error compiling objects for extension": "HRNet-Semantic-Segmentation/issues/210",
    "cospi.h(3): error: exception specification is incompatible with that of previous function\nError building "
    "extension 'fused_adam': fatal error: Python.h: No such file": "sglang/issues/1117",
    "FAILED\nRoot Cause (first observed failure):\n[0]:\n  exitcode  : 1 (pid: 19401)\n"
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====": "MiniGPT-4/issues/237",
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:219, invalid argument, NCCL version 2.14.3\n"
    "ncclInvalidArgument: Invalid value for an argument.\nLast error:\n"
    "Invalid config blocking attribute value -2147483648": "nccl/issues/1558",
    "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1333, "
    "internal error - please report this issue to the NCCL developers, NCCL version 2.18.1\n"
    "ncclInternalError: Internal check failed.\nLast error:\nSocket recv failed": "nccl/issues/1546",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [18.25.6.30]:28048": (
        "nccl/issues/2076"
    ),
    "  hint: This error likely indicates that `flash-attn@2.8.1` depends on `torch`, but doesn't declare it as a "
    "build\n  dependency.": "flash-attention/issues/246",
    "  × No solution found when resolving dependencies:\n  ╰─▶ Because torch==2.3.1 has no wheels are available with a "
    "matching Python implementation and you require torch==2.3.1, we can conclude": "uv/issues/8344",
    "[rank0]:     assert not self.zero_optimization_partition_gradients()\n"
    "[rank0]: AssertionError: no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage "
    "3": "DeepSpeed/issues/6793",
    "double free or corruption (!prev)\nAborted (core dumped)": "pytorch/issues/6194",
    "    RuntimeError: NCCL Error 1: unhandled cuda error\nCuda failure 1 'out of memory'": "pytorch/issues/173049",
    "RuntimeError: CUDA error: invalid resource handle": "stable-diffusion-webui/issues/1",
    "0.359 Err:1 http://a.b/ubuntu jammy-security InRelease\n0.359   At least one invalid signature was encountered.": (
        "nvidia-docker/issues/1369"
    ),
    "│ ❱ 215 raise RuntimeError(                                     │\n"
    "RuntimeError: Found empty `transformer-engine` meta package installed. Install `transformer-engine` with "
    "framework extensions\nvia'pip3 install --no-build-isolation transformer-engine[pytorch,jax]==VERSION'": (
        "evo2/issues/201"
    ),
    "bitsandbytes/libbitsandbytes_cpu.so: undefined symbol: cget_managed_ptr": "bitsandbytes/issues/492",
    "AttributeError: 'NoneType' object has no attribute 'cquantize_blockwise_fp16_nf4'": "bitsandbytes/issues/492",
    "[rank0]: RuntimeError: Error(s) in loading state_dict for Sequential:\n"
    '[rank0]: \tMissing key(s) in state_dict: "0._extra_state". ': "Megatron-Bridge/pull/6032",
    "RuntimeError: ColumnParallelLinear was called with gradient_accumulation_fusion set to True but the custom CUDA "
    "extension fused_weight_gradient_mlp_cuda module is not found.": "efficientdet-pytorch/issues/46",
    "#12 7.1   × No solution found when resolving dependencies:\n"
    "#12 7.1   ╰─▶ Because there is no version of requests==2.32.3 and project depends on requests==2.32.3, we can\n"
    "#12 7.1       conclude that your requirements are unsatisfiable.\n"
    "#12 7.1       hint: `requests` was found on\n"
    "#12 7.1       https://a.b/whl/cu121, but not at the requested version": "uv/pull/7645",
    "LibMambaUnsatisfiableError: Encountered problems while solving:\n"
    "  - nothing provides requested _libgcc_mutex ==0.1 conda_forge": "DSOL_rv0.2/issues/11",
    "CondaHTTPError: HTTP 000 CONNECTION FAILED for url <https://a.b/repodata.json.bz2>\n"
    "ProxyError(MaxRetryError(\"HTTPSConnectionPool(host='a.b', port=443): Max retries exceeded (Caused by "
    "ProxyError('Cannot connect to proxy.', OSError('Tunnel connection failed: 503 Service Unavailable',)))\",),)": (
        "requests/issues/6585"
    ),
    " fatal error: THC/THC.h: No such file or directory\n    7 | #include <THC/THC.h>": "pytorch-loss/issues/36",
    "src/iou_cuda.cpp:4:23: error: ‘AT_CHECK’ was not declared in this scope": "FCOS/issues/276",
    "-bash: /var/spool/jobs/820635.SC: /bin/bash^M: bad interpreter: No such file or directory": "rslurm/issues/84",
    "RuntimeError: ('Quantization scheme is not supported for ', 'the current GPU. Min capability: 80. ', 'Current "
    "capability: 75.')": "vllm/issues/14040",
    "pytorch_lightning.utilities.exceptions.MisconfigurationException: You requested GPUs: [1]\n"
    " But your machine only has: []": "nemo_compatible/issues/16",
    "(APIServer pid=64866) RuntimeError: Engine core initialization failed. See root cause above.": (
        "vllm/issues/21882"
    ),
    "(EngineCore_0 pid=1) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    "(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above.": (
        "pytorch/issues/173049"
    ),
    "stderr: nvidia-container-cli: initialization error: nvml error: insufficient permissions: unknown.": (
        "nvidia-container-toolkit/issues/33"
    ),
    "Error invalid device function at line 508 in file /root/bitsandbytes/csrc/ops.cu": "pytorch/issues/1557",
    "ptxas C:\\Users\\u\\Temp\\tmpafhfmeeh.ptx, line 5; fatal   : Unsupported .version 8.6; current version is '8.5'\n"
    "ptxas fatal   : Ptx assembly aborted due to errors": "triton/issues/5385",
    "AssertionError: torch is required for pre-compiling ops, please install it first.": "flash-attention/issues/246",
    "ModuleNotFoundError: No module named 'flash_attn_3'": "flash-attention/pull/1112",
    "NotImplementedError: No operator found for `memory_efficient_attention_forward` with inputs:\n"
    "`decoderF` is not supported because:\n    xFormers wasn't build with CUDA support": "DeepCache-colab/issues/2",
    "NotImplementedError: No operator found for `memory_efficient_attention_forward` with inputs:\n"
    "`cutlassF-pt` is not supported because:\n    device=cpu (supported: {'cuda'})": "xformers/issues/1143",
    "ninja: error: 'E:/xformers/third_party/flash-attention/csrc/flash_attn/src/fmha_bwd_hdim128.cu', needed by "
    "'E:/xformers/build/flash_attn/src/fmha_bwd_hdim128.obj', missing and no known rule to make it": (
        "xformers/issues/809"
    ),
    "error: Distribution `torch==2.7.0 @ registry+https://a.b/simple` can't be installed because it doesn't have a "
    "source distribution or wheel for the current platform\n\n"
    "hint: You're on Linux (`manylinux_2_27_x86_64`), but `torch` (v2.7.0) only has wheels for the following\n"
    "platforms: `manylinux_2_28_aarch64`, `manylinux_2_28_x86_64`, `win_amd64`; consider": "uv/issues/14268",
    "error: Distribution `torch==2.5.1 @ registry+https://a.b/whl` can't be installed because it doesn't have a source "
    "distribution or wheel for the current platform\n\n"
    "hint: You're on Linux (`manylinux_2_39_aarch64`), but `torch` (v2.5.1) only has wheels for the following platform:"
    " `manylinux_2_28_x86_64`": "uv/issues/10236",
    "  Could not find compiler set in environment variable CUDACXX:\n\n  /usr/local/cuda/bin/nvcc.\n\n"
    "CMake Error: CMAKE_CUDA_COMPILER not set, after EnableLanguage": "torch-int/issues/25",
    'docker: Error response from daemon: could not select device driver "cdi" with capabilities: [].': (
        "container-device-interface/pull/277"
    ),
    "Error: adding layer with blob: processing tar file(potentially insufficient UIDs or GIDs available in user "
    "namespace (requested 1516583083:0 for /app/x.md)": "moby/issues/43576",
    "#5 ERROR: failed to register layer: write /home/u/.cache/pip/http/2/d: no space left on device": (
        "pip/issues/7745"
    ),
    "25% 1:3=0s c1bbdc448b       /bin/bash: enroot-aufs2ovlfs: command not found": "pyxis/issues/8",
    "slurmstepd: error: pyxis:     mkdir: cannot create directory '/run/user/1000': Permission denied": (
        "pyxis/issues/12"
    ),
    "ERROR  : Could not write info to setgroups: Permission denied\n"
    "ERROR  : Error while waiting event for user namespace mappings: no event received": "apptainer/issues/2360",
    "error: Failed to fetch: `https://a.b/x`\n  Caused by: client error (Connect)\n"
    "  Caused by: dns error: failed to lookup address information: Name does not resolve": "hpc-stack/issues/357",
    "  Caused by: error sending request for url (https://a.b/x)\n  Caused by: client error (Connect)\n"
    "  Caused by: invalid peer certificate: UnknownIssuer": "pip/issues/9568",
    "Failed to pull image [error pulling image configuration: Get: x509: certificate has expired or is not yet valid: "
    "current time 2024-06-30T11:33:07-07:00 is after 2021-09-30T14:01:15Z].": "docker-library-redis/issues/110",
    "E: List directory /var/lib/apt/lists/partial is missing. - Acquire (13: Permission denied)": (
        "logstash-docker/issues/20"
    ),
    "OSError: [Errno 13] Permission denied: '/usr/local/lib/python2.7/dist-packages/pythonds'": "searx/issues/1578",
    "[rank1]: PermissionError: [Errno 13] Permission denied: '/.cache'": "mim/issues/240",
    "tar: lib/clang: Cannot change ownership to uid 107418, gid 5000: Operation not permitted": "spilo/issues/708",
    "/usr/include/stdio.h:27:10: fatal error: 'bits/libc-header-start.h' file not found": "gcc-cross-compiler/issues/3",
    "OSError: libtilelang_module.so: undefined symbol: cuTensorMapEncodeIm2col": "cutlass/issues/1624",
    "ImportError: uvloop/loop.cpython-310-x86_64-linux-gnu.so: undefined symbol: _PyGen_Send": "pysimgrid/issues/17",
    "    /bin/ld: /usr/lib/libpython3.6m.a(_iomodule.o): relocation R_X86_64_32 against `.data' can not be used when "
    "making a shared object; recompile with -fPIC": "dionaea/issues/261",
    "CMake Error at CMakeLists.txt:4 (cmake_policy):\n  Policy CMP0060 may not be set to OLD behavior because this "
    "version of CMake\n  no longer supports it.": "libipt/issues/114",
    "packaging.version.InvalidVersion: Invalid version: '0.9.20.'": "setuptools/issues/3772",
    "RuntimeError: write(): fd 29 failed with Input/output error": "pytorch/issues/10577",
    "Error: watch: System limit for number of file watchers reached, watch '/home/u/static'": (
        "sonarr-metadata-rewrite/issues/57"
    ),
    "2021/07/26 Error: OCI runtime error: crun: the requested cgroup controller `pids` is not available": (
        "podman/issues/8914"
    ),
    "bwrap: No permissions to creating new namespace, likely because the kernel does not allow non-privileged user "
    "namespaces.": "rootlesskit/issues/68",
    "RuntimeError: Gloo connectFullMesh failed with [/gloo/transport/tcp/pair.cc:152]\n  timed out connecting: "
    "SO_ERROR: Connection refused, remote=[127.0.0.1]:14215": "vllm/issues/5094",
    "srun: error: Unable to confirm allocation for job 60564: Unable to contact slurm controller (connect failure)": (
        "ArjunaUsers/issues/92"
    ),
    "FATAL:   While making image: write /home/u/.apptainer/cache/x: disk quota exceeded": "FastVideo/issues/1490",
    "error: mkdir /opt/x: read-only file system": "proteinfold/issues/463",
    "nvidia-container-cli: initialization error: cannot open shared object file: no such file or directory: unknown.": (
        "nvidia-docker/issues/1505"
    ),
    "OSError: Consistency check failed: file should be of size 133466304 but has size 635": (
        "huggingface_hub/issues/1498"
    ),
    "requests.exceptions.HTTPError: 504 Server Error: Gateway Time-out for url: https://a.b/api/models/x": (
        "huggingface_hub/issues/2060"
    ),
    "ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))": (
        "colima/issues/577"
    ),
    "csrc/mlp.cpp:147:46: error: expected primary-expression before ‘>’ token\n"
    "         grad_o.contiguous().data_ptr<scalar_t>(),\n"
    "                                              ^\n"
    "/home/u/torch/include/ATen/Dispatch.h:12:12: note: in definition of macro ‘AT_PRIVATE_CASE_TYPE’": (
        "apex/issues/944"
    ),
    "    Compiling objects...\n    1.9.0\n"
    "    g++ -pthread -shared build/csrc/flatten_unflatten.o -L/home/u/torch/lib -lc10 -ltorch -o build/apex_C.so\n"
    "    g++: error: build/csrc/flatten_unflatten.o: No such file or directory\n"
    "    error: command 'g++' failed with exit status 1": "apex/issues/961",
    "unable to execute '/usr/local/cuda:/bin/nvcc': No such file or directory": "pytorch_cluster/issues/55",
    "FileNotFoundError: [Errno 2] No such file or directory: ':/usr/local/cuda:/usr/local/cuda-10.1/bin/nvcc'": (
        "pytorch_cluster/issues/55"
    ),
    "/bin/sh: 1: :/usr/local/cuda/bin/nvcc: not found": "pytorch_cluster/issues/55",
    "error: unable to execute '/usr/local/cuda/bin/nvcc': No such file or directory": "flash-attention/issues/264",
    "    return ctypes.CDLL(dll_path, mode=ctypes.RTLD_GLOBAL)\n"
    "OSError: /home/u/libtransformer_engine.so: undefined symbol: _ZNKSt10filesystem4path12has_filenameEv": (
        "Arcade-Learning-Environment/issues/406"
    ),
    "ImportError: /home/u/transformer_engine_extensions.cpython-38-x86_64-linux-gnu.so: undefined symbol: "
    "nvte_layernorm_bwd": "TransformerEngine/issues/115",
    "wheel_lib/libtransformer_engine.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal, version "
    "libcublasLt.so.13": "TransformerEngine/issues/2504",
    "RuntimeError: cuDNN version incompatibility: PyTorch was compiled against (8, 3, 2) but linked against "
    "(8, 0, 3)": "pytorch/issues/80637",
    "RuntimeError: cuDNN version incompatibility: PyTorch was compiled  against (9, 1, 0) but found runtime version "
    "(8, 9, 7).": "pytorch/issues/80637",
    "slurmstepd: error: pyxis:     Write failed because No space left on device\n"
    "slurmstepd: error: pyxis:     FATAL ERROR:Failed to write to output filesystem": "pyxis/issues/41",
    "WARNING: By using --writable, Apptainer can't create /storage destination automatically without overlay or "
    "underlay\n"
    "FATAL:   container creation failed: mount hook function failure: mount /var/session/storage->/storage error: "
    "while mounting /var/session/storage: destination /storage doesn't exist in container": "apptainer/issues/1895",
    "nvidia-container-cli.real: device error: MIG-GPU-932bfb2c-849a-2a22-1e84-9eff6bc02b39/1/0: unknown device": (
        "nvidia-container-toolkit/issues/203"
    ),
    "nvidia-container-cli: device error: GPU-932bfb2c-849a-2a22-1e84-9eff6bc02b39: unknown device: unknown.": (
        "nvidia-docker/issues/1283"
    ),
    "Feb 20 18:59:13 node2 slurmd[57977]: fatal: gres.conf duplicate records for gpu": "puppet-magic_castle/issues/27",
    "slurmd[12912]: slurmd: error: Waiting for gres.conf file /dev/nvidia0\n"
    "slurmd[12912]: slurmd: fatal: can't stat gres.conf file /dev/nvidia0: No such file or directory": (
        "bibigrid/issues/705"
    ),
    "Compiler version check failed:\n\nThe major and minor number of the compiler used to\ncompile the kernel:\n\n"
    "gcc version 9.1.1 20190809\n\ndoes not match the compiler used here:\n\ncc 9.2.1 20190813\n\n"
    "*** Failed CC version check. Bailing out! ***\n\n"
    "make[2]: *** [/var/lib/dkms/nvidia/390.87/build/Kbuild:180: cc_version_check] Error 1": "distribution/issues/1133",
    "LibMambaUnsatisfiableError: Encountered problems while solving:\n"
    "  - package pytorch-2.0.1-py3.10_cuda11.8_cudnn8.7.0_0 requires pytorch-cuda >=11.8,<11.9, but none of the "
    "providers can be installed": "hydroDL/issues/24",
    "ERROR: failed to solve: DeadlineExceeded: failed to authorize: failed to fetch anonymous token: Get "
    '"https://nvcr.io/proxy_auth?scope=x": dial tcp 35.75.114.65:443: i/o timeout': "permuto_sdf/issues/25",
    "csrc/grouped_gemm.cu:8:10: fatal error: cutlass/bfloat16.h: No such file or directory": (
        "flash-attention/issues/331"
    ),
}


@pytest.mark.parametrize("text", THREADS)
def test_the_text_of_a_thread_is_explained(text: str) -> None:
    assert symptoms.diagnoses(ROWS, text)[0].thread.endswith(f"/{THREADS[text]}")


MISMATCH = "The detected CUDA version (12.4) mismatches the version that was used to compile{}PyTorch (11.8). Please"
FORMS = {
    "gcc": (
        "\x1b[01m\x1b[Kmain.c:5:10:\x1b[m\x1b[K \x1b[01;31m\x1b[Kfatal error: \x1b[m\x1b[KPython.h: No such file",
        "main.c:5:10: fatal error: Python.h: No such file",
    ),
    "link": (
        "\x1b]8;;https://a.b\x1b\\ModuleNotFoundError\x1b]8;;\x1b\\: No module named 'wheel'",
        "ModuleNotFoundError: No module named 'wheel'",
    ),
    "uv": (
        "\x1b[31mModuleNotFoundError\x1b[0m: \x1b[1mNo module named \x1b[0m'wheel'",
        "ModuleNotFoundError: No module named 'wheel'",
    ),
    "nvcc": (
        "nvcc fatal   : Unsupported gpu architecture \x1b[1m'compute_89'\x1b[0m",
        "nvcc fatal : Unsupported gpu architecture 'compute_89'",
    ),
    "curly": ("libc.so.6: version ‘GLIBC_2.32’ not found", "libc.so.6: version 'GLIBC_2.32' not found"),
    "windows": (MISMATCH.format("\r\n") + "\r\n", MISMATCH.format(" ")),
    "docker": ("#12 4.98 " + MISMATCH.format("\n#12 4.98 "), MISMATCH.format(" ")),
    "docker's summary": ("4.984     " + MISMATCH.format("\n4.984     "), MISMATCH.format(" ")),
    "torchrun": ("[rank0]: " + MISMATCH.format("\n[rank0]: "), MISMATCH.format(" ")),
    "actions": (
        "2026-01-02T03:04:05.0000001Z " + MISMATCH.format("\n2026-01-02T03:04:05.0000002Z "),
        MISMATCH.format(" "),
    ),
    "quote": (">   " + MISMATCH.format("\n>   "), MISMATCH.format(" ")),
    "rich": (
        "│ RuntimeError: no kernel image is available for     │\n│ execution on the device                │",
        "RuntimeError: no kernel image is available for execution on the device",
    ),
    "narrow": (
        "torch.OutOfMemoryError: CUDA out of\nmemory. Tried to",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to",
    ),
    "json": ('{"log":"No module named \'wheel\'\\n"}', '{"log":"No module named \'wheel\'\\n"}'),
    "cut off": ("cpython-310.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",) * 2,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_text_is_explained_however_it_was_logged(form: str) -> None:
    text, line = FORMS[form]
    assert [cause.line for cause in symptoms.diagnoses(ROWS, f"[1/3] c++\n{text}\nmake: Error 1\n")] == [line]


def test_a_coloured_error_looks_like_one() -> None:
    assert [*symptoms.troubles("\x1b[31mKeyError\x1b[0m: 'lr'")] == ["KeyError: 'lr'"]


AGAIN = "WARNING: Retrying (Retry(total={}, connect=None, read=None)) after connection broken by '{}': /simple/tiny/\n"

UNEXPLAINED = {
    "pip": "Preparing metadata (setup.py) ... done\nBuilding wheel for flash-attn (setup.py) ... done",
    "retry": "WARNING: Retrying (Retry(total=4)) after 'ReadTimeoutError(\"Read timed out. (read timeout=15)\",)'",
    "uv": "Resolved 44 packages in 978ms\nInstalled 44 packages in 0.3s\n + torch==2.11.0",
    "cmake": "-- Performing Test CMAKE_HAVE_LIBC_PTHREAD - Failed\n[100%] Built target transformer_engine",
    "ninja": "[1/3] c++ -o error_check.o -lcuda\nLoading extension module fused_adam...\nTime to load: 32.1 seconds",
    "pytest": "test_oom.py::test_cuda_out_of_memory PASSED\ntest_x.py::test_permission_denied PASSED",
    "killed": "INFO: Killed 3 stale workers\nmutants: 38 Killed, 2 survived",
    "NCCL": "NCCL INFO NET/Plugin: libnccl-net.so: cannot open shared object file: No such file or directory",
    "NCCL, memory": "NCCL WARN NET/OFI Unable to register memory. RC: 12, Error: Cannot allocate memory",
    "nvcc": "UserWarning: flash_attn was requested, but nvcc was not found.\nSuccessfully installed flash-attn-2.8.3",
    "ds_report": "[WARNING]  async_io requires the dev libaio .so object and headers but these were not found.",
    "torchrun": "WARNING:torch.distributed.run:Setting OMP_NUM_THREADS environment variable to be 1 in default",
    "find": "find: '/proc/1/fd': Permission denied",
    "ldconfig": "nvidia-container-cli: ldcache error: process /sbin/ldconfig.real failed with error code: 1: unknown.",
    "key": "    lr = config['lr']\nKeyError: 'lr'",
    "file": "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.jsonl'",
    "module": "ModuleNotFoundError: No module named 'my_models'",
    "import": "ImportError: cannot import name 'build' from 'models' (/home/u/project/models.py)",
    "library": "ImportError: cannot import name 'Mapping' from 'collections' (/usr/lib/collections/__init__.py)",
    "shapes": "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x10 and 12x5)",
    "assert": "AssertionError: 3 != 4",
    "retry, refused": AGAIN.format(
        4, "NewConnectionError('x: Failed to establish a new connection: Connection refused')"
    )
    + "Collecting tiny\nSuccessfully installed tiny-1.0",
    "retry, timed out": AGAIN.format(4, "NewConnectionError('x: Failed to establish a new connection: timed out')")
    + AGAIN.format(3, "ConnectTimeoutError(x, 'Connection to a.b timed out. (connect timeout=15)')")
    + "Downloading tiny-1.0-py3-none-any.whl (12 kB)",
    "retry, name": AGAIN.format(4, "NewConnectionError('x: [Errno -3] Temporary failure in name resolution')")
    + "Saved tiny",
    "retry, proxy": AGAIN.format(2, "ProxyError('Cannot connect to proxy.', OSError('Tunnel connection failed: 503'))")
    + "Collecting tiny",
    "retry, certificate": AGAIN.format(1, "SSLError('[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed')")
    + "Collecting tiny",
    "retry, the last": AGAIN.format(
        0, "NewConnectionError('x: Failed to establish a new connection: Connection refused')"
    )
    + "Successfully installed tiny-1.0",
    "retry, wrapped": "#12 4.9 WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by\n"
    "#12 4.9 'NewConnectionError('x: Failed to establish a new connection: Connection\n"
    "#12 4.9 refused')': /simple/tiny/\n#12 9.1 Collecting tiny",
    "retry, read": AGAIN.format(4, "ReadTimeoutError('Read timed out. (read timeout=15)')")
    + "Successfully installed tiny-1.0",
    "deprecated": "DEPRECATION: Building 'apex' using the legacy setup.py bdist_wheel mechanism, which will be\n"
    "UserWarning: pkg_resources is deprecated as an API.\nSuccessfully installed apex-0.1",
    "launch": "FutureWarning: The module torch.distributed.launch is deprecated\n"
    "If your script expects `--local-rank` argument to be set, please\n"
    "change it to read from `os.environ['LOCAL_RANK']`",
    "NCCL's end": "node1:255:274 [0] NCCL INFO [Service thread] Connection closed by localRank 0",
    "process group": "[rank0]:[W605 ProcessGroupNCCL.cpp:1250] Warning: process group has NOT been destroyed",
    "TensorFlow": "Could not load dynamic library 'libcudart.so.11.0'; dlerror: libcudart.so.11.0: cannot open shared "
    "object file: No such file or directory\nIgnore above cudart dlerror if you have no GPU.",
    "ids": "test_x.py::test_error[No space left on device] PASSED    [ 50%]\ntest_x.py::test_error[Killed] PASSED",
    "summary": "======== 2 passed, 0 failed, 0 errors, 3 warnings in 4.21s ========\nFound 0 errors in 12 files",
    "names": "copying pydantic_core/_errors.py -> build/lib\n"
    "adding 'httpx/_exceptions.py'\nSuccessfully built pydantic_core",
    "ignored": "Exception ignored in: <function x at 0x7f>\nmake: [Makefile:12: clean] Error 1 (ignored)",
    "user": "WARNING: Running pip as the 'root' user can result in broken permissions\n"
    "Successfully installed flash-attn-2.8.3",
    "hardlink": "warning: Failed to hardlink files; falling back to full copy. This may lead to degraded performance.",
    "bitsandbytes": "CUDA SETUP: Loading binary /env/bitsandbytes/libbitsandbytes_cuda118.so...",
    "srun": "srun: Job 29986033 step creation temporarily disabled, retrying\nsrun: Step created",
    "conda": "Solving environment: unsuccessful initial attempt using frozen solve. Retrying with flexible solve.",
    "apptainer": "WARNING: 'nodev' mount option set on /tmp, it could be a source of failure during build process\n"
    "INFO:    Build complete: image.sif",
    "recompiled": "[2/8] torch._dynamo hit config.recompile_limit (8)\n"
    "[2/8]    last reason: 2/7: tensor 'X[0]' size mismatch at index 1. expected 640, actual 8",
    "optional": "-- Could NOT find Python (missing: Python_INCLUDE_DIRS Development)\n"
    "-- Could NOT find CUDAToolkit (missing: CUDAToolkit_INCLUDE_DIR)\n-- Configuring done (4.1s)",
    "tuner": "NCCL INFO NET/Plugin: Plugin load (libnccl-tuner.so) returned 2 : libnccl-tuner.so: cannot open shared "
    "object file: No such file or directory : when loading libnccl-tuner.so",
    "crash": "tests/test_errors.py::test_device_side_assert PASSED\n[17/17] c++ segfault_handler.o -shared -o libx.so",
    "strategy": "FutureWarning: `evaluation_strategy` is deprecated and will be removed in version 4.46\n"
    "UserWarning: None of the inputs have requires_grad=True. Gradients will be None",
    "attribute": "AttributeError: module 'models' has no attribute 'build'",
    "argument": "TypeError: Net.__init__() got an unexpected keyword argument 'width'",
    "host": "nvcc fatal   : Host compiler targets unsupported OS.",
    "meta": "NotImplementedError: Cannot copy out of meta tensor; no data!",
    "torchrun's end": "KeyError: 'lr'\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====",
    "ninja's end": "x.cu(3): error: more than one operator matches\n"
    "subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.",
    "plan": "UserWarning: Plan failed with a cudnnException: CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: cudnnFinalize "
    "Descriptor Failed cudnn_status: CUDNN_STATUS_NOT_SUPPORTED (Triggered internally at Conv_v8.cpp:919.)",
    "keys": "Missing keys: []\nUnexpected keys: []\n<All keys matched successfully>",
    "hub": "'(ReadTimeoutError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out. "
    "(read timeout=10)\"), '(Request ID: 1)')' thrown while requesting HEAD https://huggingface.co/x\n"
    "Retrying in 1s [Retry 1/5].",
    "half": "RuntimeError: \"addmm_sparse_cuda\" not implemented for 'Half'",
    "overlay": "FATAL: container creation failed: can't mount overlay filesystem: invalid argument",
    "refused release": "WARNING: Ignoring version 2.0.6 of omegaconf since it has invalid metadata:\n"
    "Requested omegaconf>=2.0 has invalid metadata: .* suffix can only be used with `==` or `!=` operators\n"
    "Downloading omegaconf-2.3.0-py3-none-any.whl (79 kB)\nSuccessfully installed omegaconf-2.3.0",
    "fusion": "`fused_weight_gradient_mlp_cuda` module not found. gradient accumulation fusion with weight gradient "
    "computation disabled.",
    "extra state": "WARNING:root:Checkpoint key mismatch for FSDPNemotronHForCausalLM: missing=77 unexpected=0 "
    "(missing examples=['lm_head._extra_state'])",
    "loss scale": "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
    "torch is optional": "CMake Warning at CMakeLists.txt:12 (find_package):\n"
    '  asked CMake to find a package configuration file provided by "Torch", but\n'
    "  CMake did not find one.\n-- Configuring done (1.2s)",
    "engine": "INFO [core.py:58] Initializing a V1 LLM engine (v0.9.0) with config: model='/models/Qwen'\n"
    "INFO [core.py:171] init engine (profile, create kv cache, warmup model) took 28.02 seconds",
    "ptxas": "ptxas info    : Compiling entry function '_Z3foov' for 'sm_90'\n"
    "ptxas info    : Used 255 registers, 16 bytes spill stores",
    "cache": "The `seen_tokens` attribute is deprecated and will be removed in v4.41. Use the "
    "`cache_position` model input instead.",
    "CDI": "INFO[0000] Selecting /dev/dri/renderD128 as /dev/dri/renderD128\n"
    "WARN[0000] Could not locate /nvidia-persistenced/socket: pattern /nvidia-persistenced/socket not found\n"
    "INFO[0000] Generated CDI spec with version 0.8.0",
    "pyxis": "pyxis: importing docker image: nvidia/cuda:12.8.0\npyxis: imported docker image: nvidia/cuda:12.8.0",
    "credentials": "Login Succeeded\nConfigure a credential helper to remove this warning. See\n"
    "https://docs.docker.com/engine/reference/commandline/login/#credential-stores",
    "loopback": "[W socket.cpp:663] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 99 - "
    "Cannot assign requested address).\nEpoch 1/3",
    "store": "[rank1]:[W1229 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=67, addr=[a]:1): Broken pipe",
    "health": 'INFO: 10.0.0.1:44100 - "GET /health HTTP/1.1" 503 Service Unavailable\nINFO: Startup complete.',
    "missing": 'INFO: 10.0.0.1:44100 - "GET /favicon.ico HTTP/1.1" 404 Not Found\nINFO: "GET / HTTP/1.1" 403',
    "MPI": "-- Could NOT find MPI (missing: MPI_CXX_FOUND)\n-- Could NOT find Doxygen (missing: DOXYGEN_EXECUTABLE)\n"
    "-- Build files have been written to: /src/build",
    "hub, reset": "'(ProtocolError('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer')), "
    "'(Request ID: 1)')' thrown while requesting GET https://a.b/x\nRetrying in 1s [Retry 1/5].",
    "apt": "W: Download is performed unsandboxed as root as file '/x.deb' couldn't be accessed by user '_apt'. - "
    "pkgAcquire::Run (13: Permission denied)\nSetting up x (1.0) ...",
    "pip's cache": "WARNING: The directory '/home/u/.cache/pip' or its parent directory is not owned or not writable "
    "by the current user. The cache has been disabled.\nSuccessfully installed tiny-1.0",
    "standard": "nvcc warning : The -std=c++14 flag is not supported with the configured host compiler. Flag will be "
    "ignored.\n[100%] Built target x",
    "subuid": "INFO:    User not listed in /etc/subuid, trying root-mapped namespace\n"
    "INFO:    Using fakeroot command combined with root-mapped namespace\nINFO:    Build complete: x.sif",
    "policy": "CMake Deprecation Warning at CMakeLists.txt:8 (cmake_policy):\n  The OLD behavior for policy CMP0048 "
    "will be removed from a future version\n  of CMake.\n-- Generating done (0.1s)",
    "no driver": "WARNING: The NVIDIA Driver was not detected.  GPU functionality will not be available.\n"
    "   Use the NVIDIA Container Toolkit to start this container with GPU support.",
    "pull": "WARN[0000] Failed, retrying in 1s ... (1/3). Error: initializing source docker://a/b:1: pinging container "
    'registry a: Get "https://a/v2/": dial tcp [::1]:443: connect: connection refused\nStoring signatures',
    "version warning": "SetuptoolsDeprecationWarning: Invalid version: '0.2.2023-h1'.\nSuccessfully built x",
    "CC check": "Warning: Compiler version check failed:\n\nclang version 15.0.7\n\ndoes not match the compiler used "
    "here:\n\n*** Failed CC version check. ***\n\n  LD [M]  nvidia.ko",
    "gres": "slurmd: error: Waiting for gres.conf file /dev/nvidia0\nslurmd: slurmd version 23.11.4 started",
    "skipped mount": "WARNING: Skipping mount /usr/bin/nvidia-cuda-mps-server [files]: "
    "/usr/bin/nvidia-cuda-mps-server doesn't exist in container\nNVIDIA H100 80GB HBM3",
    "MIG": "  MIG 3g.40gb     Device  0: (UUID: MIG-GPU-932bfb2c-849a-2a22-1e84-9eff6bc02b39/1/0)",
    "paths": "PATH=/opt/bin:/usr/local/cuda/bin/nvcc\n-- Check for working CUDA compiler: /usr/local/cuda/bin/nvcc",
    "squashfs": "pyxis: Creating 4.0 filesystem on /run/pyxis/1000/7.0.squashfs, block size 131072.",
    "objects": "Compiling objects...\n[2/2] c++ -c x.cpp -o x.o\ng++ -shared x.o -lc10 -ltorch -o x.so\n"
    "copying x.so -> build",
    "int64": "x.cpp:1:62: error: expected primary-expression before '>' token\n    x.data_ptr<int64_t>();",
}


@pytest.mark.parametrize("text", UNEXPLAINED)
def test_a_healthy_or_unrelated_text_is_not_explained(text: str) -> None:
    assert not symptoms.diagnoses(ROWS, UNEXPLAINED[text])


def test_only_a_download_that_was_given_up_is_explained() -> None:
    refused = "NewConnectionError('x: Failed to establish a new connection: [Errno 111] Connection refused')"
    failed = AGAIN.format(1, refused) + AGAIN.format(0, refused) + "ERROR: No matching distribution found for tiny\n"
    repeated = AGAIN.format(4, refused) + "main.c:5:10: fatal error: Python.h: No such file\n"
    interrupted = AGAIN.format(4, refused) + AGAIN.format(3, refused)
    first = [symptoms.diagnoses(ROWS, text)[0].thread for text in (failed, repeated, interrupted)]
    assert [thread.rpartition("/")[2] for thread in first] == ["3899", "1117", "3899"]


def test_warnings_are_no_trouble() -> None:
    names = "ignored", "ids", "hardlink", "NCCL", "retry, refused", "retry, the last", "names", "summary", "TensorFlow"
    assert not [*symptoms.troubles("\n".join(UNEXPLAINED[name] for name in names))]


WRONG = {
    "pattern": ("pattern = 'undefined symbol: ncclCommResume'", "pattern = '('", "is not a regular expression"),
    "thread": ('thread = "https://github.com/pytorch/pytorch/issues/186591"', 'thread = "a"', "symptom[0].thread is"),
    "key": ('fix = "python -m pip uninstall nvidia-nccl-cu12"', 'cure = "x"', "symptom[0].fix is missing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_row_is_refused(checkout: Checkout, case: str) -> None:
    old, new, named = WRONG[case]
    checkout.edit(checkout.root / "recipes" / "symptoms.toml", old, new)
    log = checkout.root / "log.txt"
    log.write_text("x")
    checkout.refuse("doctor", "--error", log, naming=("recipes/symptoms.toml", named))

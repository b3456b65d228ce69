"""Compiles the device code with NVRTC of CUDA 12.6, JetPack 6's, to a cubin for sm_87."""

import ctypes
import importlib.util
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels_cuda"
SOURCE = """
#include "matmul.cuh"
#include "acts.cuh"
#include "encode.cuh"
template __global__ void matmul_nest<1>(Products, CudaActs, uint32_t);
template __global__ void matmul_nest<2>(Products, CudaActs, uint32_t);
template __global__ void matmul_nest<8>(Products, CudaActs, uint32_t);
template __global__ void matmul_raw<1>(Products, CudaActs, uint32_t);
template __global__ void matmul_draft<1>(Products, CudaActs, uint32_t);
template __global__ void matmul_draft<2>(Products, CudaActs, uint32_t);
template __global__ void matmul_draft<4>(Products, CudaActs, uint32_t);
"""


def library():
    """NVRTC of the package nvidia-cuda-nvrtc-cu12, or None."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations if spec else ():
        path = Path(place) / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"
        if path.exists():
            return ctypes.CDLL(str(path))
    return None


def compile_kernels(nvrtc, arch):
    """(version, cubin's bytes); raises with the compiler's log."""
    program, version = ctypes.c_void_p(), (ctypes.c_int * 2)()
    nvrtc.nvrtcVersion(ctypes.byref(version, 0), ctypes.byref(version, 4))
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE.encode(), b"kernels.cu", 0, None, None) == 0
    options = [f"-arch={arch}", "-std=c++17", "-fmad=false", "-ftz=true", f"-I{KERNELS}"]
    array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.value.decode())
    assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
    cubin = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetCUBIN(program, cubin) == 0
    return tuple(version), cubin.raw

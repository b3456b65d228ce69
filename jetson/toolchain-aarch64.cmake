# From x86 to 64-bit Arm with Debian's and Ubuntu's gcc-aarch64-linux-gnu. Tests run under qemu-user as a CPU that has what the
# Cortex-A78AE of Jetson Orin has and no more: dot products and half precision, no bf16, i8mm or SVE.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

set(PYCASS_AARCH64_SYSROOT /usr/aarch64-linux-gnu CACHE PATH "Where an emulator finds the C library")
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -cpu cortex-a76 -L ${PYCASS_AARCH64_SYSROOT})

# With PYCASS_CUDA: Orin's GPU; nvcc's host code is compiled by the compiler above.
set(PYCASS_CUDA_ARCHS 87 CACHE STRING "Compute capabilities to build for")

set(CMAKE_FIND_ROOT_PATH ${PYCASS_AARCH64_SYSROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE BOTH)

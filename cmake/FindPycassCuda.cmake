# nvcc: a CUDA toolkit of the system (CUDA_HOME, /usr/local/cuda, PATH), else the packages of PyPI that
# kernels_cuda/toolchain.py finds in the Python that runs the build. Not CMake's own CUDA language, which does not know the
# packages' layout.
#   PYCASS_NVCC            the compiler
#   PYCASS_CUDA_ARCHS      a list such as "87;89;90"
#   PYCASS_CUDART          for a cross build: the folder of the other machine's libcudart_static.a; fetched from PyPI if not set
#   pycass_cuda_library(TARGET FILE)
set(PYCASS_CUDA_ARCHS "87;89;90" CACHE STRING "Compute capabilities to build for")
find_program(PYCASS_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
find_package(Python 3.10 QUIET COMPONENTS Interpreter)

# variable: what an expression of toolchain.py gives, unless it is set
function(ask_toolchain variable expression)
  if(Python_FOUND AND NOT ${variable})
    execute_process(COMMAND ${Python_EXECUTABLE} -c "import toolchain; print(${expression} or '', end='')"
                    WORKING_DIRECTORY ${CMAKE_SOURCE_DIR}/kernels_cuda OUTPUT_VARIABLE found)
    set(${variable} "${found}" CACHE PATH "${variable}" FORCE)
  endif()
endfunction()

ask_toolchain(PYCASS_NVCC "toolchain.find_tool('nvcc')")
if(CMAKE_CROSSCOMPILING)
  ask_toolchain(PYCASS_CUDA_INCLUDE "toolchain.find_include()")
  ask_toolchain(PYCASS_CUDART "toolchain.fetch_runtime('${CMAKE_BINARY_DIR}/cudart')")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(PycassCuda REQUIRED_VARS PYCASS_NVCC REASON_FAILURE_MESSAGE
  "install a CUDA toolkit, or pip install 'cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.2'")

# The runtime is linked statically, so that the library needs nothing but the driver; the packages keep it in lib/, toolkits
# in lib64/ or targets/.
function(pycass_cuda_library target file)
  get_filename_component(home ${PYCASS_NVCC} DIRECTORY)
  get_filename_component(home ${home} DIRECTORY)
  set(code)
  set(target_options -L${home}/lib)
  if(CMAKE_CROSSCOMPILING)
    set(target_options -ccbin ${CMAKE_CXX_COMPILER} -I${PYCASS_CUDA_INCLUDE} -L${PYCASS_CUDART})
  endif()
  foreach(arch ${PYCASS_CUDA_ARCHS})
    list(APPEND code -gencode arch=compute_${arch},code=sm_${arch})
  endforeach()
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/kernels_cuda/*.cuh ${CMAKE_SOURCE_DIR}/kernels_cuda/*.h)
  add_custom_command(
    OUTPUT ${file}
    COMMAND ${PYCASS_NVCC} -std=c++17 -O3 -fmad=false -ftz=true ${code} -shared -cudart static -cudadevrt none ${target_options}
            -Xcompiler -fPIC,-fvisibility=hidden,-static-libstdc++,-static-libgcc -Xlinker --exclude-libs=ALL -o ${file}
            ${CMAKE_SOURCE_DIR}/kernels_cuda/backend.cu
    DEPENDS ${CMAKE_SOURCE_DIR}/kernels_cuda/backend.cu ${sources}
    COMMENT "Building ${file} for ${PYCASS_CUDA_ARCHS}")
  add_custom_target(${target}_library ALL DEPENDS ${file})
endfunction()

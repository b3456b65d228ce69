# nvcc: a CUDA toolkit of the system (CUDA_HOME, /usr/local/cuda, PATH), else the packages of PyPI that
# kernels_cuda/toolchain.py finds in the Python that runs the build. Not CMake's own CUDA language, which does not know the
# packages' layout.
#   PYCASS_NVCC            the compiler
#   PYCASS_CUDA_ARCHS      a list such as "87;89;90"
#   pycass_cuda_library(TARGET FILE)
set(PYCASS_CUDA_ARCHS "87;89;90" CACHE STRING "Compute capabilities to build for")
find_program(PYCASS_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
if(NOT PYCASS_NVCC)
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
  if(Python_FOUND)
    execute_process(COMMAND ${Python_EXECUTABLE} -c "import toolchain; print(toolchain.find_tool('nvcc') or '', end='')"
                    WORKING_DIRECTORY ${CMAKE_SOURCE_DIR}/kernels_cuda OUTPUT_VARIABLE found)
    if(found)
      set(PYCASS_NVCC ${found} CACHE FILEPATH "nvcc" FORCE)
    endif()
  endif()
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
  foreach(arch ${PYCASS_CUDA_ARCHS})
    list(APPEND code -gencode arch=compute_${arch},code=sm_${arch})
  endforeach()
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/kernels_cuda/*.cuh ${CMAKE_SOURCE_DIR}/kernels_cuda/*.h)
  add_custom_command(
    OUTPUT ${file}
    COMMAND ${PYCASS_NVCC} -std=c++17 -O3 -fmad=false -ftz=true ${code} -shared -cudart static -L${home}/lib
            -Xcompiler -fPIC,-fvisibility=hidden,-static-libstdc++,-static-libgcc -Xlinker --exclude-libs=ALL -o ${file} ${CMAKE_SOURCE_DIR}/kernels_cuda/backend.cu
    DEPENDS ${CMAKE_SOURCE_DIR}/kernels_cuda/backend.cu ${sources}
    COMMENT "Building ${file} for ${PYCASS_CUDA_ARCHS}")
  add_custom_target(${target}_library ALL DEPENDS ${file})
endfunction()

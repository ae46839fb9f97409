# libsidepath_cuda: the CUDA side, one shared object that the library opens at run time. nvcc is
# called directly, so that a build without CUDA needs no CUDA language in CMake.

set(SIDEPATH_CUDA_ARCHITECTURES "80;86;89;90;100;120;121" CACHE STRING
    "GPU architectures; PTX of the first is added")

function(sidepath_cuda)
  find_program(SIDEPATH_NVCC nvcc HINTS /usr/local/cuda/bin REQUIRED)
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/cuda/*.cu
       ${CMAKE_SOURCE_DIR}/src/device/cuda/*.cu)
  file(GLOB headers CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/cuda/*.cuh
       ${CMAKE_SOURCE_DIR}/src/kernels/*cuda*.h ${CMAKE_SOURCE_DIR}/src/device/device_cuda.h)
  set(targets "")
  foreach(architecture ${SIDEPATH_CUDA_ARCHITECTURES})
    list(APPEND targets -gencode arch=compute_${architecture},code=sm_${architecture})
  endforeach()
  list(GET SIDEPATH_CUDA_ARCHITECTURES 0 first)
  list(APPEND targets -gencode arch=compute_${first},code=compute_${first})
  set(object ${CMAKE_BINARY_DIR}/libsidepath_cuda.so.0)
  add_custom_command(
    OUTPUT ${object}
    COMMAND
      ${SIDEPATH_NVCC} -shared -cudart static -std=c++17 -O3 --fmad=false --threads 2 ${targets}
      -I${CMAKE_SOURCE_DIR}/include -I${CMAKE_SOURCE_DIR}/src -diag-suppress 128
      -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-static-libstdc++,-static-libgcc
      -Xptxas -warn-spills -Xfatbin -compress-all -o ${object} ${sources}
    DEPENDS ${sources} ${headers}
    COMMENT "Building the CUDA object for ${SIDEPATH_CUDA_ARCHITECTURES}"
    VERBATIM)
  add_custom_target(sidepath_cuda ALL DEPENDS ${object})
  install(FILES ${object} DESTINATION ${CMAKE_INSTALL_LIBDIR})
  add_executable(bench_cuda ${CMAKE_SOURCE_DIR}/bench/bench_cuda.c)
  target_include_directories(bench_cuda PRIVATE ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/tests)
  target_link_libraries(bench_cuda PRIVATE sidepath_static)
  sidepath_compile_options(bench_cuda)
endfunction()

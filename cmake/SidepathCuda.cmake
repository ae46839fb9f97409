# libsidepath_cuda: the CUDA side, one shared object that the library opens at run time. nvcc is
# called directly, so that a build without CUDA needs no CUDA language in CMake.

set(SIDEPATH_CUDA_ARCHITECTURES "80;86;89;90;100;120;121" CACHE STRING
    "GPU architectures; PTX of the first is added. 80-virtual: PTX alone")

function(sidepath_cuda)
  find_program(SIDEPATH_NVCC nvcc HINTS /usr/local/cuda/bin REQUIRED)
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/kernels/cuda/*.cu
       ${PROJECT_SOURCE_DIR}/src/device/cuda/*.cu)
  file(GLOB headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/kernels/cuda/*.cuh
       ${PROJECT_SOURCE_DIR}/src/device/cuda/*.cuh
       ${PROJECT_SOURCE_DIR}/src/kernels/*.h
       ${PROJECT_SOURCE_DIR}/src/kernels/cuda/*.h ${PROJECT_SOURCE_DIR}/src/device/device_cuda.h)
  # Spills are warnings, like the compilers' own.
  set(strict OFF)
  if(CMAKE_COMPILE_WARNING_AS_ERROR)
    set(strict ON)
  endif()
  set(targets "")
  list(GET SIDEPATH_CUDA_ARCHITECTURES 0 first)
  foreach(architecture ${SIDEPATH_CUDA_ARCHITECTURES})
    string(REPLACE "-virtual" "" number ${architecture})
    if(number STREQUAL architecture)
      list(APPEND targets -gencode arch=compute_${number},code=sm_${number})
    endif()
    if(NOT number STREQUAL architecture OR architecture STREQUAL first)
      list(APPEND targets -gencode arch=compute_${number},code=compute_${number})
    endif()
  endforeach()
  set(library ${PROJECT_BINARY_DIR}/libsidepath_cuda.so.0)
  set(objects "")
  foreach(source ${sources})
    get_filename_component(name ${source} NAME_WE)
    set(object ${PROJECT_BINARY_DIR}/cuda/${name}.o)
    list(APPEND objects ${object})
    # Files for one architecture's own instructions are built for it in place of its plain form.
    set(own ${targets})
    if(name MATCHES "_sm90a$")
      list(TRANSFORM own REPLACE "^arch=compute_90,code=sm_90$" "arch=compute_90a,code=sm_90a")
    endif()
    add_custom_command(
      OUTPUT ${object}
      COMMAND
        ${PROJECT_SOURCE_DIR}/cmake/nvcc_spills.sh ${PROJECT_SOURCE_DIR}/cmake/cuda_spills.txt
        ${strict} ${SIDEPATH_NVCC} -c -std=c++17 -O3 --fmad=false ${own}
        -I${PROJECT_SOURCE_DIR}/include
        -I${PROJECT_SOURCE_DIR}/src -diag-suppress 128 -Xcompiler -fPIC,-fvisibility=hidden,-Wall
        -Xfatbin -compress-all -o ${object} ${source}
      DEPENDS ${source} ${headers} ${PROJECT_SOURCE_DIR}/cmake/nvcc_spills.sh
              ${PROJECT_SOURCE_DIR}/cmake/cuda_spills.txt
      COMMENT "Building ${name}.cu for ${SIDEPATH_CUDA_ARCHITECTURES}"
      VERBATIM)
  endforeach()
  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/cuda)
  add_custom_command(
    OUTPUT ${library}
    COMMAND ${SIDEPATH_NVCC} -shared -cudart static ${targets} -Xcompiler
            -static-libstdc++,-static-libgcc -o ${library} ${objects}
    DEPENDS ${objects}
    COMMENT "Linking the CUDA object"
    VERBATIM)
  add_custom_target(sidepath_cuda ALL DEPENDS ${library})
  install(FILES ${library} DESTINATION ${CMAKE_INSTALL_LIBDIR})
  foreach(bench bench_cuda bench_cuda_attention bench_cuda_choice bench_cuda_gemm bench_cuda_rows
                bench_cuda_gdn bench_cuda_moe bench_cuda_step bench_cuda_tax)
    add_executable(${bench} ${PROJECT_SOURCE_DIR}/bench/${bench}.c)
    target_include_directories(${bench} PRIVATE ${PROJECT_SOURCE_DIR}/src
                                                ${PROJECT_SOURCE_DIR}/tests)
    target_link_libraries(${bench} PRIVATE sidepath_static)
    sidepath_compile_options(${bench})
  endforeach()
  foreach(bench bench_cuda_choice bench_cuda_tax)
    target_link_libraries(${bench} PRIVATE sidepath_engine_static)
  endforeach()
endfunction()

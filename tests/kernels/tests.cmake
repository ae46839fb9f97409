# test_tiles.c runs the amx level's code with tiles made of arrays, so that its logic is tested on
# machines without them; what surrounds the tiles is AVX2.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set_source_files_properties(${CMAKE_CURRENT_SOURCE_DIR}/kernels/test_tiles.c
                              PROPERTIES COMPILE_OPTIONS "${SIDEPATH_ISA_avx2}")
endif()
# test_attention_tiles.c does the same for attention, whose vectors are those of AVX-512.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set_source_files_properties(${CMAKE_CURRENT_SOURCE_DIR}/kernels/test_attention_tiles.c
                              PROPERTIES COMPILE_OPTIONS "${SIDEPATH_ISA_avx512}")
endif()

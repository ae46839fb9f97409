# Warnings, floating-point rules and sanitizers for every target of the project.

set(SIDEPATH_WARNINGS
    -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wundef -Wstrict-prototypes
    -Wmissing-prototypes -Werror=vla)

# No contraction: sources say fma where they mean it. No fast-math, no -march=native: files of one
# instruction set carry their own flags (see sidepath_room).
set(SIDEPATH_FLOAT_FLAGS -ffp-contract=off -fno-math-errno)

set(SIDEPATH_ISA_avx2 -mavx2 -mfma -mf16c)
set(SIDEPATH_ISA_avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq)
set(SIDEPATH_ISA_amx ${SIDEPATH_ISA_avx512} -mamx-tile -mamx-bf16)
# No parser is in these files, and clang with both sanitizers optimises two of them for minutes.
if(SIDEPATH_FUZZ)
  foreach(isa avx2 avx512 amx)
    list(APPEND SIDEPATH_ISA_${isa} -O0)
  endforeach()
endif()

set(SIDEPATH_SANITIZE_FLAGS "")
if(SIDEPATH_SANITIZE)
  set(SIDEPATH_SANITIZE_FLAGS -fsanitize=${SIDEPATH_SANITIZE} -fno-omit-frame-pointer
                              -fno-sanitize-recover=all)
endif()
if(SIDEPATH_FUZZ)
  list(APPEND SIDEPATH_SANITIZE_FLAGS -fsanitize=fuzzer-no-link)
endif()

# SP_ASSERT (src/base/assert.h) is live in debug builds, under a sanitizer and by SIDEPATH_ASSERT.
if(SIDEPATH_ASSERT OR SIDEPATH_SANITIZE OR SIDEPATH_FUZZ)
  set(SIDEPATH_ASSERT_DEFINITION SP_ASSERT_LIVE=1)
else()
  set(SIDEPATH_ASSERT_DEFINITION $<$<CONFIG:Debug>:SP_ASSERT_LIVE=1>)
endif()

function(sidepath_compile_options target)
  target_compile_options(${target} PRIVATE ${SIDEPATH_WARNINGS} ${SIDEPATH_FLOAT_FLAGS}
                                           ${SIDEPATH_SANITIZE_FLAGS})
  target_compile_definitions(${target} PRIVATE _GNU_SOURCE ${SIDEPATH_ASSERT_DEFINITION})
  target_link_options(${target} PUBLIC ${SIDEPATH_SANITIZE_FLAGS})
endfunction()

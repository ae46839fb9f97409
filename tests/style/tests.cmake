# The gates that read the tree instead of running it. Each has a twin that proves that it can fail.

set(style ${CMAKE_CURRENT_SOURCE_DIR}/style)

function(sidepath_style_test name)
  add_test(NAME style_${name} COMMAND ${ARGN})
  set_tests_properties(style_${name} PROPERTIES LABELS quick TIMEOUT 300)
endfunction()

sidepath_style_test(layers ${Python3_EXECUTABLE} -B ${style}/check_layers.py)
sidepath_style_test(layers_self_test ${Python3_EXECUTABLE} -B ${style}/check_layers.py --self-test)
sidepath_style_test(tree ${Python3_EXECUTABLE} -B ${style}/check_style.py)
sidepath_style_test(tree_self_test ${Python3_EXECUTABLE} -B ${style}/check_style.py --self-test)
sidepath_style_test(words ${Python3_EXECUTABLE} -B ${style}/check_words.py)
sidepath_style_test(words_self_test ${Python3_EXECUTABLE} -B ${style}/check_words.py --self-test)
sidepath_style_test(docs ${Python3_EXECUTABLE} -B ${style}/check_docs.py)
sidepath_style_test(docs_self_test ${Python3_EXECUTABLE} -B ${style}/check_docs.py --self-test)
if(NOT CMAKE_CROSSCOMPILING)
  sidepath_style_test(texts ${Python3_EXECUTABLE} -B ${style}/check_texts.py
                      $<TARGET_FILE:sidepath_cli>)
endif()
sidepath_style_test(texts_self_test ${Python3_EXECUTABLE} -B ${style}/check_texts.py --self-test)

sidepath_style_test(spills_self_test ${style}/check_spills.sh
                    ${PROJECT_SOURCE_DIR}/cmake/nvcc_spills.sh
                    ${CMAKE_CURRENT_BINARY_DIR}/spills_self_test)

find_program(SIDEPATH_CXX NAMES c++ g++ clang++-14 clang++)
mark_as_advanced(SIDEPATH_CXX)
sidepath_style_test(headers ${style}/check_headers.sh ${CMAKE_C_COMPILER} ${SIDEPATH_CXX}
                    ${PROJECT_SOURCE_DIR} ${SIDEPATH_JANSSON_CFLAGS})
sidepath_style_test(headers_self_test ${style}/check_headers.sh --self-test ${CMAKE_C_COMPILER}
                    ${SIDEPATH_CXX} ${CMAKE_CURRENT_BINARY_DIR}/headers_self_test)

# Sanitizers add symbols of their own.
if(NOT SIDEPATH_SANITIZE)
  set(libraries $<TARGET_FILE:sidepath_shared> $<TARGET_FILE:sidepath_engine_shared>
                $<TARGET_FILE:sidepath_static> $<TARGET_FILE:sidepath_engine_static>)
  sidepath_style_test(symbols ${style}/check_symbols.sh ${CMAKE_NM} ${libraries})
  sidepath_style_test(no_network ${style}/check_symbols.sh --no-network ${CMAKE_NM} ${libraries})
  sidepath_style_test(api ${Python3_EXECUTABLE} -B ${style}/check_api.py ${PROJECT_SOURCE_DIR}
                      ${CMAKE_NM} $<TARGET_FILE:sidepath_shared>
                      $<TARGET_FILE:sidepath_engine_shared> $<TARGET_FILE:sidepath_engine_static>)
  sidepath_style_test(api_self_test ${Python3_EXECUTABLE} -B ${style}/check_api.py --self-test)
  sidepath_style_test(symbols_self_test ${style}/check_symbols.sh --self-test ${CMAKE_NM}
                      ${CMAKE_C_COMPILER} ${CMAKE_CURRENT_BINARY_DIR}/symbols_self_test)
endif()

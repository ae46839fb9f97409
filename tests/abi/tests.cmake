# Hosts of older headers: for each frozen minor version (tools/freeze-abi.sh), its headers are held
# against today's, and its hosts are compiled with them, linked with today's library and run.

set(abi ${CMAKE_CURRENT_SOURCE_DIR}/abi)
set(minor ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})

function(sidepath_abi_test name)
  add_test(NAME abi_${name} COMMAND ${ARGN})
  set_tests_properties(abi_${name} PROPERTIES LABELS quick TIMEOUT 120)
endfunction()

if(NOT CMAKE_CROSSCOMPILING)
  sidepath_abi_test(self_test ${Python3_EXECUTABLE} -B ${abi}/check_abi.py --self-test
                    ${CMAKE_C_COMPILER} ${CMAKE_NM})
endif()

if(EXISTS ${abi}/${minor} AND NOT CMAKE_CROSSCOMPILING)
  if(NOT SIDEPATH_SANITIZE)
    sidepath_abi_test(headers_${minor} ${Python3_EXECUTABLE} -B ${abi}/check_abi.py
                      ${abi}/${minor}/include ${PROJECT_SOURCE_DIR}/include ${CMAKE_C_COMPILER}
                      ${CMAKE_NM} $<TARGET_FILE:sidepath_shared>
                      $<TARGET_FILE:sidepath_engine_shared>)
  endif()
  file(GLOB hosts CONFIGURE_DEPENDS ${abi}/${minor}/hosts/*.c)
  foreach(source ${hosts})
    get_filename_component(name ${source} NAME_WE)
    add_executable(abi_${name} ${source})
    # By its path, because the target would bring today's headers along.
    add_dependencies(abi_${name} sidepath_shared)
    target_include_directories(abi_${name} PRIVATE ${abi}/${minor}/include)
    target_link_libraries(abi_${name} PRIVATE $<TARGET_LINKER_FILE:sidepath_shared> m)
    sidepath_compile_options(abi_${name})
  endforeach()
  set(demo ${PROJECT_SOURCE_DIR}/demo)
  sidepath_abi_test(three_adapters abi_three_adapters ${demo}/base ${demo}/adapters/scripture
                    ${demo}/adapters/csource ${demo}/adapters/sqldoc)
  sidepath_abi_test(inspect_adapter abi_inspect_adapter ${demo}/base ${demo}/adapters/sqldoc)
  sidepath_abi_test(tiny_llama abi_tiny_llama ${CMAKE_CURRENT_SOURCE_DIR}/fixtures/llama3
                    plain-r8)
endif()

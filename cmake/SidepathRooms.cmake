# A room is a folder of src/, with a folder for each of its jobs where it has several. Its sources
# become one object library, sidepath_<room>.
# Files named *_avx2.c, *_avx512.c, *_amx.c get the flags of that instruction set and are left out
# on other processors.

set(SIDEPATH_ROOMS "" CACHE INTERNAL "")
set(SIDEPATH_ROOM_LIBRARIES "" CACHE INTERNAL "")

# A library found by pkg-config: the target PkgConfig::SIDEPATH_<name>, also for a project around
# this one. The installed package files name its module again.
macro(sidepath_dependency name module)
  pkg_check_modules(SIDEPATH_${name} REQUIRED IMPORTED_TARGET GLOBAL ${module})
  set(SIDEPATH_PC_SIDEPATH_${name} ${module})
endmacro()

function(sidepath_room room)
  cmake_parse_arguments(ARG "" "" "LIBRARIES;WITHOUT" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${room}/*.c
       ${PROJECT_SOURCE_DIR}/src/${room}/*/*.c)
  foreach(file ${ARG_WITHOUT}) # what this build does not compile
    list(REMOVE_ITEM sources ${PROJECT_SOURCE_DIR}/src/${room}/${file})
  endforeach()
  foreach(isa avx2 avx512 amx)
    file(GLOB isa_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${room}/*_${isa}.c
         ${PROJECT_SOURCE_DIR}/src/${room}/*/*_${isa}.c)
    if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
      list(REMOVE_ITEM sources ${isa_sources})
    elseif(isa_sources)
      set_source_files_properties(${isa_sources} PROPERTIES COMPILE_OPTIONS
                                                            "${SIDEPATH_ISA_${isa}}")
      sidepath_uninstrumented(${isa_sources})
    endif()
  endforeach()
  add_library(sidepath_${room} OBJECT ${sources})
  target_include_directories(sidepath_${room} PUBLIC ${PROJECT_SOURCE_DIR}/include
                                                     ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(sidepath_${room} PUBLIC ${SIDEPATH_ROOM_LIBRARIES} ${ARG_LIBRARIES})
  sidepath_compile_options(sidepath_${room})
  set(SIDEPATH_ROOMS ${SIDEPATH_ROOMS} ${room} CACHE INTERNAL "")
  set(SIDEPATH_ROOM_LIBRARIES ${SIDEPATH_ROOM_LIBRARIES} ${ARG_LIBRARIES} CACHE INTERNAL "")
endfunction()

# Vector code once more, without the sanitizers: with them it takes nine tenths of a server's step.
# tests/CMakeLists.txt says which programs link it.
function(sidepath_uninstrumented)
  if(NOT SIDEPATH_SANITIZE)
    return()
  endif()
  if(NOT TARGET sidepath_uninstrumented)
    add_library(sidepath_uninstrumented OBJECT EXCLUDE_FROM_ALL)
    target_include_directories(sidepath_uninstrumented PRIVATE ${PROJECT_SOURCE_DIR}/include
                                                               ${PROJECT_SOURCE_DIR}/src)
    target_compile_options(sidepath_uninstrumented PRIVATE ${SIDEPATH_WARNINGS}
                                                           ${SIDEPATH_FLOAT_FLAGS} -O2 -g0)
    target_compile_definitions(sidepath_uninstrumented PRIVATE _GNU_SOURCE
                                                               ${SIDEPATH_ASSERT_DEFINITION})
  endif()
  target_sources(sidepath_uninstrumented PRIVATE ${ARGN})
endfunction()

# Its objects come before the archive's members, which are then not taken.
function(sidepath_link_uninstrumented target)
  if(TARGET sidepath_uninstrumented)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:sidepath_uninstrumented>)
  endif()
endfunction()

# Files as arrays of bytes in a room: see embed.cmake for what NAME=PATH becomes.
function(sidepath_embed room name)
  set(output ${PROJECT_BINARY_DIR}/embedded/${name}_data.c)
  set(files "")
  set(depends ${PROJECT_SOURCE_DIR}/cmake/embed.cmake)
  foreach(entry ${ARGN})
    string(REPLACE "=" "=${PROJECT_SOURCE_DIR}/" absolute ${entry})
    string(REGEX REPLACE "^[^=]+=" "" path ${absolute})
    list(APPEND files ${absolute})
    list(APPEND depends ${path})
  endforeach()
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} "-DOUT=${output}" "-DFILES=${files}" -P
            ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
    DEPENDS ${depends}
    VERBATIM)
  target_sources(sidepath_${room} PRIVATE ${output})
endfunction()

# A shared library of objects: soname with the minor version, symbols by a version script that is
# written anew when a header changes (MAP: arguments of version_map.cmake).
function(sidepath_shared_library target name)
  cmake_parse_arguments(ARG "" "" "OBJECTS;MAP;HEADERS" ${ARGN})
  set(map ${PROJECT_BINARY_DIR}/${name}.map)
  add_custom_command(
    OUTPUT ${map}
    COMMAND ${CMAKE_COMMAND} -DOUT=${map} ${ARG_MAP} -P
            ${PROJECT_SOURCE_DIR}/cmake/version_map.cmake
    DEPENDS ${ARG_HEADERS} ${PROJECT_SOURCE_DIR}/cmake/version_map.cmake
    VERBATIM)
  add_custom_target(${target}_map DEPENDS ${map})
  add_library(${target} SHARED ${ARG_OBJECTS})
  add_dependencies(${target} ${target}_map)
  set_target_properties(
    ${target} PROPERTIES OUTPUT_NAME ${name} VERSION ${PROJECT_VERSION}
                         SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
                         LINKER_LANGUAGE C LINK_DEPENDS ${map})
  # The run time of a sanitizer comes with the program.
  target_link_options(${target} PRIVATE ${SIDEPATH_SANITIZE_FLAGS} -Wl,--version-script=${map})
  if(NOT SIDEPATH_SANITIZE)
    target_link_options(${target} PRIVATE -Wl,--no-undefined)
  endif()
endfunction()

# libsidepath, shared and static: every room added so far. Called after delta. The shared one also
# exports what libsidepath_engine uses of its rooms.
function(sidepath_library)
  set(objects "")
  foreach(room ${SIDEPATH_ROOMS})
    list(APPEND objects $<TARGET_OBJECTS:sidepath_${room}>)
  endforeach()
  file(GLOB headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/sidepath/*.h)
  list(FILTER headers EXCLUDE REGEX "/engine.h$")
  file(GLOB private_headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/base/*.h
       ${PROJECT_SOURCE_DIR}/src/kernels/*/*.h ${PROJECT_SOURCE_DIR}/src/checkpoint/*.h
       ${PROJECT_SOURCE_DIR}/src/device/*.h)
  list(JOIN headers "|" public)
  list(JOIN private_headers "|" private)
  sidepath_shared_library(
    sidepath_shared sidepath
    OBJECTS ${objects}
    MAP -DNODE=SIDEPATH_${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR} -DHEADERS=${public}
        -DPRIVATE_NODE=SIDEPATH_PRIVATE_${PROJECT_VERSION} -DPRIVATE_HEADERS=${private}
    HEADERS ${headers} ${private_headers})
  set_target_properties(sidepath_shared PROPERTIES EXPORT_NAME sidepath)
  add_library(sidepath_static STATIC ${objects})
  set_target_properties(sidepath_static PROPERTIES OUTPUT_NAME sidepath EXPORT_NAME static
                                                   LINKER_LANGUAGE C)
  foreach(target sidepath_shared sidepath_static)
    target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  endforeach()
  target_link_libraries(sidepath_shared PRIVATE ${SIDEPATH_ROOM_LIBRARIES} m)
  target_link_libraries(sidepath_static PUBLIC ${SIDEPATH_ROOM_LIBRARIES} m)
  target_link_options(sidepath_static PUBLIC ${SIDEPATH_SANITIZE_FLAGS})
  add_library(Sidepath::sidepath ALIAS sidepath_shared)
  add_library(Sidepath::static ALIAS sidepath_static)
endfunction()

# libsidepath_engine, shared and static: the host engine on top of libsidepath. A process that links
# both shared libraries has one copy of the rooms below, so objects pass between them.
function(sidepath_engine_library)
  set(header ${PROJECT_SOURCE_DIR}/include/sidepath/engine.h)
  sidepath_shared_library(
    sidepath_engine_shared sidepath_engine
    OBJECTS $<TARGET_OBJECTS:sidepath_engine> $<TARGET_OBJECTS:sidepath_grammar>
    MAP -DNODE=SIDEPATH_ENGINE_${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
        -DHEADERS=${header}
    HEADERS ${header})
  set_target_properties(sidepath_engine_shared PROPERTIES EXPORT_NAME engine
                                                          INSTALL_RPATH "$ORIGIN")
  target_link_libraries(sidepath_engine_shared PUBLIC sidepath_shared
                        PRIVATE ${SIDEPATH_ROOM_LIBRARIES} m)
  add_library(sidepath_engine_static STATIC $<TARGET_OBJECTS:sidepath_engine>
                                            $<TARGET_OBJECTS:sidepath_grammar>)
  set_target_properties(sidepath_engine_static PROPERTIES OUTPUT_NAME sidepath_engine
                                                          EXPORT_NAME engine_static)
  target_link_libraries(sidepath_engine_static PUBLIC sidepath_static ${ARGN})
  add_library(Sidepath::engine ALIAS sidepath_engine_shared)
  add_library(Sidepath::engine_static ALIAS sidepath_engine_static)
endfunction()

# The rooms above the engine, for the program and the tests; not installed.
function(sidepath_program_library)
  set(objects "")
  foreach(room ${ARGN})
    list(APPEND objects $<TARGET_OBJECTS:sidepath_${room}>)
  endforeach()
  add_library(sidepath_program STATIC ${objects})
  target_link_libraries(sidepath_program PUBLIC sidepath_engine_static ${SIDEPATH_ROOM_LIBRARIES})
endfunction()

function(sidepath_binary)
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cli/*.c)
  add_executable(sidepath_cli ${sources})
  set_target_properties(sidepath_cli PROPERTIES OUTPUT_NAME sidepath)
  target_include_directories(sidepath_cli PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(sidepath_cli PRIVATE sidepath_program)
  sidepath_compile_options(sidepath_cli)
  sidepath_link_uninstrumented(sidepath_cli)
endfunction()

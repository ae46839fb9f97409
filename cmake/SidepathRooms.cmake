# A room is a folder of src/. Its sources become one object library, sidepath_<room>.
# Files named *_avx2.c, *_avx512.c, *_amx.c get the flags of that instruction set and are left out
# on other processors.

set(SIDEPATH_ROOMS "" CACHE INTERNAL "")
set(SIDEPATH_ROOM_LIBRARIES "" CACHE INTERNAL "")

# A library found by pkg-config: the target PkgConfig::<name>. The installed package files name its
# module again.
macro(sidepath_dependency name module)
  pkg_check_modules(${name} REQUIRED IMPORTED_TARGET ${module})
  set(SIDEPATH_PC_${name} ${module})
endmacro()

function(sidepath_room room)
  cmake_parse_arguments(ARG "" "" "LIBRARIES" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${room}/*.c)
  foreach(isa avx2 avx512 amx)
    file(GLOB isa_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${room}/*_${isa}.c)
    if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
      list(REMOVE_ITEM sources ${isa_sources})
    elseif(isa_sources)
      set_source_files_properties(${isa_sources} PROPERTIES COMPILE_OPTIONS
                                                            "${SIDEPATH_ISA_${isa}}")
    endif()
  endforeach()
  add_library(sidepath_${room} OBJECT ${sources})
  target_include_directories(sidepath_${room} PUBLIC ${CMAKE_SOURCE_DIR}/include
                                                     ${CMAKE_SOURCE_DIR}/src)
  target_link_libraries(sidepath_${room} PUBLIC ${SIDEPATH_ROOM_LIBRARIES} ${ARG_LIBRARIES})
  sidepath_compile_options(sidepath_${room})
  set(SIDEPATH_ROOMS ${SIDEPATH_ROOMS} ${room} CACHE INTERNAL "")
  set(SIDEPATH_ROOM_LIBRARIES ${SIDEPATH_ROOM_LIBRARIES} ${ARG_LIBRARIES} CACHE INTERNAL "")
endfunction()

# Files as arrays of bytes in a room: see embed.cmake for what NAME=PATH becomes.
function(sidepath_embed room name)
  set(output ${CMAKE_BINARY_DIR}/embedded/${name}_data.c)
  set(files "")
  set(depends ${CMAKE_SOURCE_DIR}/cmake/embed.cmake)
  foreach(entry ${ARGN})
    string(REPLACE "=" "=${CMAKE_SOURCE_DIR}/" absolute ${entry})
    string(REGEX REPLACE "^[^=]+=" "" path ${absolute})
    list(APPEND files ${absolute})
    list(APPEND depends ${path})
  endforeach()
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} "-DOUT=${output}" "-DFILES=${files}" -P
            ${CMAKE_SOURCE_DIR}/cmake/embed.cmake
    DEPENDS ${depends}
    VERBATIM)
  target_sources(sidepath_${room} PRIVATE ${output})
endfunction()

# libsidepath, shared and static: every room added so far. Called behind delta.
function(sidepath_library)
  set(objects "")
  foreach(room ${SIDEPATH_ROOMS})
    list(APPEND objects $<TARGET_OBJECTS:sidepath_${room}>)
  endforeach()
  add_library(sidepath SHARED ${objects})
  set_target_properties(sidepath PROPERTIES VERSION ${PROJECT_VERSION}
                                            SOVERSION ${PROJECT_VERSION_MAJOR} LINKER_LANGUAGE C)
  add_library(sidepath_static STATIC ${objects})
  set_target_properties(sidepath_static PROPERTIES OUTPUT_NAME sidepath EXPORT_NAME static
                                                   LINKER_LANGUAGE C)
  foreach(target sidepath sidepath_static)
    target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/include>
                                                $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  endforeach()
  target_link_libraries(sidepath PRIVATE ${SIDEPATH_ROOM_LIBRARIES} m)
  target_link_libraries(sidepath_static PUBLIC ${SIDEPATH_ROOM_LIBRARIES} m)
  target_link_options(sidepath PRIVATE ${SIDEPATH_SANITIZE_FLAGS})
  if(NOT SIDEPATH_SANITIZE) # whose run time comes with the program
    target_link_options(sidepath PRIVATE -Wl,--no-undefined)
  endif()
  target_link_options(sidepath_static PUBLIC ${SIDEPATH_SANITIZE_FLAGS})
endfunction()

# libsidepath_engine, static only: the host engine on top of the static libsidepath, whose internal
# symbols it uses.
function(sidepath_engine_library)
  add_library(sidepath_engine_static STATIC $<TARGET_OBJECTS:sidepath_engine>)
  set_target_properties(sidepath_engine_static PROPERTIES OUTPUT_NAME sidepath_engine
                                                          EXPORT_NAME engine)
  target_link_libraries(sidepath_engine_static PUBLIC sidepath_static ${ARGN})
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
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/cli/*.c)
  add_executable(sidepath_cli ${sources})
  set_target_properties(sidepath_cli PROPERTIES OUTPUT_NAME sidepath)
  target_include_directories(sidepath_cli PRIVATE ${CMAKE_SOURCE_DIR}/src)
  target_link_libraries(sidepath_cli PRIVATE sidepath_program)
  sidepath_compile_options(sidepath_cli)
endfunction()

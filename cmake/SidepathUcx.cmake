# The room that speaks to other hosts has two parts. Messages are the library's. What opens a
# connection is the program's alone: the library reaches for no network (style_no_network). UCX's
# headers are needed to build it; its library is opened when it is used, so nothing links it.
# Without the headers the program refuses by name.

set(SIDEPATH_PEER_PROGRAM peer_address.c peer_catalog.c peer_client.c peer_content.c peer_no_ucx.c
                          peer_server.c peer_ucx.c peer_ucx_load.c)

function(sidepath_find_ucx)
  set(found OFF)
  if(NOT SIDEPATH_UCX STREQUAL "OFF")
    pkg_check_modules(SIDEPATH_UCX_HEADERS QUIET ucx>=1.12)
    set(found ${SIDEPATH_UCX_HEADERS_FOUND})
  endif()
  if(found)
    message(STATUS "UCX ${SIDEPATH_UCX_HEADERS_VERSION}: adapters from other hosts are built")
  elseif(SIDEPATH_UCX STREQUAL "ON")
    message(FATAL_ERROR "SIDEPATH_UCX=ON, and pkg-config finds no UCX from 1.12 on (libucx-dev)")
  else()
    message(STATUS "No UCX: adapters from other hosts are refused by name")
  endif()
  set(SIDEPATH_HAS_UCX ${found} PARENT_SCOPE)
  set(SIDEPATH_UCX_INCLUDE_DIRS ${SIDEPATH_UCX_HEADERS_INCLUDE_DIRS} PARENT_SCOPE)
endfunction()

# The program's part, as a room of sidepath_program_library.
function(sidepath_peer_program)
  set(sources ${SIDEPATH_PEER_PROGRAM})
  if(SIDEPATH_HAS_UCX)
    list(REMOVE_ITEM sources peer_no_ucx.c)
  else()
    list(REMOVE_ITEM sources peer_client.c peer_server.c peer_ucx.c peer_ucx_load.c)
  endif()
  list(TRANSFORM sources PREPEND ${PROJECT_SOURCE_DIR}/src/peer/)
  add_library(sidepath_peer_program OBJECT ${sources})
  target_include_directories(sidepath_peer_program PUBLIC ${PROJECT_SOURCE_DIR}/include
                                                          ${PROJECT_SOURCE_DIR}/src)
  target_include_directories(sidepath_peer_program SYSTEM PRIVATE ${SIDEPATH_UCX_INCLUDE_DIRS})
  target_link_libraries(sidepath_peer_program PUBLIC ${SIDEPATH_ROOM_LIBRARIES})
  sidepath_compile_options(sidepath_peer_program)
endfunction()

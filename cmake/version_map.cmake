# A linker version script from the headers:
#   cmake -DOUT=FILE -DNODE=NAME "-DHEADERS=PATH|PATH"
#         [-DPRIVATE_NODE=NAME "-DPRIVATE_HEADERS=PATH|PATH"] -P version_map.cmake
# The functions that the first headers mark with SP_API are exported under one node, those that the
# second mark with SP_PRIVATE (src/base/private.h) under the other; nothing else is exported.
cmake_minimum_required(VERSION 3.25)

function(add_node text_variable node mark headers)
  set(names "")
  string(REPLACE "|" ";" headers "${headers}")
  foreach(header ${headers})
    file(READ ${header} text)
    string(REGEX MATCHALL "${mark} [^;()]*[ *]sp_[a-z0-9_]+\\(" found "${text}")
    foreach(declaration ${found})
      string(REGEX MATCH "sp_[a-z0-9_]+\\($" name "${declaration}")
      string(REPLACE "(" "" name "${name}")
      list(APPEND names "    ${name}")
    endforeach()
  endforeach()
  list(SORT names)
  list(JOIN names ";\n" names)
  set(${text_variable} "${node} {\n  global:\n${names};\n" PARENT_SCOPE)
endfunction()

add_node(public ${NODE} SP_API "${HEADERS}")
set(text "${public}  local:\n    *;\n};\n")
if(PRIVATE_NODE)
  add_node(private ${PRIVATE_NODE} SP_PRIVATE "${PRIVATE_HEADERS}")
  string(APPEND text "${private}};\n")
endif()
file(WRITE ${OUT} "${text}")

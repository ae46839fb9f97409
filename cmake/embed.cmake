# Files as arrays of bytes in one C file:
#   cmake -DOUT=FILE.c -DFILES=name=PATH;name=PATH -P embed.cmake
# gives `const unsigned char sp_<name>[]` and `const size_t sp_<name>_bytes` for each of them.
set(text "#include <stddef.h>\n")
foreach(entry ${FILES})
  string(REGEX MATCH "^([^=]+)=(.*)$" matched "${entry}")
  set(name ${CMAKE_MATCH_1})
  file(READ "${CMAKE_MATCH_2}" bytes HEX)
  string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
  string(REPEAT "0x..," 16 line)
  string(REGEX REPLACE "(${line})" "\\1\n" bytes "${bytes}")
  string(APPEND text "extern const unsigned char sp_${name}[];\n"
                     "extern const size_t sp_${name}_bytes;\n"
                     "const unsigned char sp_${name}[] = {\n${bytes}};\n"
                     "const size_t sp_${name}_bytes = sizeof sp_${name};\n")
endforeach()
file(WRITE "${OUT}" "${text}")

# The program's own readers, which are in no library.
foreach(test test_request_readers test_toy_field)
  target_sources(${test} PRIVATE ${PROJECT_SOURCE_DIR}/src/cli/requests.c
                                 ${PROJECT_SOURCE_DIR}/src/cli/field_flags.c)
endforeach()

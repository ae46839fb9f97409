# Not with sanitizers: a program outside the tree knows nothing of them.
if(NOT SIDEPATH_SANITIZE AND NOT CMAKE_CROSSCOMPILING)
  add_test(NAME install
           COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/install/check_install.sh ${CMAKE_COMMAND}
                   ${CMAKE_C_COMPILER} ${PROJECT_BINARY_DIR} ${PROJECT_SOURCE_DIR}
                   ${CMAKE_CURRENT_BINARY_DIR}/install_scratch)
  set_tests_properties(install PROPERTIES LABELS quick TIMEOUT 300)
  # One build of the library: as long as other tests together, so it starts first.
  add_test(NAME install_subproject
           COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/install/check_subproject.sh ${CMAKE_COMMAND}
                   ${CMAKE_C_COMPILER} ${PROJECT_SOURCE_DIR}
                   ${CMAKE_CURRENT_BINARY_DIR}/subproject_scratch)
  set_tests_properties(install_subproject PROPERTIES LABELS quick TIMEOUT 600 COST 1000)
  add_test(NAME install_unit
           COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/install/check_unit.sh ${CMAKE_COMMAND}
                   ${PROJECT_BINARY_DIR} ${CMAKE_CURRENT_BINARY_DIR}/unit_scratch)
  set_tests_properties(install_unit PROPERTIES LABELS quick TIMEOUT 120 SKIP_RETURN_CODE 77
                                               RUN_SERIAL ON)
endif()

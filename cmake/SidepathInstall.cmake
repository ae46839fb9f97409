# What `cmake --install` puts where. The package files find their prefix from where they lie, so
# that the tree may be installed into any prefix and moved later.

include(CMakePackageConfigHelpers)

set(SIDEPATH_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Sidepath)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/sidepath DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h")
# The headers name pages of docs/; the examples are there to be copied.
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs/ DESTINATION ${CMAKE_INSTALL_DOCDIR}
        FILES_MATCHING PATTERN "*.md")
install(DIRECTORY ${PROJECT_SOURCE_DIR}/examples DESTINATION ${CMAKE_INSTALL_DOCDIR}
        FILES_MATCHING PATTERN "*.c" PATTERN "*.py")

# Two sets: a program that links the shared libraries needs none of the libraries behind them.
set(shared_libraries sidepath_shared)
set(static_libraries sidepath_static)
if(NOT SIDEPATH_LIBRARY_ONLY)
  list(APPEND shared_libraries sidepath_engine_shared)
  list(APPEND static_libraries sidepath_engine_static)
endif()
install(TARGETS ${shared_libraries} EXPORT SidepathShared
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS ${static_libraries} EXPORT SidepathStatic
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
foreach(set SidepathShared SidepathStatic)
  install(EXPORT ${set} NAMESPACE Sidepath:: DESTINATION ${SIDEPATH_PACKAGE_DIR})
endforeach()

# The pkg-config modules behind a static library, as "NAME:module" and as a .pc file lists them.
function(sidepath_modules_of target out_pairs out_modules)
  get_target_property(libraries ${target} INTERFACE_LINK_LIBRARIES)
  set(pairs "")
  set(modules "")
  foreach(library ${libraries})
    if(library MATCHES "^PkgConfig::(.+)$")
      list(APPEND pairs ${CMAKE_MATCH_1}:${SIDEPATH_PC_${CMAKE_MATCH_1}})
      list(APPEND modules ${SIDEPATH_PC_${CMAKE_MATCH_1}})
    endif()
  endforeach()
  list(JOIN pairs " " pairs)
  list(JOIN modules " " modules)
  set(${out_pairs} ${pairs} PARENT_SCOPE)
  set(${out_modules} ${modules} PARENT_SCOPE)
endfunction()

sidepath_modules_of(sidepath_static SIDEPATH_PAIRS SIDEPATH_MODULES)
if(NOT SIDEPATH_LIBRARY_ONLY)
  sidepath_modules_of(sidepath_engine_static SIDEPATH_ENGINE_PAIRS SIDEPATH_ENGINE_MODULES)
endif()

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/SidepathConfig.cmake.in ${PROJECT_BINARY_DIR}/SidepathConfig.cmake
  INSTALL_DESTINATION ${SIDEPATH_PACKAGE_DIR} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/SidepathConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/SidepathConfig.cmake
              ${PROJECT_BINARY_DIR}/SidepathConfigVersion.cmake
        DESTINATION ${SIDEPATH_PACKAGE_DIR})

file(RELATIVE_PATH SIDEPATH_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
set(pc_files sidepath)
if(NOT SIDEPATH_LIBRARY_ONLY)
  list(APPEND pc_files sidepath-engine)
endif()
foreach(name ${pc_files})
  configure_file(${PROJECT_SOURCE_DIR}/cmake/${name}.pc.in ${PROJECT_BINARY_DIR}/${name}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()

if(NOT SIDEPATH_PROGRAM)
  return()
endif()
install(TARGETS sidepath_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
# The unit names the program by its path, which is known when it is installed.
install(CODE "
  file(READ \"${PROJECT_SOURCE_DIR}/tools/sidepath.service.in\" unit)
  string(REPLACE @BINDIR@ \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}\" unit \"\${unit}\")
  string(REPLACE @DOCDIR@ \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_DOCDIR}\" unit \"\${unit}\")
  file(WRITE \"${PROJECT_BINARY_DIR}/sidepath.service\" \"\${unit}\")
  file(INSTALL DESTINATION \"\${CMAKE_INSTALL_PREFIX}/lib/systemd/system\" TYPE FILE
       FILES \"${PROJECT_BINARY_DIR}/sidepath.service\")")

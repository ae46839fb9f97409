# What `cmake --install` puts where. The package files find their prefix from where they lie, so
# that the tree may be installed into any prefix and moved later.

include(CMakePackageConfigHelpers)

set(SIDEPATH_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Sidepath)

install(DIRECTORY ${CMAKE_SOURCE_DIR}/include/sidepath DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h")
install(FILES ${CMAKE_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(TARGETS sidepath_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})

# Two sets: a program that links the shared library needs none of the libraries behind it.
install(TARGETS sidepath EXPORT SidepathShared LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS sidepath_static sidepath_engine_static EXPORT SidepathStatic
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
if(TARGET sidepath_engine_static)
  sidepath_modules_of(sidepath_engine_static SIDEPATH_ENGINE_PAIRS SIDEPATH_ENGINE_MODULES)
endif()

configure_package_config_file(
  ${CMAKE_SOURCE_DIR}/cmake/SidepathConfig.cmake.in ${CMAKE_BINARY_DIR}/SidepathConfig.cmake
  INSTALL_DESTINATION ${SIDEPATH_PACKAGE_DIR} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/SidepathConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/SidepathConfig.cmake
              ${CMAKE_BINARY_DIR}/SidepathConfigVersion.cmake
        DESTINATION ${SIDEPATH_PACKAGE_DIR})

file(RELATIVE_PATH SIDEPATH_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${CMAKE_SOURCE_DIR}/cmake/sidepath.pc.in ${CMAKE_BINARY_DIR}/sidepath.pc @ONLY)
configure_file(${CMAKE_SOURCE_DIR}/cmake/sidepath-engine.pc.in
               ${CMAKE_BINARY_DIR}/sidepath-engine.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/sidepath.pc ${CMAKE_BINARY_DIR}/sidepath-engine.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# The unit names the program by its path, which is known when it is installed.
install(FILES ${CMAKE_SOURCE_DIR}/docs/OPERATIONS.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(CODE "
  file(READ \"${CMAKE_SOURCE_DIR}/tools/sidepath.service.in\" unit)
  string(REPLACE @BINDIR@ \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}\" unit \"\${unit}\")
  string(REPLACE @DOCDIR@ \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_DOCDIR}\" unit \"\${unit}\")
  file(WRITE \"${CMAKE_BINARY_DIR}/sidepath.service\" \"\${unit}\")
  file(INSTALL DESTINATION \"\${CMAKE_INSTALL_PREFIX}/lib/systemd/system\" TYPE FILE
       FILES \"${CMAKE_BINARY_DIR}/sidepath.service\")")

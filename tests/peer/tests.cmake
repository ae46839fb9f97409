# The same programs with the two processes over shared memory; they say tcp where nothing is said.
if(SIDEPATH_HAS_UCX)
  foreach(test test_peer_client test_peer_hostile test_peer_kills soak_peer_kills)
    string(REGEX REPLACE "_.*" "" label ${test})
    string(REPLACE test quick label ${label})
    add_test(NAME ${test}_shared_memory COMMAND ${test})
    set_tests_properties(
      ${test}_shared_memory
      PROPERTIES LABELS "${label};peer" TIMEOUT 600 SKIP_RETURN_CODE 77
                 ENVIRONMENT "UCX_TLS=tcp,posix,sysv,cma,self;UCX_MM_ERROR_HANDLING=y")
  endforeach()
  set_tests_properties(soak_peer_kills_shared_memory PROPERTIES TIMEOUT 7200)
endif()

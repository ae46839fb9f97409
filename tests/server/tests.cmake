# The server as clients meet it. Each check starts servers of its own on free ports.
function(sidepath_server_checks file)
  set(script ${CMAKE_CURRENT_SOURCE_DIR}/server/${file}.py)
  file(STRINGS ${script} functions REGEX "^def check_[a-z_]+\\(binary\\)")
  foreach(function ${functions})
    string(REGEX REPLACE "^def (check_[a-z_]+).*" "\\1" check ${function})
    string(REGEX REPLACE "^check_" "server_" name ${check})
    add_test(NAME ${name}
             COMMAND ${Python3_EXECUTABLE} -B ${script} $<TARGET_FILE:sidepath_cli> ${check})
    set_tests_properties(${name} PROPERTIES LABELS "quick;server;threads" TIMEOUT 600
                                            SKIP_RETURN_CODE 77)
  endforeach()
endfunction()

# A file system that takes its time, put in front of the C library. A sanitizer has to be first
# there, so with one the check that needs this is skipped.
add_library(slow_files MODULE ${CMAKE_CURRENT_SOURCE_DIR}/server/slow_files.c)
set_target_properties(slow_files PROPERTIES PREFIX "" C_VISIBILITY_PRESET default)
target_compile_definitions(slow_files PRIVATE _GNU_SOURCE)

if(NOT CMAKE_CROSSCOMPILING)
  sidepath_server_checks(check_http_api)
  sidepath_server_checks(check_http_robust)
  sidepath_server_checks(check_process)
  sidepath_server_checks(check_http_clients)
  sidepath_server_checks(check_openai)
  sidepath_server_checks(check_structured)
  sidepath_server_checks(check_frameworks)
  sidepath_server_checks(check_responses)
  sidepath_server_checks(check_anthropic)
  sidepath_server_checks(check_readme)
  sidepath_server_checks(check_operate)
  # It waits for a minute, so it begins before all others.
  set_tests_properties(server_state_file_late PROPERTIES COST 2000)
  sidepath_server_checks(check_publish)
  sidepath_server_checks(check_score)
  sidepath_server_checks(check_hold)
  sidepath_server_checks(check_store)
  sidepath_server_checks(check_peers)
  # In two network namespaces: by hand, and skipped by name where they are not permitted.
  add_executable(tun_relay server/tun_relay.c)
  target_compile_definitions(tun_relay PRIVATE _GNU_SOURCE)
  sidepath_compile_options(tun_relay)
  add_test(NAME soak_peer_network
           COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/server/check_peer_network.py
                   $<TARGET_FILE:sidepath_cli> $<TARGET_FILE:tun_relay>)
  set_tests_properties(soak_peer_network PROPERTIES LABELS "soak;server" TIMEOUT 600
                                                    SKIP_RETURN_CODE 77)
  sidepath_server_checks(check_experts)
  sidepath_server_checks(check_hybrids)
  sidepath_server_checks(check_speculative)
  sidepath_server_checks(check_adapter_chat)
  add_test(NAME soak_server
           COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/server/soak_server.py
                   $<TARGET_FILE:sidepath_cli>)
  set_tests_properties(soak_server PROPERTIES LABELS soak TIMEOUT 7200)
  add_test(NAME soak_hybrids
           COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/server/soak_hybrids.py
                   $<TARGET_FILE:sidepath_cli>)
  set_tests_properties(soak_hybrids PROPERTIES LABELS soak TIMEOUT 7200)
  add_test(NAME soak_faults
           COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/server/soak_faults.py
                   $<TARGET_FILE:sidepath_cli>)
  set_tests_properties(soak_faults PROPERTIES LABELS soak TIMEOUT 7200)
  foreach(sizes soak_publish:1000:64 server_publish_streams:24:8)
    string(REPLACE ":" ";" sizes ${sizes})
    list(GET sizes 0 name)
    list(GET sizes 1 publishes)
    list(GET sizes 2 streams)
    add_test(NAME ${name}
             COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/server/soak_publish.py
                     $<TARGET_FILE:sidepath_cli> ${publishes} ${streams})
  endforeach()
  set_tests_properties(soak_publish PROPERTIES LABELS soak TIMEOUT 7200)
  set_tests_properties(server_publish_streams PROPERTIES LABELS "quick;server;threads" TIMEOUT 600)
  sidepath_server_checks(check_metrics)
  # The status page in a browser of 290 MB: by hand, and skipped by name where there is none.
  add_test(NAME soak_status_page
           COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/server/check_status_page.py
                   $<TARGET_FILE:sidepath_cli> ${PROJECT_BINARY_DIR}/check_status_page)
  set_tests_properties(soak_status_page PROPERTIES LABELS soak TIMEOUT 600 SKIP_RETURN_CODE 77)
endif()

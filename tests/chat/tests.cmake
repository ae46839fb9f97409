# Renders conversations for the comparison with jinja2.
add_executable(chat_render ${CMAKE_CURRENT_SOURCE_DIR}/chat/render_main.c)
target_link_libraries(chat_render PRIVATE sidepath_test_support)
sidepath_compile_options(chat_render)
# 200 generated conversations through the built-in form and tests/chat/templates, byte by byte as
# jinja2 renders them.
add_test(NAME check_chat
         COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/chat/check_chat.py
                 $<TARGET_FILE:chat_render> ${PROJECT_SOURCE_DIR}/demo/base)
set_tests_properties(check_chat PROPERTIES LABELS "quick;chat" TIMEOUT 300 SKIP_RETURN_CODE 77)

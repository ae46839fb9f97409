# Renders conversations for the comparison with jinja2.
add_executable(chat_render ${CMAKE_CURRENT_SOURCE_DIR}/chat/render_main.c)
target_link_libraries(chat_render PRIVATE sidepath_test_support)
sidepath_compile_options(chat_render)

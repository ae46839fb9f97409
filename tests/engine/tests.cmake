# The splitter's oracle is a real regex engine; nothing but this test links it.
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
target_link_libraries(test_tokenizer_split PRIVATE PkgConfig::PCRE2)

/*
 * no_stdin.c: what jansson's archive compares streams with in place of stdin (see CMakeLists.txt).
 * The library gives jansson no streams.
 */
#include <stdio.h>

extern FILE *sidepath_python_no_stdin;
FILE *sidepath_python_no_stdin = NULL;

/*
 * long_memory.h: copies of the fixtures with gated delta nets whose states remember. In the
 * fixtures themselves a state keeps so little over a chunk, of many heads nothing that FP32 can
 * hold, that a test of states would not notice a chunk that was folded twice, or a snapshot of
 * another place.
 */
#ifndef SP_TEST_SUPPORT_LONG_MEMORY_H
#define SP_TEST_SUPPORT_LONG_MEMORY_H

/* A fresh directory with the files of a fixture, without its adapters, in which a state keeps most
 * of itself over a chunk. The caller removes and frees it (sp_test_remove_tree, sp_free). */
char *long_memory_copy(const char *fixture);

#endif

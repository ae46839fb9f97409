/*
 * gpu_main.h: what the test programs of this folder begin with: the first GPU, and those tests that
 * the argument, a pattern, picks; a sanitizer takes a few of them. Where there is no usable GPU the
 * program says why and is skipped.
 */
#ifndef SP_TESTS_CUDA_GPU_MAIN_H
#define SP_TESTS_CUDA_GPU_MAIN_H

#include "support/test.h"

#include <sidepath/device.h>

#include <stdio.h>

#define GPU_SKIPPED 77

/* Exit status of the program. `begin` and `end` run before and after all tests, or are NULL. */
static inline int gpu_main(sp_device **out_gpu, const struct CMUnitTest *tests, size_t n_tests,
                           CMFixtureFunction begin, CMFixtureFunction end, int argc, char **argv)
{
    sp_error error = {0};
    sp_status status = sp_device_open("cuda", NULL, out_gpu, &error);
    int failed;

    if (status != SP_OK) {
        printf("skipped: %s\n", error.text);
        return status == SP_ERR_NO_DEVICE ? GPU_SKIPPED : 1;
    }
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    failed = _cmocka_run_group_tests(argv[0], tests, n_tests, begin, end);
    sp_device_close(*out_gpu);
    return failed;
}

#endif

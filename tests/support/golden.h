/*
 * golden.h: reads the fixtures' safetensors files in tests, on its own: it shares no line with the
 * reader under test, so that both would have to be wrong in the same way.
 *
 * Any failure fails the running test with the file and tensor named. Every tensor gets a block of
 * its own, so that a sanitizer sees a read past its end.
 */
#ifndef SP_TESTS_GOLDEN_H
#define SP_TESTS_GOLDEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GOLDEN_DIMS_MAX 8

typedef struct golden_tensor {
    char *name;
    char dtype[8]; /* as in the file: "F32", "BF16", "F16", "I32", "I64", ... */
    int n_dims;
    int64_t shape[GOLDEN_DIMS_MAX];
    int64_t n;  /* elements */
    void *data; /* aligned for any element type */
    size_t bytes;
} golden_tensor;

typedef struct golden {
    char *path;
    golden_tensor *tensors;
    size_t n_tensors;
} golden;

/*
 * The path of a fixture ("kernels/delta.safetensors"); an absolute one stays. SP_FIXTURES in the
 * environment names their folder on a machine that has the test programs and not the tree.
 */
void golden_path(const char *name, char *out_path, size_t bytes);

/* Opens golden_path(name). */
golden *golden_open(const char *name);
void golden_close(golden *file);

/* NULL when the file has no such tensor. The name is a printf format. */
const golden_tensor *golden_find(const golden *file, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The same, but a missing tensor fails the test. */
const golden_tensor *golden_get(const golden *file, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Element `index` of any of the float types, exactly. */
double golden_value(const golden_tensor *tensor, int64_t index);

/* Data of a tensor that must be of this type ("F32", "I32"). */
const float *golden_f32(const golden_tensor *tensor);
const int32_t *golden_i32(const golden_tensor *tensor);

/*
 * Holds logits [rows, vocab] to sums over the vocabulary, `PREFIXsum` and `PREFIXsumsq` [rows]. The
 * bounds are those for errors of about `error` a logit, either way.
 */
void golden_check_sums(const golden *file, const char *prefix, const float *logits, int32_t rows,
                       int32_t vocab, double error);

#endif

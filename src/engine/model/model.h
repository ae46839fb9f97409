/*
 * model.h: the base weights: bf16, mapped from the checkpoint's files. A tensor at an odd address
 * is copied, one in F16 or F32 is converted; on request all files are copied. Owns the files;
 * immutable after opening, so any thread may read it.
 */
#ifndef SP_ENGINE_MODEL_MODEL_H
#define SP_ENGINE_MODEL_MODEL_H

#include "engine/model/weight_files.h"
#include "engine/ops/ops.h"

#include <sidepath/adapter.h>

struct sp_family_row;

typedef struct sp_model {
    sp_geometry *geometry; /* one reference */
    sp_model_shape shape;
    const struct sp_family_row *family;
    void *layers;        /* [shape.layers] of the family's own struct */
    sp_weight embed;     /* [vocab, H] */
    sp_weight head;      /* [vocab, H]; the same memory as embed when tied */
    sp_norm final_norm;  /* [H] */
    sp_weight **weights; /* [n_weights] pointers to each of them, once, in the structs above */
    size_t n_weights;
    sp_weight_files files;
    void **copies; /* [n_copies] tensors at an odd file offset or not of type BF16 */
    size_t n_copies;
    size_t weight_bytes; /* of the tensors in use */
    size_t
        needed_bytes; /* of memory: these, or whole files that were copied and what was converted */
    char *name;       /* the last part of the directory's path */
    char *unused;     /* a sentence with the names of unused tensors; NULL: none */
    char *converted;  /* a sentence with the number of converted tensors; NULL: none */
} sp_model;

/*
 * Reads config.json and maps the shards, or copies them. Tensors of other kinds (a vision tower,
 * MTP layers) are skipped and named in `unused`; a tensor of a part that runs, which is not
 * applied, is SP_ERR_UNSUPPORTED with "unused-weight". SP_ERR_NOT_FOUND: a file or a weight is
 * missing (named). SP_ERR_MISMATCH: a weight has another shape (both given). SP_ERR_UNSUPPORTED: an
 * architecture or a dtype that this engine does not run (named). SP_ERR_TRUNCATED, SP_ERR_INPUT: a
 * shard is broken. SP_ERR_MEMORY: copies would take more than free_bytes (preflight.h), or there is
 * no memory. *out_model must not be moved, and is empty after a failure.
 * `progress` is told of copies.
 */
sp_status sp_model_open(const char *directory, bool copy, size_t free_bytes,
                        sp_load_progress progress, sp_model *out_model, sp_error *error);
/* An empty or all-zero model is fine. */
void sp_model_close(sp_model *model);

/* Places every weight in the backend's memory; `progress` is told. Returns what sp_op_place
 * returns. */
sp_status sp_model_place(sp_model *model, sp_ops *ops, sp_load_progress progress, sp_error *error);

#endif

/*
 * delta_scene.h: random adapters and rows that a delta test applies in many ways. A scene says what
 * is computed (each row's x, y, adapter and scale); a rig says how (level, threads, pool rank,
 * which adapter sits in which slot); a batch says which rows run together, in which order.
 */
#ifndef SP_TEST_SUPPORT_DELTA_SCENE_H
#define SP_TEST_SUPPORT_DELTA_SCENE_H

#include "support/delta_call.h"
#include "support/hand.h"
#include "support/test.h"

enum { SCENE_SITES_MAX = 3, SCENE_ADAPTERS_MAX = 48, SCENE_PAD = 5 };

typedef struct delta_scene {
    sp_dtype dtype;
    int32_t n_rows, n_adapters, n_sites;
    site_dims dims[SCENE_SITES_MAX];
    sp_dtype y_type[SCENE_SITES_MAX];
    hand_adapter *adapters[SCENE_ADAPTERS_MAX];
    int32_t *row_adapter; /* [n_rows], -1 = base */
    float *row_scale;     /* [n_rows] */
    const int32_t *ranks; /* [n_adapters] of each at every site, 0: absent; NULL: random ones */
    int32_t pad;          /* columns behind each row of x and y; 0: SCENE_PAD */
    bool x_f32; /* batches have an FP32 x, off by less than what rounding to dtype takes away */
    int32_t x_stride;
    void *x;                   /* [n_rows, k_in] of dtype, stride x_stride; pads NaN */
    void *y0[SCENE_SITES_MAX]; /* [n_rows, n_out] of y_type, stride n_out + pad */
} delta_scene;

/*
 * Fills a scene whose dtype, counts, dims and y_type are set: ranks 1 .. rank_max, a site that is
 * absent from one adapter in five, rows of any adapter or base, scales 1 or 0.5.
 */
void scene_fill(delta_scene *scene, int32_t rank_max, sp_test_random *random);
void scene_free(delta_scene *scene);

/* The columns behind each row. */
int32_t scene_pad(const delta_scene *scene);

/* The site of an adapter at dims[i], or NULL. */
const sp_adapter_site *scene_site(const delta_scene *scene, int32_t adapter, int32_t i);

typedef struct delta_rig {
    const delta_scene *scene;
    hand_pool pool;
    sp_delta *delta;
    const char *level; /* NULL on a GPU */
    bool shares_x;     /* whether the last pieces gave x packed */
    int32_t n_slots;
    int32_t slot_of[SCENE_ADAPTERS_MAX];
} delta_rig;

/* slot_order[s] is the adapter of slot s (NULL: adapter s); rows_max is for the largest batch. */
delta_rig rig_create(const delta_scene *scene, const char *level, sp_exec *exec, int32_t pool_rank,
                     const int32_t *slot_order, int32_t rows_max);
/* The same on a GPU, which is borrowed. */
delta_rig rig_create_on(sp_device *device, const delta_scene *scene, int32_t pool_rank,
                        const int32_t *slot_order, int32_t rows_max);
void rig_destroy(delta_rig *rig);

/* A row of the scene, or (SCENE_NAN - r) row r with an x of NaN only. */
#define SCENE_NAN (-1)

/* The type of a batch's x. */
sp_dtype scene_x_type(const delta_scene *scene);

/* What a batch is made of, in the batch's own order: [n_rows] each. y[i] as scene.y0. */
typedef struct rig_batch {
    int32_t *seq_slot;
    float *row_scale;
    char *x;
    void *y[SCENE_SITES_MAX];
} rig_batch;

rig_batch rig_gather(const delta_rig *rig, const int32_t *rows, int32_t n_rows);
/* Frees all but y. */
void rig_batch_free(rig_batch *batch);

/*
 * Runs the rows as one batch; out_y[i] is [n_rows, n_out + SCENE_PAD] of y_type[i], allocated here
 * and owned by the caller (free).
 */
void rig_apply(delta_rig *rig, const int32_t *rows, int32_t n_rows, void **out_y);

/* The scene's sites with these y [n_sites], as a batch has them; and a call of them all. */
void rig_outputs(const delta_rig *rig, void *const *y, sp_delta_output *out_outputs);
sp_delta_call rig_call(const delta_rig *rig, const sp_plan *plan, const void *x,
                       const sp_delta_output *outputs);

/* The same with sp_delta_shrink and sp_delta_expand. */
void rig_apply_halves(delta_rig *rig, const int32_t *rows, int32_t n_rows, void **out_y);

/* The same with sp_delta_pieces_begin and its pieces, each kind last one first. */
void rig_apply_pieces(delta_rig *rig, const int32_t *rows, int32_t n_rows, void **out_y);
/* Asks for the expand of the first output, which some row adapts, before any shrink: must be told
 * so; out_y is what it was. */
void rig_apply_too_early(delta_rig *rig, const int32_t *rows, int32_t n_rows, void **out_y);
/* sp_delta_pieces_begin must say that the rows do not fit; out_y is what it was. */
void rig_expect_too_large(delta_rig *rig, const int32_t *rows, int32_t n_rows, void **out_y);

/* Bytes of one row of output i, pads included. */
size_t scene_y_row_bytes(const delta_scene *scene, int32_t i);

#endif

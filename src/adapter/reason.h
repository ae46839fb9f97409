/*
 * reason.h: the reason codes, in one table. Each refusal of an adapter carries one of them, each
 * refusal of a checkpoint's files one of those of checkpoint/file_reason.h. Names and numbers are
 * stable; docs/ADAPTERS.md is checked against this list by a test.
 *
 *   X(symbol, number, name, status that goes with it)
 */
#ifndef SP_ADAPTER_REASON_H
#define SP_ADAPTER_REASON_H

#include "checkpoint/file_reason.h"

#define SP_ADAPTER_REASON_LIST(X)                                                         \
    /* adapter_config.json */                                                             \
    X(SP_REASON_BAD_RANK, 12, "bad-rank", SP_ERR_REFUSED)                                 \
    X(SP_REASON_BAD_ALPHA, 13, "bad-alpha", SP_ERR_REFUSED)                               \
    X(SP_REASON_RANK_EXCEEDS_POOL, 14, "rank-exceeds-pool", SP_ERR_TOO_LARGE)             \
    X(SP_REASON_EXPERT_RANK_EXCEEDS_CAP, 15, "expert-rank-exceeds-cap", SP_ERR_TOO_LARGE) \
    X(SP_REASON_PEFT_TYPE, 16, "peft-type", SP_ERR_REFUSED)                               \
    X(SP_REASON_UNSUPPORTED_PATTERN, 17, "unsupported-pattern", SP_ERR_REFUSED)           \
    X(SP_REASON_RANK_MISMATCH, 18, "rank-mismatch", SP_ERR_REFUSED)                       \
    X(SP_REASON_UNMATCHED_TARGET, 19, "unmatched-target", SP_ERR_REFUSED)                 \
    X(SP_REASON_LAYER_NOT_TARGETED, 20, "layer-not-targeted", SP_ERR_REFUSED)             \
    X(SP_REASON_UNSUPPORTED_PARAMETER, 21, "unsupported-parameter", SP_ERR_REFUSED)       \
    X(SP_REASON_MODULES_TO_SAVE, 22, "modules-to-save", SP_ERR_REFUSED)                   \
    X(SP_REASON_BAD_TOKEN_INDEX, 23, "bad-token-index", SP_ERR_REFUSED)                   \
    X(SP_REASON_DORA, 24, "dora", SP_ERR_REFUSED)                                         \
    X(SP_REASON_BIAS, 25, "bias", SP_ERR_REFUSED)                                         \
    X(SP_REASON_BASE_CHANGING_INIT, 26, "base-changing-init", SP_ERR_REFUSED)             \
    X(SP_REASON_UNSUPPORTED_FIELD, 27, "unsupported-field", SP_ERR_REFUSED)               \
    X(SP_REASON_TASK_TYPE, 28, "task-type", SP_ERR_REFUSED)                               \
    X(SP_REASON_UNKNOWN_FIELD, 29, "unknown-field", SP_ERR_REFUSED)                       \
    /* tensor names and shapes */                                                         \
    X(SP_REASON_NOT_PEFT_KEY, 30, "not-peft-key", SP_ERR_REFUSED)                         \
    X(SP_REASON_UNRECOGNIZED_TENSOR, 31, "unrecognized-tensor", SP_ERR_REFUSED)           \
    X(SP_REASON_MIXED_ADAPTER_NAMES, 32, "mixed-adapter-names", SP_ERR_REFUSED)           \
    X(SP_REASON_UNKNOWN_PREFIX, 33, "unknown-prefix", SP_ERR_REFUSED)                     \
    X(SP_REASON_UNSUPPORTED_MODULE, 34, "unsupported-module", SP_ERR_REFUSED)             \
    X(SP_REASON_LAYER_OUT_OF_RANGE, 35, "layer-out-of-range", SP_ERR_MISMATCH)            \
    X(SP_REASON_MALFORMED_LAYER_INDEX, 36, "malformed-layer-index", SP_ERR_REFUSED)       \
    X(SP_REASON_WRONG_LAYER_KIND, 37, "wrong-layer-kind", SP_ERR_MISMATCH)                \
    X(SP_REASON_EXPERT_OUT_OF_RANGE, 38, "expert-out-of-range", SP_ERR_MISMATCH)          \
    X(SP_REASON_MALFORMED_EXPERT_INDEX, 39, "malformed-expert-index", SP_ERR_REFUSED)     \
    X(SP_REASON_EXPERT_ON_DENSE_MODEL, 40, "expert-on-dense-model", SP_ERR_MISMATCH)      \
    X(SP_REASON_UNPAIRED_TENSOR, 42, "unpaired-tensor", SP_ERR_REFUSED)                   \
    X(SP_REASON_SHAPE_MISMATCH, 43, "shape-mismatch", SP_ERR_MISMATCH)                    \
    X(SP_REASON_EMPTY_ADAPTER, 44, "empty-adapter", SP_ERR_REFUSED)                       \
    X(SP_REASON_NO_EFFECT, 45, "no-effect", SP_ERR_REFUSED)                               \
    X(SP_REASON_BASE_COPY_DIFFERS, 46, "base-copy-differs", SP_ERR_MISMATCH)              \
    X(SP_REASON_BASE_UNAVAILABLE, 47, "base-unavailable", SP_ERR_REFUSED)                 \
    /* experts */                                                                         \
    X(SP_REASON_EXPERTS_DISABLED, 48, "experts-disabled", SP_ERR_REFUSED)                 \
    X(SP_REASON_AMBIGUOUS_EXPERT_LAYOUT, 49, "ambiguous-expert-layout", SP_ERR_REFUSED)   \
    /* where it is to be loaded: given by the pool and the engine, named here */          \
    X(SP_REASON_MODULE_NOT_IN_POOL, 50, "module-not-in-pool", SP_ERR_REFUSED)             \
    X(SP_REASON_ENGINE_UNSUPPORTED, 51, "engine-unsupported", SP_ERR_UNSUPPORTED)         \
    X(SP_REASON_EXPERTS_TOO_LARGE, 52, "experts-too-large", SP_ERR_TOO_LARGE)             \
    X(SP_REASON_OVERLAY_TOO_LARGE, 53, "overlay-too-large", SP_ERR_TOO_LARGE)

/* Those of files, and those of adapters. */
#define SP_REASON_LIST(X)  \
    SP_FILE_REASON_LIST(X) \
    SP_ADAPTER_REASON_LIST(X)

typedef enum sp_reason {
#define SP_REASON_ENUM(symbol, number, name, status) symbol = number,
    SP_ADAPTER_REASON_LIST(SP_REASON_ENUM)
#undef SP_REASON_ENUM
        SP_REASON_COUNT = 54
} sp_reason;

/* The status that goes with the code. */
sp_status sp_reason_status(int32_t reason);

/* Fills *error with the code's name and status, and returns that status. See sp_fail. */
sp_status sp_refuse(sp_error *error, int32_t reason, const char *subject, int64_t position,
                    const char *format, ...) SP_PRINTF(5, 6);

#endif

/*
 * preflight.h: compares the memory that an engine is going to allocate with the free memory, before
 * any of it is allocated. Pure arithmetic, any thread; engine.c measures the needs.
 */
#ifndef SP_ENGINE_MODEL_PREFLIGHT_H
#define SP_ENGINE_MODEL_PREFLIGHT_H

#include <sidepath/status.h>

#include <stdbool.h>

/* All in bytes unless the name says otherwise. Sums that would overflow are SIZE_MAX. */
typedef struct sp_memory_needs {
    size_t weights;
    size_t draft;      /* weights and activations of a draft model */
    size_t slot;       /* one slot of the pool, or an image of one */
    int32_t slots;     /* 0: no pool, no overlay, no experts and no host cache */
    size_t overlay;    /* budget of replaced rows */
    size_t experts;    /* budget of router and expert pairs, and their tables */
    size_t scratch;    /* activations, logits and the deltas' scratch */
    size_t host_cache; /* budget of packed adapters; 0: chosen from what the others leave */
    size_t kv_token;   /* keys and values of one token in all layers */
    int64_t kv_tokens; /* 0: chosen from what the others leave */
    size_t kv_reserve; /* 0: a KV cache of unspecified size takes half of what is left; else all of
                          it but so many bytes */
    int64_t max_running, max_context; /* tokens of one request */
    int32_t page_tokens;
    size_t state;            /* of all recurrent layers, a draft model's too, for one request; 0:
                                there are none */
    size_t state_budget;     /* of the states; 0: chosen from what the others leave */
    size_t snapshot;         /* one copy of a state at the end of a page */
    size_t snapshot_budget;  /* 0: chosen from what the others leave */
    int32_t snapshot_tokens; /* from one to the next, at least; 0: there are none */
} sp_memory_needs;

typedef struct sp_memory_shares {
    int64_t kv_tokens; /* as given; where that is 0, whole pages, at least one */
    size_t host_cache; /* 0: no limit, where the free memory is unknown */
    int32_t states;    /* 0 without recurrent layers, else 1 to max_running */
    int32_t snapshots; /* no more than the KV cache has places for */
} sp_memory_shares;

/* Tokens of a KV cache of unspecified size where the free memory is unknown. */
#define SP_KV_TOKENS_UNKNOWN 65536

/*
 * Subtracts the needs, in the order of the struct, from `free_bytes` (SIZE_MAX: unknown, all fit),
 * those of recurrent layers before the KV cache. States without a budget take a quarter of the
 * rest at most, though one at least; snapshots then an eighth. A KV cache of 0 tokens gets the
 * lesser of max_running × max_context tokens and half of the rest; then a host cache of 0 bytes
 * gets one image and half of the rest. SP_ERR_MEMORY with the code "memory-short": the first need
 * that does not fit, with needed, free, and as subject the setting to change. SP_ERR_ARGUMENT: a
 * budget that is too small for one state or one snapshot, its setting as subject. *out_shares is
 * not used then.
 */
sp_status sp_memory_preflight(const sp_memory_needs *needs, size_t free_bytes,
                              sp_memory_shares *out_shares, sp_error *error);

/* The same for the weights alone, before they are mapped or copied. */
sp_status sp_memory_preflight_weights(size_t weights, size_t free_bytes, sp_error *error);

#endif

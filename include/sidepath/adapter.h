/*
 * adapter.h: files in, a checked and immutable adapter out.
 *
 * This room owns: adapter_config.json, the geometry (which sites a base model has and how large
 * they are), the names of modules, the audit that applies every tensor or refuses the adapter by
 * name, the receipt, the digest, the reason codes.
 * It must not know: slots, requests, devices, threads.
 *
 * All calls are thread-safe on distinct objects; sp_geometry and sp_adapter are immutable after
 * creation and may be shared by threads (reference counts are atomic). Calls block on file reads
 * only where it is said.
 *
 * Stability: stable, except where a block says experimental.
 */
#ifndef SIDEPATH_ADAPTER_H
#define SIDEPATH_ADAPTER_H

#include <sidepath/checkpoint.h>
#include <sidepath/device.h>

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- geometry ------------------------------------------------------------------------------ */

typedef struct sp_geometry sp_geometry;

/*
 * Reads the config.json in `path` (the model's directory, or the file itself). Both the
 * transformers 4 and 5 styles, and a nested text_config. Where the file says that the base is tied,
 * a checkpoint beside it is searched for a head of its own. Blocks on file reads. *out_geometry
 * holds one reference, owned by the caller. SP_ERR_NOT_FOUND: no such file. SP_ERR_INPUT: not JSON,
 * a field missing or of the wrong type (named). SP_ERR_UNSUPPORTED: an architecture, RoPE type or
 * feature that is not served (named), or a key that would change the mathematics and is not read.
 */
SP_API sp_status sp_geometry_open(const char *path, sp_geometry **out_geometry, sp_error *error);

/* The same from bytes in memory; `bytes` is not kept. */
SP_API sp_status sp_geometry_parse(const char *bytes, size_t n_bytes, sp_geometry **out_geometry,
                                   sp_error *error);

/*
 * What reading config.json found beside what is used, a sentence each: keys that are not known, a
 * head of its own on a base that says it is tied (which then counts as not tied).
 * Borrowed as long as the geometry lives; NULL from the number of notes on.
 */
SP_API const char *sp_geometry_note(const sp_geometry *geometry, size_t index);

/*
 * What a site is to the library: which deltas can land there and how. A linear site takes rows of
 * x; the embedding takes tokens (k_in: the vocabulary); the head gives logits (n_out: the
 * vocabulary). Router and expert sites are described and audited like any other; a pool's slots do
 * not hold them.
 */
typedef enum sp_site_kind {
    SP_SITE_LINEAR = 0,
    SP_SITE_EMBEDDING = 1,
    SP_SITE_HEAD = 2,
    SP_SITE_ROUTER = 3,
    SP_SITE_EXPERT = 4
} sp_site_kind;

/*
 * One place that a delta can land, as data. Its number, by which everything else names it (a
 * layout, an adapter's site, an output of a delta), is the index of its row in the geometry.
 */
typedef struct sp_site {
    size_t struct_bytes;
    const char *path;      /* as named_modules() has it: "model.layers.0.self_attn.q_proj"; PEFT's
                              keys are "base_model.model.PATH.lora_A.weight" */
    const char *module;    /* its name in every layer: "self_attn.q_proj". NULL for the host's rows:
                              what follows the layer's number in the path, without the expert's;
                              outside the layers the last word */
    sp_site_kind kind;     /* the same for all sites of one module */
    int32_t layer, expert; /* -1: in none; else a number that is a word of the path */
    int32_t k_in, n_out;   /* of one expert */
    int32_t group;         /* sites of one layer with the same group share x; -1: alone */
    bool tied;             /* a head whose table is the embedding's: tokens that an adapter trained
                              replace rows of both */
} sp_site;

/* Layer, expert and group -1, tied false, all else 0. */
SP_API void sp_site_default(sp_site *out_site, size_t struct_bytes);

#define SP_SITE_PATH_BYTES_MAX 512 /* with the NUL */
#define SP_SITES_MAX           1048576

/*
 * A geometry for any host and any model: one row for every place that adapters may adapt, in any
 * order, which becomes the order of a slot. Everything is copied. Paths are compared without the
 * trunk ("model.", "model.language_model.", "language_model.model.") before "layers.",
 * "embed_tokens" and "lm_head", so that an adapter fits whichever way its base was loaded.
 * *out_geometry holds one reference, owned by the caller. SP_ERR_ARGUMENT with the row's index as
 * position: no path, or one that is too long or not printable ASCII between dots; a number that
 * the path does not have; a dimension below 1; a place or a path given twice; a second embedding or
 * head; one module of two kinds; sites of one group with different k_in; more than 64 modules; a
 * tied site that is no head, or that has no embedding with its dimensions.
 * SP_ERR_TOO_LARGE: more than SP_SITES_MAX rows. SP_ERR_MEMORY.
 */
SP_API sp_status sp_geometry_create(const sp_site *sites, size_t n_sites,
                                    sp_geometry **out_geometry, sp_error *error);

SP_API sp_geometry *sp_geometry_retain(sp_geometry *geometry);
SP_API void sp_geometry_release(sp_geometry *geometry); /* NULL is allowed */

/* One more than the largest number of a layer, or of an expert, in any row; of a config.json its
 * own counts. */
SP_API int32_t sp_geometry_layers(const sp_geometry *geometry);
SP_API int32_t sp_geometry_experts(const sp_geometry *geometry);

/* The model shape; NULL for a geometry made by hand. Lives as long as the geometry. */
SP_API const sp_model_shape *sp_geometry_shape(const sp_geometry *geometry);

/* By config.json; full attention where none says otherwise. */
SP_API sp_layer_kind sp_geometry_layer_kind(const sp_geometry *geometry, int32_t layer);

/*
 * Rows. Those of a config.json: embed_tokens and lm_head, then the layers; paths as in
 * "model.layers.0.mlp.experts.5.gate_proj". Texts live as long as the geometry.
 * SP_ERR_ARGUMENT: no such site, or out_site without its size.
 */
SP_API int32_t sp_geometry_n_sites(const sp_geometry *geometry);
SP_API sp_status sp_geometry_site_at(const sp_geometry *geometry, int32_t site, sp_site *out_site,
                                     sp_error *error);

/* The site's number, or -1. By its path, under any trunk; by its place; the first of a kind. */
SP_API int32_t sp_geometry_find(const sp_geometry *geometry, const char *path);
SP_API int32_t sp_geometry_find_module(const sp_geometry *geometry, int32_t layer,
                                       const char *module, int32_t expert);
SP_API int32_t sp_geometry_find_kind(const sp_geometry *geometry, sp_site_kind kind);

/* ---- modules ------------------------------------------------------------------------------- */

/*
 * A set of the distinct module names of one geometry: bit (1 << number). A geometry from a
 * config.json numbers the names of all families that are read, whether the model has them or not,
 * and so does one made by hand that has no others; with other names it numbers its own in the order
 * of their first rows. A NULL geometry below means the names of the families.
 */
typedef uint64_t sp_module_set;

SP_API int32_t sp_geometry_n_modules(const sp_geometry *geometry);
/* The number of a site's module; -1 for a site that is not there. */
SP_API int32_t sp_geometry_site_module(const sp_geometry *geometry, int32_t site);
/* NULL for a number out of range. Lives as long as the geometry. */
SP_API const char *sp_geometry_module_name(const sp_geometry *geometry, int32_t module);

/* The modules with any site, and those with sites of one kind. */
SP_API sp_module_set sp_geometry_modules(const sp_geometry *geometry);
SP_API sp_module_set sp_geometry_kind_modules(const sp_geometry *geometry, sp_site_kind kind);

/*
 * Reads a comma-separated list of module names; a name may be a full one ("mlp.gate_proj") or its
 * last part ("q_proj"), which means every module that ends so ("gate_proj": the dense FFN's
 * and the shared expert's, but not the experts', which are named in full); "all-linear" means
 * every module of linear sites. Modules that a config.json's model lacks may be named: intersect
 * the set with sp_geometry_modules. SP_ERR_INPUT names the part that fits nothing, with its byte
 * position.
 */
SP_API sp_status sp_module_set_parse(const sp_geometry *geometry, const char *text,
                                     sp_module_set *out_set, sp_error *error);

/* ---- served tables ------------------------------------------------------------------------- */

/* A table that the host serves. Borrowed; it must not change. */
typedef struct sp_served_table {
    size_t struct_bytes;
    const void *data; /* [rows, hidden] row-major, aligned to its type; NULL: not served */
    sp_dtype dtype;
    int32_t rows, hidden;
    bool approximate; /* made from weights of a lower precision than bf16 (a quantised base): its
                         rows differ from the trained ones by rounding noise */
} sp_served_table;

/*
 * Against an approximate table a row counts as replaced above this largest absolute difference:
 * rounding noise stays below 0.05, a row that was trained is above 1.
 */
#define SP_OVERLAY_NOISE_MAX 0.1f

/* ---- adapter ------------------------------------------------------------------------------- */

typedef struct sp_adapter sp_adapter;

/*
 * How a fused expert pair (PEFT's target_parameters on a 3-D parameter) is read where neither its
 * config's peft_version nor the shapes tell. Experimental.
 */
typedef enum sp_expert_layout {
    SP_EXPERT_LAYOUT_AUTO = 0,
    SP_EXPERT_LAYOUT_LINEAR = 1, /* PEFT 0.19 and later: A reads the input */
    SP_EXPERT_LAYOUT_SWAPPED = 2 /* PEFT 0.18: the delta is the transpose of B·A */
} sp_expert_layout;

typedef struct sp_adapter_options {
    size_t struct_bytes;
    sp_geometry *geometry;   /* borrowed until return; NULL: the files alone are checked */
    const char *name;        /* shown in receipts and errors; NULL: the folder's name */
    int32_t rank_max;        /* 0: no limit; else larger ranks are `rank-exceeds-pool` */
    int32_t expert_rank_max; /* 0: no limit; else `expert-rank-exceeds-cap` */
    bool experts_off;        /* router and expert tensors are `experts-disabled` */
    bool allow_partial, allow_no_effect, allow_unknown_fields, allow_base_changing_init;
    sp_dtype pool_dtype;  /* BF16: a finite F32 that overflows it is refused; F32: it is not */
    const char *base_dir; /* the model's directory: lets copied or full tables be compared with
                             the served ones; NULL: such adapters cannot be judged, which is
                             `base-unavailable` (with a geometry) */
    sp_expert_layout expert_layout;
    sp_exec
        *exec; /* helps to read, check and hash; borrowed until return; NULL: the caller alone */
    /* What base_dir is for, from memory; a table that is here is not looked for in base_dir.
     * Borrowed until the adapter is open; NULL: not given. */
    const sp_served_table *served_embed, *served_head;
    sp_device *views_on; /* the GPU on which views of sp_adapter_from_tensors may be; borrowed until
                            return; NULL: host memory alone */
} sp_adapter_options;

SP_API void sp_adapter_options_default(sp_adapter_options *out_options, size_t struct_bytes);

/*
 * Opens, reads and audits the adapter in `path` (a directory, or the tensor file itself). Blocks
 * on file reads; the files are read with pread, never mapped, and closed before the call returns.
 * *out_adapter holds one reference, owned by the caller; tensors stay in host memory as stored
 * until the last reference is released.
 * Every refusal is SP_ERR_REFUSED (or SP_ERR_MISMATCH, SP_ERR_TRUNCATED, SP_ERR_NOT_FOUND,
 * SP_ERR_TOO_LARGE where that fits better) with a reason code in error->code; SP_ERR_IO and
 * SP_ERR_MEMORY as usual. docs/ADAPTERS.md lists the codes.
 */
SP_API sp_status sp_adapter_open(const char *path, const sp_adapter_options *options,
                                 sp_adapter **out_adapter, sp_error *error);

SP_API sp_adapter *sp_adapter_retain(sp_adapter *adapter);
SP_API void sp_adapter_release(sp_adapter *adapter); /* NULL is allowed */

SP_API const char *sp_adapter_name(const sp_adapter *adapter);

/* SHA-256 over the content that is applied (sites, effective scales, stored tensors): 32 bytes. */
#define SP_DIGEST_BYTES 32
typedef struct sp_digest {
    uint8_t bytes[SP_DIGEST_BYTES];
} sp_digest;
SP_API sp_digest sp_adapter_digest(const sp_adapter *adapter);

/* One factor of a pair. For a fused file, A or B may be strided views of a larger tensor. */
typedef struct sp_factor {
    const void *data; /* little-endian elements as stored; borrowed from the adapter */
    sp_dtype dtype;
    int32_t rows, cols; /* A: [rank, k_in]   B: [n_out, rank] */
    int64_t row_stride; /* elements */
    int64_t col_stride; /* elements; 1 except for views of fused expert tensors */
} sp_factor;

/*
 * One site that the adapter adapts by a pair: y += scale * (x · Aᵀ) · Bᵀ. Sites ascend by their
 * number; without a geometry by layer, module and expert, with layer -1 first.
 */
typedef struct sp_adapter_site {
    size_t struct_bytes;
    int32_t site;       /* in the geometry; -1: the adapter was opened without one */
    const char *path;   /* the geometry's, else the file's; lives as long as the adapter */
    const char *module; /* the geometry's name, else the families'; as long as the adapter */
    int32_t layer, expert;
    sp_site_kind kind;
    int32_t rank;
    float scale; /* alpha / r or alpha / sqrt(r), computed in double */
    sp_factor a, b;
} sp_adapter_site;

SP_API size_t sp_adapter_n_sites(const sp_adapter *adapter);
SP_API const sp_adapter_site *sp_adapter_site_at(const sp_adapter *adapter, size_t index);

/* The largest rank of its pairs outside the experts and the router; 0 if there is none. */
SP_API int32_t sp_adapter_rank_max(const sp_adapter *adapter);

/*
 * Multiply-adds that it adds to one row: rank x (inputs + outputs) of each pair, of a pair of the
 * embedding rank x outputs. A row goes through some of the experts only, so pairs of experts count
 * by the share of them that a token is routed to; in full where the geometry is made by hand and
 * does not say. 0 for NULL.
 */
SP_API double sp_adapter_row_macs(const sp_adapter *adapter);

/* The geometry that it was checked against, as long as the adapter; NULL: none. */
SP_API sp_geometry *sp_adapter_geometry(const sp_adapter *adapter);

/*
 * The modules that it adapts in any way, replaced rows of embedding and head included: a set of its
 * geometry's, or of the families' names.
 */
SP_API sp_module_set sp_adapter_modules(const sp_adapter *adapter);

/* The refusal of what an engine cannot apply, `engine-unsupported`: modules outside the set, by
 * pairs or rows. */
SP_API sp_status sp_adapter_check_modules(const sp_adapter *adapter, sp_module_set supported,
                                          sp_error *error);

/*
 * Experimental. Whole-row replacements of the embedding or the head (modules_to_save and trainable
 * tokens), as stored: packing turns them into the rows that differ.
 */
typedef struct sp_adapter_table {
    size_t struct_bytes;
    sp_site_kind kind;        /* SP_SITE_EMBEDDING or SP_SITE_HEAD */
    const char *module;       /* its name, as that of a site */
    sp_factor full;           /* [rows, hidden], data NULL if there is no full table */
    sp_factor trainable;      /* [n_ids, hidden] replacement rows, data NULL if there are none */
    const int32_t *token_ids; /* [n_ids], in the order of the config's list */
    int32_t n_ids;
    int32_t rows; /* of the adapter's vocabulary, which its tokens are among: those of full or,
                     where a tied head takes the embedding's tokens, of that one's full table;
                     0: full's, else the served vocabulary */
} sp_adapter_table;

SP_API size_t sp_adapter_n_tables(const sp_adapter *adapter);
SP_API const sp_adapter_table *sp_adapter_table_at(const sp_adapter *adapter, size_t index);

/* Experimental. Bytes of the replaced rows with their maps; 0 without any, or without a geometry.
 */
SP_API size_t sp_adapter_overlay_bytes(const sp_adapter *adapter);

/*
 * Experimental. Seconds of opening that went into the digest, for measurements; those of all
 * threads together.
 */
SP_API double sp_adapter_hash_seconds(const sp_adapter *adapter);

/* ---- receipt ------------------------------------------------------------------------------- */

/*
 * What opening an adapter found, for people and for programs: verdict, digest, rank and scale per
 * module kind, ignored tensors with reasons, notes.
 */
typedef struct sp_receipt sp_receipt;

typedef struct sp_receipt_options {
    size_t struct_bytes;
    sp_module_set engine_modules; /* what the caller's engine can apply, of the adapter's geometry;
                                     the default: all */
    int64_t slot_bytes;           /* what the adapter takes in a pool's slot; -1: not known */
    int64_t expert_bytes;         /* the same of its router and experts */
} sp_receipt_options;

SP_API void sp_receipt_options_default(sp_receipt_options *out_options, size_t struct_bytes);

/* The receipt of an open adapter; nothing of the adapter is kept. SP_ERR_MEMORY. */
SP_API sp_status sp_receipt_create(const sp_adapter *adapter, const sp_receipt_options *options,
                                   sp_receipt **out_receipt, sp_error *error);

/* The receipt of a refusal that sp_adapter_open has explained in *refusal. SP_ERR_MEMORY. */
SP_API sp_status sp_receipt_create_refused(const char *name, const sp_error *refusal,
                                           sp_receipt **out_receipt, sp_error *error);

SP_API void sp_receipt_destroy(sp_receipt *receipt); /* NULL is allowed */

/* One JSON object, and a table for a terminal; both end in a newline and live with the receipt. */
SP_API const char *sp_receipt_json(const sp_receipt *receipt);
SP_API const char *sp_receipt_table(const sp_receipt *receipt);

/*
 * True when the caller's engine can apply all of it. Otherwise loading it for a run is
 * SP_ERR_UNSUPPORTED with `engine-unsupported`, which is put into *error.
 */
SP_API bool sp_receipt_is_servable(const sp_receipt *receipt, sp_error *error);

/* ---- reason codes -------------------------------------------------------------------------- */

/* Stable text of the reason code with this number ("shape-mismatch"); NULL past the last. */
SP_API const char *sp_reason_name(int32_t reason);
SP_API int32_t sp_reason_count(void);

#ifdef __cplusplus
}
#endif
#endif

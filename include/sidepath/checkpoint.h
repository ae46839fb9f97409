/*
 * checkpoint.h: what the files of a base model or of an adapter hold, without their data.
 *
 * This room turns the bytes of a safetensors header into a checked list of tensors (no I/O, so that
 * it can be fuzzed), finds the files of a checkpoint, sharded or not, and defines the shape of a
 * model. Data stays where it is: the caller reads or maps the files by the offsets given here.
 *
 * Every failure names the tensor and the byte position, with a reason code in error->code
 * ("header-malformed", "header-overlap", "truncated", "duplicate-key", "lfs-pointer",
 * "pickle-refused", "unsupported-dtype"; for checkpoints also "weights-missing", "unsafe-path",
 * "duplicate-tensor").
 *
 * Objects are immutable after creation and may be shared by threads.
 *
 * Stability: experimental.
 */
#ifndef SIDEPATH_CHECKPOINT_H
#define SIDEPATH_CHECKPOINT_H

#include <sidepath/status.h>

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Element types of the format, with their bits. Only F32, BF16 and F16 are ever computed with. */
#define SP_TENSOR_TYPE_LIST(X)             \
    X(SP_TENSOR_F32, 0, "F32", 32)         \
    X(SP_TENSOR_BF16, 1, "BF16", 16)       \
    X(SP_TENSOR_F16, 2, "F16", 16)         \
    X(SP_TENSOR_BOOL, 3, "BOOL", 8)        \
    X(SP_TENSOR_F4, 4, "F4", 4)            \
    X(SP_TENSOR_F6_E2M3, 5, "F6_E2M3", 6)  \
    X(SP_TENSOR_F6_E3M2, 6, "F6_E3M2", 6)  \
    X(SP_TENSOR_U8, 7, "U8", 8)            \
    X(SP_TENSOR_I8, 8, "I8", 8)            \
    X(SP_TENSOR_F8_E5M2, 9, "F8_E5M2", 8)  \
    X(SP_TENSOR_F8_E4M3, 10, "F8_E4M3", 8) \
    X(SP_TENSOR_F8_E8M0, 11, "F8_E8M0", 8) \
    X(SP_TENSOR_I16, 12, "I16", 16)        \
    X(SP_TENSOR_U16, 13, "U16", 16)        \
    X(SP_TENSOR_I32, 14, "I32", 32)        \
    X(SP_TENSOR_U32, 15, "U32", 32)        \
    X(SP_TENSOR_I64, 16, "I64", 64)        \
    X(SP_TENSOR_U64, 17, "U64", 64)        \
    X(SP_TENSOR_F64, 18, "F64", 64)        \
    X(SP_TENSOR_C64, 19, "C64", 64)

typedef enum sp_tensor_type {
#define SP_TENSOR_TYPE_ENUM(symbol, number, name, bits) symbol = number,
    SP_TENSOR_TYPE_LIST(SP_TENSOR_TYPE_ENUM)
#undef SP_TENSOR_TYPE_ENUM
} sp_tensor_type;

/* The format's own word ("BF16"); NULL for a foreign number. */
SP_API const char *sp_tensor_type_name(sp_tensor_type type);

/* True for F32, BF16 and F16; sets *out_dtype (which may be NULL) only then. */
SP_API bool sp_tensor_type_dtype(sp_tensor_type type, sp_dtype *out_dtype);

#define SP_TENSOR_DIMS_MAX                8
#define SP_SAFETENSORS_HEADER_BYTES_MAX   100000000 /* the format's own limit */
#define SP_SAFETENSORS_ENTRY_BYTES_MAX    4096      /* one tensor's entry, without its name */
#define SP_SAFETENSORS_METADATA_BYTES_MAX 8388608

/* The library's own, by pointer; arrays of them are never given. */
typedef struct sp_tensor {
    size_t struct_bytes;
    const char *name; /* UTF-8, NUL-terminated, no NUL inside; lives as long as the list */
    sp_tensor_type type;
    int32_t n_dims; /* 0 for a scalar */
    int64_t dims[SP_TENSOR_DIMS_MAX];
    uint64_t offset_bytes; /* of its first element, from the start of the file */
    uint64_t bytes;        /* elements × element size; 0 when a dimension is 0 */
    int32_t file;          /* index of the file inside its checkpoint; 0 for a single header */
} sp_tensor;

/* ---- one header ---------------------------------------------------------------------------- */

typedef struct sp_safetensors sp_safetensors;

/*
 * Parses the header at the start of a file of file_bytes bytes. `bytes` are the first n_bytes of
 * it: at least the header, at most the whole file (a mapping); nothing of it is kept. `subject`
 * names the file in errors. Checked: length field, JSON, no duplicate name, a known type, shape ×
 * element size = bytes, and that the tensors tile the data area exactly, without gap or overlap.
 * *out_header is owned by the caller. Does not block.
 */
SP_API sp_status sp_safetensors_parse(const void *bytes, size_t n_bytes, uint64_t file_bytes,
                                      const char *subject, sp_safetensors **out_header,
                                      sp_error *error);

/*
 * Bytes from the start of the file that hold its header, from its first 8 bytes: what
 * sp_safetensors_parse wants as n_bytes. Fails on a length that no file can have.
 */
SP_API sp_status sp_safetensors_header_bytes(const void *bytes, size_t n_bytes, uint64_t file_bytes,
                                             const char *subject, size_t *out_bytes,
                                             sp_error *error);

SP_API void sp_safetensors_destroy(sp_safetensors *header); /* NULL is allowed */

SP_API size_t sp_safetensors_n_tensors(const sp_safetensors *header);

/* Tensors ascend by name (bytewise). NULL past the last. */
SP_API const sp_tensor *sp_safetensors_at(const sp_safetensors *header, size_t index);
SP_API const sp_tensor *sp_safetensors_find(const sp_safetensors *header, const char *name);

/* ---- the files of a checkpoint ------------------------------------------------------------- */

typedef struct sp_checkpoint sp_checkpoint;

/*
 * Opens "<stem>.safetensors" in `directory`, or the shards that "<stem>.safetensors.index.json"
 * lists, and reads their headers (blocks on these reads; no data is read). stem is "model" for a
 * base, "adapter_model" for an adapter. The shards' tensors are merged into one list; one name in
 * two shards is refused, as is a name that the index promises and its shard lacks.
 * SP_ERR_NOT_FOUND with `weights-missing`: neither file, or a shard is not there.
 */
SP_API sp_status sp_checkpoint_open(const char *directory, const char *stem,
                                    sp_checkpoint **out_checkpoint, sp_error *error);

/* The same for one file by its path, whatever its name. */
SP_API sp_status sp_checkpoint_open_file(const char *path, sp_checkpoint **out_checkpoint,
                                         sp_error *error);

SP_API void sp_checkpoint_destroy(sp_checkpoint *checkpoint); /* NULL is allowed */

SP_API int32_t sp_checkpoint_n_files(const sp_checkpoint *checkpoint);

/* Path and size (at opening) of one file; NULL and 0 for an index out of range. */
SP_API const char *sp_checkpoint_path(const sp_checkpoint *checkpoint, int32_t file);
SP_API uint64_t sp_checkpoint_file_bytes(const sp_checkpoint *checkpoint, int32_t file);

SP_API size_t sp_checkpoint_n_tensors(const sp_checkpoint *checkpoint);

/* Tensors of all files, ascending by name; `file` says where each is. NULL: past the last, none. */
SP_API const sp_tensor *sp_checkpoint_at(const sp_checkpoint *checkpoint, size_t index);
SP_API const sp_tensor *sp_checkpoint_find(const sp_checkpoint *checkpoint, const char *name);

/* ---- the index alone ----------------------------------------------------------------------- */

typedef struct sp_shard_index sp_shard_index;

/*
 * Parses the text of an index ({"weight_map": {tensor: file}}); `bytes` is not kept. A file that
 * is no relative path inside the folder is `unsafe-path`.
 */
SP_API sp_status sp_shard_index_parse(const char *bytes, size_t n_bytes, const char *subject,
                                      sp_shard_index **out_index, sp_error *error);
SP_API void sp_shard_index_destroy(sp_shard_index *index); /* NULL is allowed */

/* The files, each once, ascending by name. */
SP_API int32_t sp_shard_index_n_files(const sp_shard_index *index);
SP_API const char *sp_shard_index_file(const sp_shard_index *index, int32_t file);

/* The promised tensors, in the order of the text, each with its file. */
SP_API size_t sp_shard_index_n_tensors(const sp_shard_index *index);
SP_API const char *sp_shard_index_tensor(const sp_shard_index *index, size_t tensor,
                                         int32_t *out_file);

/* ---- model shape --------------------------------------------------------------------------- */

typedef enum sp_family {
    SP_FAMILY_QWEN3 = 0,     /* Qwen3ForCausalLM: dense */
    SP_FAMILY_QWEN3_MOE = 1, /* Qwen3MoeForCausalLM */
    SP_FAMILY_QWEN3_NEXT = 2,
    SP_FAMILY_QWEN35 = 3,     /* Qwen3_5 text, dense hybrid */
    SP_FAMILY_QWEN35_MOE = 4, /* Qwen3_5Moe, text-only or conditional generation */
    SP_FAMILY_LLAMA = 5,      /* Llama types, dense: Llama, Mistral, Qwen2, SmolLM2 and 3 */
    SP_FAMILY_CUSTOM = 99     /* none of these */
} sp_family;

/* "qwen3", "qwen3_moe", as config.json's model_type is; "custom" for SP_FAMILY_CUSTOM, NULL for a
 * foreign number. */
SP_API const char *sp_family_name(sp_family family);

typedef enum sp_layer_kind {
    SP_LAYER_FULL_ATTENTION = 0,
    SP_LAYER_LINEAR_ATTENTION = 1,
    SP_LAYER_FULL_ATTENTION_NO_ROPE = 2 /* q and k are not rotated (SmolLM3) */
} sp_layer_kind;

typedef enum sp_rope_kind {
    SP_ROPE_PLAIN = 0,
    SP_ROPE_LINEAR = 1, /* every frequency is divided by factor */
    SP_ROPE_LLAMA3 = 2  /* the low ones are, the high ones are not, those between are blended */
} sp_rope_kind;

typedef struct sp_rope_scaling {
    sp_rope_kind kind;
    double factor; /* 1 for a plain one */
    /* of LLAMA3; else 0. A wave longer than original_positions / low_freq_factor is low, one
     * shorter than original_positions / high_freq_factor is high. */
    double low_freq_factor, high_freq_factor;
    int32_t original_positions;
} sp_rope_scaling;

/*
 * What config.json says of a base model, in numbers: all that an engine and a geometry need.
 * Counts are elements unless the name says otherwise. A feature that the family lacks is 0.
 */
typedef struct sp_model_shape {
    size_t struct_bytes; /* the library's */
    sp_family family;
    int32_t layers, hidden, vocab;
    int32_t q_heads, kv_heads, head_dim;
    int32_t intermediate;  /* dense FFN; 0 where every layer is MoE */
    int32_t max_positions; /* the context length */
    float rms_norm_eps;
    double rope_theta;
    float partial_rotary_factor; /* 1 where whole heads are rotated */
    bool tied_embeddings;
    bool attention_bias;     /* of q, k and v */
    bool gated_attention;    /* q_proj's width is 2 * q_heads * head_dim */
    bool zero_centred_norms; /* the norm multiplies by 1 + w */
    /* mixture of experts */
    int32_t experts, experts_per_token, expert_intermediate, shared_expert_intermediate;
    bool norm_topk_prob;
    /* gated delta net */
    int32_t gdn_key_heads, gdn_value_heads, gdn_key_head_dim, gdn_value_head_dim, gdn_conv_kernel;
    bool gdn_fused_inputs;    /* in_proj_qkvz + in_proj_ba, else qkv, z, b, a apart */
    int32_t eos_token_ids[8]; /* from config.json; generation_config.json may replace them */
    int32_t n_eos_token_ids;
    bool attention_output_bias; /* of o */
    bool mlp_bias;              /* of gate, up and down */
    sp_rope_scaling rope_scaling;
} sp_model_shape;

#ifdef __cplusplus
}
#endif
#endif

/*
 * peer_content.h: one adapter of a directory as a peer offers it: its manifest, and its bytes in
 * one block of memory. Read from files, hashed, and immutable from then on.
 */
#ifndef SP_PEER_PEER_CONTENT_H
#define SP_PEER_PEER_CONTENT_H

#include "peer/peer_wire.h"

/* Makes the packed image of an adapter; called on the catalogue's thread. */
typedef struct sp_peer_packer {
    void *user;
    /*
     * *out_image describes it, *out_bytes [out_image->bytes] are its bytes; both stay until done is
     * called with *out_handle. Any failure: it is offered as tensors alone.
     */
    sp_status (*pack)(void *user, const sp_adapter *adapter, sp_peer_image *out_image,
                      const void **out_bytes, void **out_handle, sp_error *error);
    void (*done)(void *user, void *handle);
} sp_peer_packer;

typedef struct sp_peer_content {
    char *name;
    sp_digest digest;
    sp_text manifest; /* JSON */
    uint64_t data_bytes, image_bytes;
    uint64_t image_offset; /* of the image in the block; the tensors begin at 0 */
    uint64_t block_bytes;
    int32_t rank; /* the largest */
} sp_peer_content;

/* Bytes of memory that the tensors of an adapter in this folder take, from headers alone. Blocks on
 * file reads; refusals as sp_adapter_open. */
sp_status sp_peer_content_measure(const char *path, uint64_t *out_bytes, sp_error *error);

/*
 * Reads the adapter in the folder `path` as `name`: all its tensors into *out_block (freed with
 * sp_aligned_free), in the order of files and offsets, and audits them as sp_adapter_open does with
 * these options. packer may be NULL. Takes as much memory again while it works. Blocks on file
 * reads. *out_content is freed with sp_peer_content_free. Refusals as sp_adapter_open;
 * SP_ERR_TOO_LARGE with `peer-manifest-too-large`.
 */
sp_status sp_peer_content_read(const char *path, const char *name,
                               const sp_adapter_options *options, const sp_peer_packer *packer,
                               sp_peer_content *out_content, void **out_block, sp_error *error);

/*
 * The same of headers alone, with a digest that was computed in an earlier run: nothing of the
 * tensors' data is read. It equals what sp_peer_content_read gives without a packer, if the digest
 * is right. Refusals that no header shows are missing.
 */
sp_status sp_peer_content_describe(const char *path, const char *name,
                                   const sp_adapter_options *options, const sp_digest *digest,
                                   sp_peer_content *out_content, sp_error *error);
void sp_peer_content_free(sp_peer_content *content); /* twice is harmless */

/* Where a piece is in the block, or false: it is not within the part. */
bool sp_peer_content_find(const sp_peer_content *content, sp_peer_part part, uint64_t offset,
                          uint64_t bytes, uint64_t *out_at);

#endif

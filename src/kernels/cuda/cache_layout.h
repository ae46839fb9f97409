/* cache_layout.h: the place of an element of the KV cache (ops_cuda.h), for host and device. */
#ifndef SP_KERNELS_CUDA_CACHE_LAYOUT_H
#define SP_KERNELS_CUDA_CACHE_LAYOUT_H

#include "kernels/cuda/ops_cuda.h"
#include "kernels/effective_scale.h"

#define SP_CUDA_ATOM_TOKENS 8
#define SP_CUDA_ATOM_WIDTH  64 /* dimensions: 128 bytes of a token */

/* Element `d` of token `token` (0 .. SP_CUDA_PAGE - 1) from the start of its page and kv head;
 * page_dim is sp_cuda_page_dim of the head_dim. */
SP_HOST_AND_DEVICE int32_t sp_cuda_cache_offset(int32_t page_dim, int32_t token, int32_t d)
{
    int32_t row = token % SP_CUDA_ATOM_TOKENS, piece = (d % SP_CUDA_ATOM_WIDTH / 8) ^ row;
    int32_t atom =
        token / SP_CUDA_ATOM_TOKENS * (page_dim / SP_CUDA_ATOM_WIDTH) + d / SP_CUDA_ATOM_WIDTH;

    return (atom * SP_CUDA_ATOM_TOKENS + row) * SP_CUDA_ATOM_WIDTH + piece * 8 + d % 8;
}

#endif

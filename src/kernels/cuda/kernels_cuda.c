/* kernels_cuda.c: the launchers of an opened CUDA object, each looked up by name. */
#include "kernels/cuda/kernels_cuda.h"

#include "base/error.h"
#include "device/device_cuda.h"
#include "kernels/cuda/ops_cuda.h"

static sp_status fail_entry(const char *name, sp_error *error)
{
    return sp_fail(error, SP_ERR_UNSUPPORTED, "missing-kernel", name, -1,
                   "the CUDA library lacks this kernel; it belongs to another build");
}

#define SP_CUDA_RESOLVE(name, arguments)                                 \
    kernels.name = (int(*) arguments)sp_device_cuda_find(device, #name); \
    if (!kernels.name)                                                   \
        return fail_entry(#name, error);

sp_status sp_kernels_cuda_get(sp_device *device, sp_cuda_kernels *out_kernels, sp_error *error)
{
    sp_cuda_kernels kernels;
    sp_status status;

    SP_CUDA_KERNEL_LIST(SP_CUDA_RESOLVE)
    status = sp_device_cuda_status(device, kernels.kernels_init(sp_device_cuda_index(device)),
                                   "preparing the kernels");
    if (status != SP_OK)
        return sp_fail(error, status, NULL, sp_device_name(device), -1, "%.400s",
                       sp_device_error_text(device));
    *out_kernels = kernels;
    return SP_OK;
}

sp_status sp_ops_cuda_get(sp_device *device, sp_cuda_ops_kernels *out_kernels, sp_error *error)
{
    sp_cuda_ops_kernels kernels;

    SP_CUDA_OPS_LIST(SP_CUDA_RESOLVE)
    *out_kernels = kernels;
    return SP_OK;
}

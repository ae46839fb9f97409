/* table.cu: the one exported symbol, built from the lists that the library resolves. */
#include "device/device_cuda.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/ops_cuda.h"

extern "C" {

#define SP_CUDA_DECLARE(name, arguments) int sp_cuda_##name arguments;
SP_CUDA_DEVICE_LIST(SP_CUDA_DECLARE)
SP_CUDA_KERNEL_LIST(SP_CUDA_DECLARE)
SP_CUDA_OPS_LIST(SP_CUDA_DECLARE)

#define SP_CUDA_ENTRY(name, arguments) {#name, (sp_cuda_fn)sp_cuda_##name},
static const sp_cuda_entry entries[] = {SP_CUDA_DEVICE_LIST(SP_CUDA_ENTRY) SP_CUDA_KERNEL_LIST(
    SP_CUDA_ENTRY) SP_CUDA_OPS_LIST(SP_CUDA_ENTRY)};

extern SP_API const sp_cuda_object_table sp_cuda_object;
const sp_cuda_object_table sp_cuda_object = {
    SP_CUDA_VERSION, (int32_t)(sizeof entries / sizeof entries[0]), entries};

} /* extern "C" */

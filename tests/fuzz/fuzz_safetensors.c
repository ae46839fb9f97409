/*
 * A safetensors file: any bytes give a list of tensors that tile the file behind its header, in
 * the order of their names, or an error with a code.
 */
#include "fuzz/target.h"

#include <sidepath/checkpoint.h>

#include <string.h>

static void check_list(const sp_safetensors *file, size_t file_bytes)
{
    uint64_t bytes = 0, first = file_bytes;

    for (size_t i = 0; i < sp_safetensors_n_tensors(file); i++) {
        const sp_tensor *tensor = sp_safetensors_at(file, i);

        FUZZ_CHECK(sp_tensor_type_name(tensor->type) != NULL);
        FUZZ_CHECK(tensor->n_dims >= 0 && tensor->n_dims <= SP_TENSOR_DIMS_MAX);
        FUZZ_CHECK(tensor->offset_bytes <= file_bytes);
        FUZZ_CHECK(tensor->bytes <= file_bytes - tensor->offset_bytes);
        FUZZ_CHECK(sp_safetensors_find(file, tensor->name) == tensor);
        if (i > 0)
            FUZZ_CHECK(strcmp(sp_safetensors_at(file, i - 1)->name, tensor->name) < 0);
        if (tensor->offset_bytes < first)
            first = tensor->offset_bytes;
        bytes += tensor->bytes;
    }
    FUZZ_CHECK(first + bytes == file_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    sp_safetensors *file = NULL;
    sp_error error;
    sp_status status = sp_safetensors_parse(data, bytes, bytes, "input", &file, &error);

    if (status == SP_OK) {
        check_list(file, bytes);
        sp_safetensors_destroy(file);
        return 0;
    }
    FUZZ_CHECK(status < 0 && file == NULL);
    FUZZ_CHECK(error.status == status && error.code[0] != '\0' && error.text[0] != '\0');
    FUZZ_CHECK(error.position >= 0);
    return 0;
}

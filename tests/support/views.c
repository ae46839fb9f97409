#include "support/views.h"

#include "support/test.h"

#include <stdlib.h>
#include <string.h>

static sp_tensor_type type_of(const char *word)
{
    for (int type = 0; sp_tensor_type_name((sp_tensor_type)type); type++) {
        if (strcmp(sp_tensor_type_name((sp_tensor_type)type), word) == 0)
            return (sp_tensor_type)type;
    }
    fail_msg("no such type: %s", word);
    return SP_TENSOR_F32;
}

static void add_matrix(view_list *list, size_t i, const golden_tensor *tensor, view_form form)
{
    size_t element = tensor->bytes / (size_t)tensor->n;
    int64_t rows = tensor->shape[0], cols = tensor->shape[1];
    int64_t down = form == VIEW_TRANSPOSED ? 1 : 3 * cols + 5;
    int64_t across = form == VIEW_TRANSPOSED ? rows : 3;
    size_t offset = form == VIEW_TRANSPOSED ? 0 : 7; /* bytes */
    size_t span = (size_t)((rows - 1) * down + (cols - 1) * across + 1) * element;
    char *block = malloc(offset + span);

    assert_non_null(block);
    memset(block, 0x7f, offset + span);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            memcpy(block + offset + (size_t)(r * down + c * across) * element,
                   (const char *)tensor->data + (size_t)(r * cols + c) * element, element);
    list->blocks[i] = block;
    list->strides[i][0] = down;
    list->strides[i][1] = across;
    list->views[i].data = block;
    list->views[i].byte_offset = offset;
    list->views[i].strides = list->strides[i];
}

static void add_dense(view_list *list, size_t i, const golden_tensor *tensor)
{
    list->blocks[i] = malloc(tensor->bytes + 1);
    assert_non_null(list->blocks[i]);
    memcpy(list->blocks[i], tensor->data, tensor->bytes);
    list->views[i].data = list->blocks[i];
}

view_list *view_list_create(const golden *file, view_form form)
{
    view_list *list = calloc(1, sizeof *list);

    assert_non_null(list);
    list->n = file->n_tensors;
    list->views = calloc(list->n + 1, sizeof *list->views);
    list->blocks = calloc(list->n + 1, sizeof *list->blocks);
    list->strides = calloc(list->n + 1, sizeof *list->strides);
    assert_true(list->views && list->blocks && list->strides);
    for (size_t i = 0; i < list->n; i++) {
        const golden_tensor *tensor = &file->tensors[i];

        list->views[i] = (sp_tensor_view){.struct_bytes = sizeof list->views[i],
                                          .name = tensor->name,
                                          .type = type_of(tensor->dtype),
                                          .n_dims = tensor->n_dims,
                                          .shape = tensor->shape};
        if (form == VIEW_DENSE || tensor->n_dims != 2 || tensor->n == 0)
            add_dense(list, i, tensor);
        else
            add_matrix(list, i, tensor, form);
    }
    return list;
}

void view_list_free_memory(view_list *list)
{
    for (size_t i = 0; i < list->n; i++) {
        free(list->blocks[i]);
        list->blocks[i] = NULL;
    }
}

void view_list_destroy(view_list *list)
{
    view_list_free_memory(list);
    free(list->strides);
    free(list->blocks);
    free(list->views);
    free(list);
}

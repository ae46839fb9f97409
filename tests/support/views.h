/*
 * views.h: tensors in memory as views, from a safetensors file, in several arrangements that show
 * the same matrix.
 */
#ifndef SP_TEST_SUPPORT_VIEWS_H
#define SP_TEST_SUPPORT_VIEWS_H

#include "support/golden.h"

#include <sidepath/intake.h>

typedef enum view_form {
    VIEW_DENSE,
    VIEW_TRANSPOSED, /* stored column by column */
    VIEW_STRIDED,    /* every third element, rows 5 elements further apart, at an odd address */
    VIEW_FORMS
} view_form;

typedef struct view_list {
    sp_tensor_view *views; /* [n] */
    size_t n;
    void **blocks; /* [n] malloc'ed: a sanitizer sees a read past the end */
    int64_t (*strides)[GOLDEN_DIMS_MAX];
} view_list;

/* Views of all tensors of the file, which must outlive the list; matrices in this form. */
view_list *view_list_create(const golden *file, view_form form);
void view_list_destroy(view_list *list);

/* Frees all memory that the views show, as its owner may once a call has returned. */
void view_list_free_memory(view_list *list);

#endif

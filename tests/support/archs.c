#include "support/archs.h"

#include "base/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const arch_names[N_ARCHS] = {"falcon", "gemma3_text", "glm4",
                                         "gpt2",   "gpt_neox",    "phi3"};

static sp_geometry *geometry_of(const json_t *list)
{
    size_t n = json_array_size(list);
    sp_site *sites = calloc(n, sizeof *sites);
    sp_geometry *geometry = NULL;
    sp_error error;

    assert_non_null(sites);
    for (size_t i = 0; i < n; i++) {
        const json_t *row = json_array_get(list, i);
        const json_t *layer = json_object_get(row, "layer");

        sp_site_default(&sites[i], sizeof sites[i]);
        sites[i].path = json_string_value(json_object_get(row, "path"));
        sites[i].k_in = (int32_t)json_integer_value(json_object_get(row, "k_in"));
        sites[i].n_out = (int32_t)json_integer_value(json_object_get(row, "n_out"));
        if (json_is_integer(layer))
            sites[i].layer = (int32_t)json_integer_value(layer);
        else
            sites[i].kind = SP_SITE_HEAD; /* the only site outside the layers is phi3's */
    }
    assert_ok(sp_geometry_create(sites, n, &geometry, &error), &error);
    free(sites);
    return geometry;
}

arch arch_open(const char *name)
{
    static const char copy[] = "base_model.model.lm_head.base_layer.weight";
    char path[640], file[640];
    const golden_tensor *head;
    arch a = {.name = name};
    json_t *list;

    snprintf(file, sizeof file, "archs/%s/sites.json", name);
    golden_path(file, path, sizeof path);
    list = json_load_file(path, 0, NULL);
    assert_non_null(list);
    a.geometry = geometry_of(list);
    a.n_sites = (int32_t)json_array_size(list);
    json_decref(list);
    snprintf(file, sizeof file, "archs/%s/adapter/adapter_model.safetensors", name);
    a.adapter = golden_open(file);
    snprintf(file, sizeof file, "archs/%s/golden.safetensors", name);
    a.golden = golden_open(file);
    snprintf(file, sizeof file, "archs/%s/adapter", name);
    golden_path(file, a.folder, sizeof a.folder);
    head = golden_find(a.adapter, "%s", copy);
    if (head) /* there are no base weights: the copy itself is what it is held against */
        a.head = (sp_served_table){.struct_bytes = sizeof a.head,
                                   .data = head->data,
                                   .dtype = SP_DTYPE_BF16,
                                   .rows = (int32_t)head->shape[0],
                                   .hidden = (int32_t)head->shape[1]};
    return a;
}

void arch_close(arch *a)
{
    golden_close(a->adapter);
    golden_close(a->golden);
    sp_geometry_release(a->geometry);
}

sp_adapter *arch_adapter(const arch *a, sp_dtype pool_dtype)
{
    sp_adapter_options options;
    sp_adapter *adapter = NULL;
    sp_error error;

    sp_adapter_options_default(&options, sizeof options);
    options.geometry = a->geometry;
    options.pool_dtype = pool_dtype;
    options.served_head = a->head.data ? &a->head : NULL;
    assert_ok(sp_adapter_open(a->folder, &options, &adapter, &error), &error);
    return adapter;
}

/*
 * The name of a tensor: any text is a place, whose path and adapter name lie inside the text, or an
 * error with a code that names it.
 */
#include "fuzz/target.h"

#include "adapter/module_key.h"

#include <string.h>

#define NAME_BYTES_MAX 4096

/* The first four rows are of the table, all seven are not. */
static sp_geometry *make_geometry(size_t n_sites)
{
    static const sp_site sites[] = {
        {sizeof(sp_site), "model.layers.0.self_attn.q_proj", NULL, SP_SITE_LINEAR, 0, -1, 8, 8, -1,
         false},
        {sizeof(sp_site), "model.layers.1.linear_attn.out_proj", NULL, SP_SITE_LINEAR, 1, -1, 8, 8,
         -1, false},
        {sizeof(sp_site), "model.layers.1.mlp.experts.0.gate_proj", NULL, SP_SITE_EXPERT, 1, 0, 8,
         8, -1, false},
        {sizeof(sp_site), "lm_head", NULL, SP_SITE_HEAD, -1, -1, 8, 8, -1, false},
        /* Not of the table: with it names are looked up. */
        {sizeof(sp_site), "transformer.h.0.attn.c_attn", NULL, SP_SITE_LINEAR, 0, -1, 8, 8, -1,
         false},
        {sizeof(sp_site), "model.layers.1.moe.experts.2.w1", NULL, SP_SITE_EXPERT, 1, 2, 8, 8, -1,
         false},
        {sizeof(sp_site), "transformer.wte", NULL, SP_SITE_EMBEDDING, -1, -1, 8, 8, -1, false},
    };
    sp_geometry *geometry = NULL;

    FUZZ_CHECK(sp_geometry_create(sites, n_sites, &geometry, NULL) == SP_OK);
    return geometry;
}

static void check_key(const sp_module_key *key, const char *name)
{
    const char *end = name + strlen(name);

    FUZZ_CHECK(key->path >= name && key->path + key->path_bytes <= end);
    if (key->adapter_name_bytes > 0)
        FUZZ_CHECK(key->adapter_name >= name && key->adapter_name + key->adapter_name_bytes <= end);
    if (key->role == SP_ROLE_BIAS || key->role == SP_ROLE_MAGNITUDE)
        return;
    FUZZ_CHECK(key->layer >= -1 && key->expert >= -1);
    FUZZ_CHECK((key->layer == -1) == (key->kind == SP_SITE_EMBEDDING || key->kind == SP_SITE_HEAD));
}

/* Held against a model: the site that was found is the one, or there is a reason. */
static void check_read(const sp_geometry *geometry, const char *name)
{
    sp_module_key key;
    sp_error error;
    sp_site site = {.struct_bytes = sizeof site};

    if (sp_module_key_read(geometry, name, &key, &error) != SP_OK) {
        FUZZ_CHECK(error.code[0] != '\0' && error.text[0] != '\0');
        return;
    }
    check_key(&key, name);
    if (key.role == SP_ROLE_BIAS || key.role == SP_ROLE_MAGNITUDE || key.fused != SP_FUSED_NONE)
        return;
    FUZZ_CHECK(sp_geometry_site_at(geometry, key.site, &site, &error) == SP_OK);
    FUZZ_CHECK(site.layer == key.layer && site.expert == key.expert && site.kind == key.kind);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static sp_geometry *known, *mixed;
    char name[NAME_BYTES_MAX + 1];
    sp_module_key key;
    sp_error error;

    if (!known) {
        known = make_geometry(4);
        mixed = make_geometry(7);
    }
    if (bytes > NAME_BYTES_MAX)
        bytes = NAME_BYTES_MAX;
    memcpy(name, data, bytes);
    name[bytes] = '\0';
    check_read(known, name);
    check_read(mixed, name);
    if (sp_module_key_parse(name, &key, &error) != SP_OK) {
        FUZZ_CHECK(error.code[0] != '\0' && error.text[0] != '\0');
        return 0;
    }
    check_key(&key, name);
    if (key.role != SP_ROLE_BIAS && key.role != SP_ROLE_MAGNITUDE)
        FUZZ_CHECK(sp_module_name(key.module) != NULL);
    return 0;
}

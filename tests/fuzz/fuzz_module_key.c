/*
 * The name of a tensor: any text is a place, whose path and adapter name lie inside the text, or an
 * error with a code that names it.
 */
#include "fuzz/target.h"

#include "adapter/module_key.h"

#include <string.h>

#define NAME_BYTES_MAX 4096

static sp_geometry *make_geometry(void)
{
    static const sp_site_dims sites[] = {
        {0, SP_MODULE_Q_PROJ, 8, 8},
        {1, SP_MODULE_GDN_OUT, 8, 8},
        {1, SP_MODULE_EXPERT_GATE_PROJ, 8, 8},
        {-1, SP_MODULE_LM_HEAD, 8, 8},
    };
    sp_geometry *geometry = NULL;

    FUZZ_CHECK(sp_geometry_create(2, 4, sites, 4, &geometry, NULL) == SP_OK);
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
    FUZZ_CHECK(sp_module_name(key->module) != NULL);
    FUZZ_CHECK(key->layer >= -1 && key->expert >= -1);
    FUZZ_CHECK((key->layer == -1) ==
               (key->module == SP_MODULE_EMBED_TOKENS || key->module == SP_MODULE_LM_HEAD));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static sp_geometry *geometry;
    char name[NAME_BYTES_MAX + 1];
    sp_module_key key;
    sp_error error;

    if (!geometry)
        geometry = make_geometry();
    if (bytes > NAME_BYTES_MAX)
        bytes = NAME_BYTES_MAX;
    memcpy(name, data, bytes);
    name[bytes] = '\0';
    if (sp_module_key_parse(name, &key, &error) != SP_OK) {
        FUZZ_CHECK(error.code[0] != '\0' && error.text[0] != '\0');
        return 0;
    }
    check_key(&key, name);
    if (key.role == SP_ROLE_BIAS || key.role == SP_ROLE_MAGNITUDE)
        return 0;
    if (sp_module_key_check(geometry, &key, name, &error) == SP_OK)
        FUZZ_CHECK(sp_geometry_site(geometry, key.layer, key.module, NULL, NULL));
    else
        FUZZ_CHECK(error.code[0] != '\0');
    return 0;
}

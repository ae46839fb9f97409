/*
 * module.c: sets of modules, written as text.
 */
#include "adapter/geometry.h"
#include "base/error.h"

#include <string.h>

static const sp_module_row *module_row(const sp_geometry *geometry, int32_t module,
                                       sp_module_row *known)
{
    if (geometry)
        return sp_geometry_module_row(geometry, module);
    if (!sp_module_name((sp_module)module))
        return NULL;
    *known = (sp_module_row){sp_known_modules[module].name, sp_known_modules[module].kind,
                             (sp_module)module, -1};
    return known;
}

const char *sp_geometry_module_name(const sp_geometry *geometry, int32_t module)
{
    sp_module_row known;
    const sp_module_row *row = module_row(geometry, module, &known);

    return row ? row->name : NULL;
}

/* True when `name` is `path` or a suffix of it after a dot. */
static bool names_path(const char *path, const char *name, size_t n)
{
    size_t path_bytes = strlen(path);

    if (n == 0 || n > path_bytes || memcmp(path + path_bytes - n, name, n) != 0)
        return false;
    return n == path_bytes || path[path_bytes - n - 1] == '.';
}

/* A name without a dot ("gate_proj") does not match experts, which are named by path. */
static sp_module_set modules_named(const sp_geometry *geometry, const char *name, size_t n)
{
    bool all_linear = n == strlen("all-linear") && memcmp(name, "all-linear", n) == 0;
    sp_module_set set = 0;

    for (int32_t module = 0; module < sp_geometry_n_modules(geometry); module++) {
        sp_module_row known;
        const sp_module_row *row = module_row(geometry, module, &known);
        bool named =
            names_path(row->name, name, n) && (row->kind != SP_SITE_EXPERT || memchr(name, '.', n));

        if (all_linear ? row->kind == SP_SITE_LINEAR : named)
            set |= (sp_module_set)1 << module;
    }
    return set;
}

sp_status sp_module_set_parse(const sp_geometry *geometry, const char *text, sp_module_set *out_set,
                              sp_error *error)
{
    sp_module_set set = 0;

    if (!text || !out_set)
        return sp_fail_null(error, text ? "out_set" : "text");
    for (const char *name = text;;) {
        size_t n = strcspn(name, ",");
        const char *end = name + n;
        sp_module_set named;

        while (n > 0 && (*name == ' ' || *name == '\t')) {
            name++;
            n--;
        }
        while (n > 0 && (name[n - 1] == ' ' || name[n - 1] == '\t'))
            n--;
        named = modules_named(geometry, name, n);
        if (!named)
            return sp_fail(error, SP_ERR_INPUT, NULL, text, (int64_t)(name - text),
                           "\"%.*s\" names no module; use names such as %s or all-linear",
                           (int)(n < 100 ? n : 100), name, sp_geometry_module_name(geometry, 0));
        set |= named;
        if (*end == '\0')
            break;
        name = end + 1;
    }
    *out_set = set;
    return SP_OK;
}

/*
 * module.c: names of modules and sets of them.
 */
#include "adapter/geometry.h"
#include "base/error.h"

#include <sidepath/adapter.h>

#include <string.h>

static const char *const module_names[SP_MODULE_COUNT] = {
#define SP_MODULE_ROW(symbol, number, name) [symbol] = name,
    SP_MODULE_LIST(SP_MODULE_ROW)
#undef SP_MODULE_ROW
};

/* Linear modules outside experts, router, embeddings and head: what "all-linear" stands for. */
static const sp_module_set all_linear = SP_MODULE_BIT(SP_MODULE_ROUTER) - 1;

const char *sp_module_name(sp_module module)
{
    if ((int)module < 0 || module >= SP_MODULE_COUNT)
        return NULL;
    return module_names[module];
}

/* True when `name` is `path` or ends it at a dot. */
static bool names_path(const char *path, const char *name, size_t n)
{
    size_t path_bytes = strlen(path);

    if (n == 0 || n > path_bytes || memcmp(path + path_bytes - n, name, n) != 0)
        return false;
    return n == path_bytes || path[path_bytes - n - 1] == '.';
}

/* A name without a dot ("gate_proj") means no expert: those live apart and are named by path. */
static sp_module_set modules_named(const char *name, size_t n)
{
    static const sp_module_set experts = SP_MODULE_BIT(SP_MODULE_EXPERT_GATE_PROJ) |
                                         SP_MODULE_BIT(SP_MODULE_EXPERT_UP_PROJ) |
                                         SP_MODULE_BIT(SP_MODULE_EXPERT_DOWN_PROJ);
    sp_module_set set = 0;

    if (n == strlen("all-linear") && memcmp(name, "all-linear", n) == 0)
        return all_linear;
    for (int32_t module = 0; module < SP_MODULE_COUNT; module++) {
        if (names_path(module_names[module], name, n))
            set |= SP_MODULE_BIT(module);
    }
    return memchr(name, '.', n) ? set : set & ~experts;
}

sp_status sp_module_set_parse(const char *text, sp_module_set *out_set, sp_error *error)
{
    sp_module_set set = 0;

    if (!text || !out_set)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1, "no text or no result given");
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
        named = modules_named(name, n);
        if (!named)
            return sp_fail(error, SP_ERR_INPUT, NULL, text, (int64_t)(name - text),
                           "\"%.*s\" names no module; use names such as q_proj, mlp.gate_proj or "
                           "all-linear",
                           (int)(n < 100 ? n : 100), name);
        set |= named;
        if (*end == '\0')
            break;
        name = end + 1;
    }
    *out_set = set;
    return SP_OK;
}

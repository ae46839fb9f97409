/* known_module.c: the table itself. */
#include "adapter/known_module.h"

#include <string.h>

const sp_known_module sp_known_modules[SP_MODULE_COUNT] = {
#define SP_MODULE_ROW(symbol, number, name, kind, group) \
    [symbol] = {name, SP_SITE_##kind, SP_GROUP_##group},
    SP_KNOWN_MODULES(SP_MODULE_ROW)
#undef SP_MODULE_ROW
};

const char *sp_module_name(sp_module module)
{
    if ((int)module < 0 || module >= SP_MODULE_COUNT)
        return NULL;
    return sp_known_modules[module].name;
}

sp_module sp_module_find(const char *name, size_t n)
{
    for (int32_t module = 0; module < SP_MODULE_COUNT; module++) {
        const char *known = sp_known_modules[module].name;

        if (strlen(known) == n && memcmp(known, name, n) == 0)
            return (sp_module)module;
    }
    return SP_MODULE_OTHER;
}

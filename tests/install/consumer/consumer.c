/* Uses the installed library: one call that succeeds and one that explains its failure. */
#include <sidepath/adapter.h>
#include <sidepath/status.h>

#include <stdio.h>
#include <string.h>

int main(void)
{
    sp_module_set set = 0;
    sp_error error;

    if (sp_module_set_parse(NULL, "q_proj,mlp.gate_proj", &set, &error) != SP_OK)
        return 1;
    if (set != (1u << 0 | 1u << 11) ||
        strcmp(sp_geometry_module_name(NULL, 11), "mlp.gate_proj") != 0)
        return 2;
    if (sp_module_set_parse(NULL, "no_such_module", &set, &error) != SP_ERR_INPUT)
        return 3;
    if (!strstr(error.text, "no_such_module"))
        return 4;
    printf("%s\n", sp_status_name(error.status));
    return 0;
}

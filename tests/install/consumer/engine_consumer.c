/* Uses the installed engine: a model that is not there is one clear error. */
#include <sidepath/engine.h>

#include <stdio.h>

int main(void)
{
    sp_engine_options options;
    sp_engine *engine = NULL;
    sp_error error;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = "no-such-model";
    if (sp_engine_open(&options, NULL, 0, &engine, &error) != SP_ERR_NOT_FOUND || engine)
        return 1;
    printf("%s\n", sp_status_name(error.status));
    return 0;
}

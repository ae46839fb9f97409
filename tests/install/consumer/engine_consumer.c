/*
 * engine_consumer [MODEL ADAPTER]: uses the installed engine, and the library beside it. A model
 * that is not there is one clear error; one that is there shows that both are one library: digests
 * of one adapter agree, and the library knows of the memory that the engine holds.
 */
#include <sidepath/allocator.h>
#include <sidepath/engine.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *host_alloc(void *user, size_t bytes, size_t align_bytes)
{
    (void)user;
    (void)align_bytes;
    return malloc(bytes);
}

static void host_free(void *user, void *memory, size_t bytes, size_t align_bytes)
{
    (void)user;
    (void)bytes;
    (void)align_bytes;
    free(memory);
}

static int share(const char *model, const char *path)
{
    const sp_host_allocator allocator = {sizeof allocator, NULL, host_alloc, host_free};
    const sp_engine_adapter wanted = {sizeof wanted, "a", path};
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_engine_options options;
    sp_adapter_options adapter_options;
    sp_geometry *geometry = NULL;
    sp_adapter *adapter = NULL;
    sp_engine *engine = NULL;
    sp_digest digest;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = model;
    options.threads = 1;
    options.kv_tokens = 64;
    if (sp_engine_open(&options, &wanted, 1, &engine, NULL) != SP_OK ||
        sp_stage_find(sp_engine_stage(engine), "a", &info, NULL) != SP_OK ||
        sp_geometry_open(model, &geometry, NULL) != SP_OK)
        return 2;
    sp_adapter_options_default(&adapter_options, sizeof adapter_options);
    adapter_options.geometry = geometry;
    if (sp_adapter_open(path, &adapter_options, &adapter, NULL) != SP_OK)
        return 3;
    digest = sp_adapter_digest(adapter);
    if (memcmp(&digest, &info.digest, sizeof digest) != 0)
        return 4;
    sp_adapter_release(adapter);
    sp_geometry_release(geometry);
    if (sp_host_allocator_set(&allocator, NULL) != SP_ERR_STATE)
        return 5;
    sp_engine_close(engine);
    return sp_host_allocator_set(&allocator, NULL) == SP_OK ? 0 : 6;
}

int main(int argc, char **argv)
{
    sp_engine_options options;
    sp_engine *engine = NULL;
    sp_error error;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = "no-such-model";
    if (sp_engine_open(&options, NULL, 0, &engine, &error) != SP_ERR_NOT_FOUND || engine)
        return 1;
    if (argc == 3) {
        int failed = share(argv[1], argv[2]);

        if (failed)
            return failed;
    }
    printf("%s\n", sp_status_name(error.status));
    return 0;
}

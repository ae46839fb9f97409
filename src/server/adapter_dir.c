#include "server/adapter_dir.h"

#include "base/alloc.h"
#include "base/confine.h"
#include "base/error.h"
#include "base/file.h"

#include <sidepath/engine.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static sp_status leads_out(const char *path, sp_error *error)
{
    return sp_fail(error, SP_ERR_INPUT, SP_CODE_UNSAFE_PATH, "lora_path", -1,
                   "lora_path \"%s\" leads out of the directory of adapters", path);
}

/* Absolute: inside by its text, or not at all. The kernel judges the rest when it is opened. */
static char *full_path(const char *path, bool *out_outside)
{
    *out_outside = path[0] == '/' && !sp_is_confined(path, NULL);
    if (*out_outside)
        return NULL;
    return path[0] == '/' ? sp_strdup(path) : sp_path_join(sp_confine_directory(), path);
}

sp_status sp_adapter_dir_resolve(const char *path, char **out_path, sp_error *error)
{
    bool outside;
    char *full;
    int fd, number;

    if (!sp_confine_directory())
        return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "lora_path", -1,
                       "the server was started without --adapter-dir, so it loads no paths");
    if (path[0] == '\0')
        return sp_fail(error, SP_ERR_INPUT, NULL, "lora_path", -1, "lora_path is empty");
    full = full_path(path, &outside);
    if (outside)
        return leads_out(path, error);
    if (!full)
        return sp_fail_memory(error, strlen(path), "a path");
    fd = sp_confined_open(full, O_PATH);
    if (fd >= 0) {
        close(fd);
        *out_path = full;
        return SP_OK;
    }
    number = errno;
    sp_free(full);
    if (number == EXDEV || number == ELOOP)
        return leads_out(path, error);
    return sp_fail(error, SP_ERR_NOT_FOUND, NULL, "lora_path", -1,
                   "no adapter was found at lora_path \"%s\"", path);
}

static bool holds_adapter(const char *folder)
{
    char *config = sp_path_join(folder, "adapter_config.json");
    bool holds = config && sp_path_exists(config);

    sp_free(config);
    return holds;
}

char *sp_adapter_dir_find(const char *name, const char *base)
{
    char *folder;

    if (!sp_confine_directory() || name[0] == '.' || strchr(name, '/') ||
        sp_engine_name_check(name, base, NULL) != SP_OK)
        return NULL;
    folder = sp_path_join(sp_confine_directory(), name);
    if (folder && holds_adapter(folder))
        return folder;
    sp_free(folder);
    return NULL;
}

void sp_adapter_dir_list(const char *base, void (*visit)(void *user, const char *name), void *user)
{
    DIR *directory = sp_confine_directory() ? opendir(sp_confine_directory()) : NULL;
    struct dirent *entry;

    if (!directory)
        return;
    while ((entry = readdir(directory)) != NULL) {
        char *folder = sp_adapter_dir_find(entry->d_name, base);

        if (folder)
            visit(user, entry->d_name);
        sp_free(folder);
    }
    closedir(directory);
}

/*
 * adapter_dir.h: the directory of adapters that clients may name. It turns names and paths from
 * requests into paths inside the directory, or refuses; base/confine.h sees to it that opening
 * them cannot lead out. Functions may be called by any thread.
 */
#ifndef SP_SERVER_ADAPTER_DIR_H
#define SP_SERVER_ADAPTER_DIR_H

#include <sidepath/status.h>

#include <stdbool.h>

/*
 * Where `path`, relative to the directory or absolute inside it, leads. *out_path is owned by the
 * caller (sp_free). SP_ERR_UNSUPPORTED: the server has no directory of adapters. SP_ERR_INPUT with
 * `unsafe-path`: it leads out. SP_ERR_NOT_FOUND: nothing is there.
 */
sp_status sp_adapter_dir_resolve(const char *path, char **out_path, sp_error *error);

/* The folder of this name, when it is a name that an adapter may have beside this base, is there,
 * and holds an adapter_config.json; NULL otherwise. */
char *sp_adapter_dir_find(const char *name, const char *base);

/* Calls `visit` for each such folder, in no order. */
void sp_adapter_dir_list(const char *base, void (*visit)(void *user, const char *name), void *user);

#endif

/*
 * lora_dir.h: the directory of adapters that clients may name. It turns names and paths from
 * requests into paths inside the directory, or refuses; base/confine.h sees to it that opening
 * them cannot lead out.
 *
 * Whatever touches the file system is done by one thread of its own, since a file system may be
 * slow and must delay nothing else: tasks that need it pass through here on their way to the
 * engine's thread. The directory is scanned concurrently; lists are made of the last scan.
 */
#ifndef SP_SERVER_DRIVER_LORA_DIR_H
#define SP_SERVER_DRIVER_LORA_DIR_H

#include "server/driver/lora_task.h"

typedef struct sp_lora_dir sp_lora_dir;

/* The code of a path that does not exist, with SP_ERR_NOT_FOUND. */
#define SP_CODE_ADAPTER_NOT_FOUND "adapter-not-found"

/* Called on the thread, with `user` borrowed. */
typedef struct sp_lora_dir_hooks {
    void *user;
    /* Gets each task that has passed, with the outcome in it, and takes the reference. */
    void (*done)(void *user, sp_lora_task *task);
    /* Understands the files of a folder that was looked up; does not wait for the file system. */
    sp_status (*understand)(void *user, const sp_lora_files *files, sp_lora_chat **out_chat,
                            sp_error *error);
    /* What a scan finds and lists do not show, once for each name (64 at most), with a sentence;
     * the name is a stranger's text. */
    void (*skipped)(void *user, const char *name, const char *why);
    void (*found)(void *user, size_t n); /* by the first scan, once */
} sp_lora_dir_hooks;

/*
 * Starts the thread and a first scan of the directory of base/confine.h; `base` is borrowed.
 * *out_dir is owned by the caller. SP_ERR_MEMORY, SP_ERR_THREAD.
 */
sp_status sp_lora_dir_open(const char *base, const sp_lora_dir_hooks *hooks, sp_lora_dir **out_dir,
                           sp_error *error);
/* No hook is called after this. A thread that waits for the file system is abandoned until the
 * process ends. NULL is allowed. */
void sp_lora_dir_close(sp_lora_dir *dir);

/*
 * Any thread: looks up what task->look_up says, then passes the task on. SP_LOOK_UP_PATH: whether
 * anything is at task->path, else the task ends with SP_CODE_ADAPTER_NOT_FOUND, or `unsafe-path`
 * where it leads out. SP_LOOK_UP_NAME: the folder of task->name into task->path, which stays NULL
 * where there is none. SP_LOOK_UP_LIST: a scan, unless that takes
 * long; then the next list is of it. What the folder of a path says of requests is read into
 * task->chat. Takes a reference of its own.
 */
void sp_lora_dir_look_up(sp_lora_dir *dir, sp_lora_task *task);

/* Any thread, no file system: whether a folder of that name could be an adapter beside `base`. */
bool sp_lora_dir_may_hold(const char *name, const char *base);

/*
 * No file system: where `path`, relative to the directory or absolute inside it (as the system
 * knows it, or as the server was given it), would be. *out_path is owned by the caller (sp_free).
 * SP_ERR_UNSUPPORTED: the server has no directory of adapters. SP_ERR_INPUT with `unsafe-path`: it
 * leads out by its text.
 */
sp_status sp_lora_dir_resolve(const char *path, char **out_path, sp_error *error);

/* No file system: whether the last scan found a folder of this name. A NULL directory: no. */
bool sp_lora_dir_has_listed(sp_lora_dir *dir, const char *name);

/* Calls `visit` for each folder of the last scan, in no order. A NULL directory holds none. */
void sp_lora_dir_list(sp_lora_dir *dir, void (*visit)(void *user, const char *name), void *user);

#endif

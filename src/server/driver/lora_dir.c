#include "server/driver/lora_dir.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/confine.h"
#include "base/error.h"
#include "base/file.h"
#include "server/driver/helper.h"

#include <sidepath/engine.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define QUICK_SCAN_NS 50000000u  /* a list waits for a scan that takes no longer, */
#define FIRST_SCAN_NS 500000000u /* and for the first as long as this */
#define TOLD_MAX      64         /* what is skipped is named, each once, as far as this */
#define CONFIG_NAME   "adapter_config.json"

typedef struct name_list {
    char **names; /* [n] */
    size_t n, capacity;
} name_list;

struct sp_lora_dir {
    sp_helper helper; /* its lock is that of all below `told` */
    const char *base;
    sp_lora_dir_hooks hooks;
    name_list told;        /* the thread's own: what was said to be skipped */
    sp_task *first, *last; /* tasks to be looked at, by `next` */
    name_list found;       /* by the last scan, and by what was looked up since */
    bool scan_wanted, scanning, has_scanned;
    uint64_t scan_began_ns, last_scan_ns; /* the second: how long it took */
};

/* ---- names --------------------------------------------------------------------------------- */

static size_t find_name(const name_list *list, const char *name)
{
    size_t i = 0;

    while (i < list->n && strcmp(list->names[i], name) != 0)
        i++;
    return i;
}

/* Short of memory a name is missing until the next scan. */
static void add_name(name_list *list, const char *name)
{
    if (list->n == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 16;
        char **grown = sp_realloc(list->names, capacity * sizeof *grown);

        if (!grown)
            return;
        list->names = grown;
        list->capacity = capacity;
    }
    list->names[list->n] = sp_strdup(name);
    list->n += list->names[list->n] != NULL;
}

static void free_names(name_list *list)
{
    for (size_t i = 0; i < list->n; i++)
        sp_free(list->names[i]);
    sp_free(list->names);
    *list = (name_list){NULL, 0, 0};
}

static void note_name(sp_lora_dir *dir, const char *name, bool there)
{
    size_t i;

    pthread_mutex_lock(&dir->helper.lock);
    i = find_name(&dir->found, name);
    if (there && i == dir->found.n) {
        add_name(&dir->found, name);
    } else if (!there && i < dir->found.n) {
        sp_free(dir->found.names[i]);
        dir->found.names[i] = dir->found.names[--dir->found.n];
    }
    pthread_mutex_unlock(&dir->helper.lock);
}

bool sp_lora_dir_may_hold(const char *name, const char *base)
{
    return sp_confine_directory() && name[0] != '.' && !strchr(name, '/') &&
           sp_stage_name_check(name, base, NULL) == SP_OK;
}

/* ---- paths --------------------------------------------------------------------------------- */

static sp_status leads_out(const char *path, sp_error *error)
{
    return sp_fail(error, SP_ERR_INPUT, SP_CODE_UNSAFE_PATH, "lora_path", -1,
                   "lora_path \"%s\" leads out of the directory of adapters", path);
}

sp_status sp_lora_dir_resolve(const char *path, char **out_path, sp_error *error)
{
    const char *relative = path;
    char *full;

    if (!sp_confine_directory())
        return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "lora_path", -1,
                       "the server was started without --adapter-dir, so it loads no paths");
    if (path[0] == '\0')
        return sp_fail(error, SP_ERR_INPUT, NULL, "lora_path", -1, "lora_path is empty");
    /* Absolute: inside by its text, or not at all. The kernel judges the rest at the opening. */
    if (path[0] == '/' && !sp_is_confined(path, &relative))
        return leads_out(path, error);
    full = sp_path_join(sp_confine_directory(), relative);
    if (!full)
        return sp_fail_memory(error, strlen(path), "a path");
    *out_path = full;
    return SP_OK;
}

/* ---- the file system, on the thread ---------------------------------------------------------- */

/* The path as clients know it. */
static const char *shown_path(const char *path)
{
    const char *relative;

    return sp_is_confined(path, &relative) ? relative : path;
}

static sp_status look_up_path(const char *path, sp_error *error)
{
    int fd = sp_confined_open(path, O_PATH);

    if (fd >= 0) {
        close(fd);
        return SP_OK;
    }
    if (errno == EXDEV || errno == ELOOP)
        return leads_out(shown_path(path), error);
    return sp_fail(error, SP_ERR_NOT_FOUND, SP_CODE_ADAPTER_NOT_FOUND, "lora_path", -1,
                   "no adapter was found at lora_path \"%s\"", shown_path(path));
}

static bool holds_adapter(const char *folder)
{
    char *config = sp_path_join(folder, CONFIG_NAME);
    bool holds = config && sp_path_exists(config);

    sp_free(config);
    return holds;
}

/* Its folder, owned by the caller; NULL: there is none. */
static char *find_folder(const sp_lora_dir *dir, const char *name)
{
    char *folder;

    if (!sp_lora_dir_may_hold(name, dir->base))
        return NULL;
    folder = sp_path_join(sp_confine_directory(), name);
    if (folder && holds_adapter(folder))
        return folder;
    sp_free(folder);
    return NULL;
}

/* Passes the task on, unless the directory is being closed. */
static void pass_on(sp_lora_dir *dir, sp_lora_task *task)
{
    pthread_mutex_lock(&dir->helper.lock);
    if (dir->helper.closed)
        sp_task_release(&task->task);
    else
        dir->hooks.done(dir->hooks.user, task);
    pthread_mutex_unlock(&dir->helper.lock);
}

/* What the adapter's folder says of requests. A directory that is being closed says nothing: the
 * task goes nowhere then. */
static void read_chat(sp_lora_dir *dir, sp_lora_task *task, sp_error *error)
{
    sp_lora_files files;

    if (sp_lora_files_read(task->path, &files, error) != SP_OK)
        return;
    if (sp_helper_enter(&dir->helper)) {
        dir->hooks.understand(dir->hooks.user, &files, &task->chat, error);
        sp_helper_leave(&dir->helper);
    }
    sp_lora_files_free(&files);
}

static void look_up(sp_lora_dir *dir, sp_lora_task *task)
{
    sp_error error = {0};
    sp_status status = SP_OK;

    if (task->look_up == SP_LOOK_UP_PATH) {
        status = look_up_path(task->path, &error);
    } else if (task->look_up == SP_LOOK_UP_NAME) {
        task->path = find_folder(dir, task->name);
        note_name(dir, task->name, task->path != NULL);
    }
    if (status == SP_OK && task->path)
        read_chat(dir, task, &task->look_up_error);
    task->looked_up = true;
    /* The driver's own question has an answer in any case: there is no folder. */
    if (status != SP_OK && task->task.kind == SP_TASK_FOLDER) {
        sp_free(task->path);
        task->path = NULL;
        status = SP_OK;
    }
    if (status == SP_OK) {
        pass_on(dir, task);
        return;
    }
    sp_task_finish(&task->task, status, &error);
    sp_task_release(&task->task);
}

/* Under the lock. Takes out the first task, of lists only those that were requested before. */
static sp_lora_task *take_task(sp_lora_dir *dir, uint64_t lists_before_ns)
{
    sp_task **link = &dir->first;
    sp_task *before = NULL;

    for (; *link && !dir->helper.closed; before = *link, link = &(*link)->next) {
        sp_lora_task *task = (sp_lora_task *)(void *)*link;

        if (task->look_up == SP_LOOK_UP_LIST && task->asked_ns > lists_before_ns)
            continue;
        *link = task->task.next;
        if (dir->last == &task->task)
            dir->last = before;
        return task;
    }
    return NULL;
}

static void serve_tasks(sp_lora_dir *dir, uint64_t lists_before_ns)
{
    sp_lora_task *task;

    do {
        pthread_mutex_lock(&dir->helper.lock);
        task = take_task(dir, lists_before_ns);
        pthread_mutex_unlock(&dir->helper.lock);
        if (task)
            look_up(dir, task);
    } while (task);
}

static bool is_closed(sp_lora_dir *dir)
{
    bool closed;

    pthread_mutex_lock(&dir->helper.lock);
    closed = dir->helper.closed;
    pthread_mutex_unlock(&dir->helper.lock);
    return closed;
}

/* ---- what is skipped ------------------------------------------------------------------------- */

#define WHAT_TO_DO \
    "; copy there what it links to, or name that place at the start with --adapter NAME=DIR"

static const char *why_config_fails(const char *folder)
{
    char *config = sp_path_join(folder, CONFIG_NAME);
    int fd = config ? sp_confined_open(config, O_PATH) : -1;

    sp_free(config);
    if (fd >= 0)
        close(fd);
    if (fd < 0 && (errno == EXDEV || errno == ELOOP))
        return "its " CONFIG_NAME " is a link out of the directory" WHAT_TO_DO;
    return fd < 0 && errno != ENOENT ? "its " CONFIG_NAME " cannot be opened"
                                     : "it has no " CONFIG_NAME;
}

/* NULL: it is nothing that anybody would take for an adapter. */
static const char *why_skipped(const sp_lora_dir *dir, const char *name, const char *folder)
{
    static const char repository[] = "models--";
    struct stat info;
    int fd = sp_confined_open(folder, O_PATH);
    bool is_folder = fd >= 0 && fstat(fd, &info) == 0 && S_ISDIR(info.st_mode);

    if (fd >= 0)
        close(fd);
    else if (errno == EXDEV || errno == ELOOP)
        return "it is a link out of the directory" WHAT_TO_DO;
    if (strcmp(name, CONFIG_NAME) == 0)
        return "the directory is an adapter itself, and should hold adapters; name it with "
               "--adapter NAME=DIR, or give the directory above it";
    if (!is_folder)
        return NULL;
    if (strncmp(name, repository, sizeof repository - 1) == 0)
        return "it is a repository of a Hugging Face cache; an adapter of it is the folder "
               "snapshots/REVISION in it: name that with --adapter NAME=DIR";
    if (!sp_lora_dir_may_hold(name, dir->base))
        return "no adapter can have this name";
    return why_config_fails(folder);
}

/* A server that ends meanwhile is told nothing. */
static void tell(sp_lora_dir *dir, const char *name, const char *why)
{
    pthread_mutex_lock(&dir->helper.lock);
    if (!dir->helper.closed)
        dir->hooks.skipped(dir->hooks.user, name, why);
    pthread_mutex_unlock(&dir->helper.lock);
}

static void tell_skipped(sp_lora_dir *dir, const char *name)
{
    char *folder;
    const char *why;

    if (name[0] == '.' || dir->told.n == TOLD_MAX || find_name(&dir->told, name) < dir->told.n)
        return;
    folder = sp_path_join(sp_confine_directory(), name);
    why = folder ? why_skipped(dir, name, folder) : NULL;
    if (why) {
        add_name(&dir->told, name);
        tell(dir, name, why);
    }
    sp_free(folder);
}

/* ---- scans ----------------------------------------------------------------------------------- */

/* The directory that was opened at the start, wherever it was moved since. */
static DIR *open_listing(void)
{
    int fd = sp_confined_open(sp_confine_directory(), O_RDONLY | O_DIRECTORY);
    DIR *listing = fd >= 0 ? fdopendir(fd) : NULL;

    if (fd >= 0 && !listing)
        close(fd);
    return listing;
}

/* What is looked up meanwhile does not wait for the rest of the scan, nor do lists for long. */
static void read_folders(sp_lora_dir *dir, name_list *out_found)
{
    DIR *directory = open_listing();
    struct dirent *entry;

    if (!directory)
        return;
    while ((entry = readdir(directory)) != NULL && !is_closed(dir)) {
        char *folder = find_folder(dir, entry->d_name);

        if (folder)
            add_name(out_found, entry->d_name);
        else
            tell_skipped(dir, entry->d_name);
        sp_free(folder);
        serve_tasks(dir, sp_clock_ns() - dir->scan_began_ns > FIRST_SCAN_NS ? UINT64_MAX : 0);
    }
    closedir(directory);
}

static void scan(sp_lora_dir *dir)
{
    name_list found = {NULL, 0, 0}, before;

    read_folders(dir, &found);
    pthread_mutex_lock(&dir->helper.lock);
    before = dir->found;
    dir->found = found;
    if (!dir->has_scanned && !dir->helper.closed)
        dir->hooks.found(dir->hooks.user, found.n);
    dir->scanning = false;
    dir->has_scanned = true;
    dir->last_scan_ns = sp_clock_ns() - dir->scan_began_ns;
    pthread_mutex_unlock(&dir->helper.lock);
    free_names(&before);
}

static void destroy(void *state)
{
    sp_lora_dir *dir = state;

    while (dir->first) {
        sp_task *task = dir->first;

        dir->first = task->next;
        sp_task_release(task);
    }
    free_names(&dir->found);
    free_names(&dir->told);
    sp_helper_destroy(&dir->helper);
    sp_free(dir);
}

static void run(void *state)
{
    sp_lora_dir *dir = state;

    pthread_mutex_lock(&dir->helper.lock);
    while (!dir->helper.closed) {
        uint64_t began_ns = dir->scan_began_ns;
        bool scans = dir->scan_wanted;

        if (!dir->first && !scans) {
            sp_helper_wait(&dir->helper, 0);
            continue;
        }
        if (scans) {
            dir->scan_wanted = false;
            dir->scanning = true;
            began_ns = dir->scan_began_ns = sp_clock_ns();
        }
        pthread_mutex_unlock(&dir->helper.lock);
        if (scans)
            scan(dir);
        serve_tasks(dir, began_ns);
        pthread_mutex_lock(&dir->helper.lock);
    }
    pthread_mutex_unlock(&dir->helper.lock);
}

/* ---- any thread ---------------------------------------------------------------------------- */

sp_status sp_lora_dir_open(const char *base, const sp_lora_dir_hooks *hooks, sp_lora_dir **out_dir,
                           sp_error *error)
{
    sp_lora_dir *dir = sp_calloc(1, sizeof *dir);
    sp_status status;

    if (!dir)
        return sp_fail_memory(error, sizeof *dir, "the directory of adapters");
    dir->base = base;
    dir->hooks = *hooks;
    dir->scan_wanted = true;
    sp_helper_init(&dir->helper);
    status = sp_helper_start(&dir->helper, "the directory of adapters", run, destroy, dir, error);
    if (status == SP_OK)
        *out_dir = dir;
    else
        destroy(dir);
    return status;
}

void sp_lora_dir_close(sp_lora_dir *dir)
{
    if (dir)
        sp_helper_close(&dir->helper);
}

/* Under the lock: whether a scan that begins now would be over soon, by what is known. */
static bool scans_quickly(const sp_lora_dir *dir)
{
    uint64_t most_ns = dir->has_scanned ? QUICK_SCAN_NS : FIRST_SCAN_NS;

    if (dir->scanning && sp_clock_ns() - dir->scan_began_ns > most_ns)
        return false;
    return !dir->has_scanned || dir->last_scan_ns <= QUICK_SCAN_NS;
}

void sp_lora_dir_look_up(sp_lora_dir *dir, sp_lora_task *task)
{
    bool passes = false;

    sp_task_retain(&task->task);
    pthread_mutex_lock(&dir->helper.lock);
    if (task->look_up == SP_LOOK_UP_LIST) {
        passes = !scans_quickly(dir);
        dir->scan_wanted = true;
        task->asked_ns = sp_clock_ns();
    }
    task->looked_up = passes;
    if (!passes) {
        task->task.next = NULL;
        if (dir->last)
            dir->last->next = &task->task;
        else
            dir->first = &task->task;
        dir->last = &task->task;
    }
    pthread_cond_signal(&dir->helper.news);
    pthread_mutex_unlock(&dir->helper.lock);
    if (passes)
        pass_on(dir, task);
}

bool sp_lora_dir_has_listed(sp_lora_dir *dir, const char *name)
{
    bool found;

    if (!dir)
        return false;
    pthread_mutex_lock(&dir->helper.lock);
    found = find_name(&dir->found, name) < dir->found.n;
    pthread_mutex_unlock(&dir->helper.lock);
    return found;
}

void sp_lora_dir_list(sp_lora_dir *dir, void (*visit)(void *user, const char *name), void *user)
{
    if (!dir)
        return;
    pthread_mutex_lock(&dir->helper.lock);
    for (size_t i = 0; i < dir->found.n; i++)
        visit(user, dir->found.names[i]);
    pthread_mutex_unlock(&dir->helper.lock);
}

/*
 * confine.h: one directory of the process out of which no path leads. After sp_confine_to, every
 * file that is opened through file.h by a path that comes through that directory is opened from
 * the directory's handle: "..", and a link that points outside, lead nowhere, whenever and by
 * whomever they were put there. Which path that is says the directory itself, not how a path is
 * spelled: it may be relative, come through links, or through another mount. Paths elsewhere are as
 * before. For a program whose clients name paths.
 *
 * A snapshot in the cache of Hugging Face holds links to the files of its repository beside it.
 * Where the directory is such a snapshot, or lies in one, they are followed as far as that
 * repository's own folder.
 */
#ifndef SP_BASE_CONFINE_H
#define SP_BASE_CONFINE_H

#include <sidepath/status.h>

#include <stdbool.h>

/* The reason code of a path that leads out. */
#define SP_CODE_UNSAFE_PATH "unsafe-path"

/*
 * Once, at start, before other threads open files; a second call replaces the first, NULL ends it.
 * SP_ERR_NOT_FOUND, SP_ERR_INPUT: no such directory. SP_ERR_MEMORY.
 */
sp_status sp_confine_to(const char *directory, sp_error *error);
/* The directory as the system knows it, without links; NULL: none. */
const char *sp_confine_directory(void);

/* Whether `path` is below the directory as text, as the system knows it or as it was named
 * (made absolute). *out_relative (may be NULL): the rest of it. No file system. */
bool sp_is_confined(const char *path, const char **out_relative);

/* open(2), confined where the path is; the directory itself can be opened so. -1 and errno: EXDEV
 * for a path that leads out. */
int sp_confined_open(const char *path, int flags);

#endif

/*
 * confine.h: confines paths below one directory of the process. After sp_confine_to, every file
 * that is opened through file.h by a path through that directory is opened relative to the
 * directory's handle: "..", and links that point outside, are refused, whenever and by whomever
 * they were created. The directory's identity decides which paths these are, not their spelling: a
 * path may be relative, or come through links or another mount. Other paths are not affected. For a
 * program whose clients name paths.
 *
 * A snapshot in the Hugging Face cache contains links to its repository's files beside it. If the
 * directory is such a snapshot, or inside one, links are followed within that repository's folder.
 */
#ifndef SP_BASE_CONFINE_H
#define SP_BASE_CONFINE_H

#include <sidepath/status.h>

#include <stdbool.h>

/* The reason code of a path that leads out of the directory. */
#define SP_CODE_UNSAFE_PATH "unsafe-path"

/*
 * Sets the directory; at start, before other threads open files. A second call replaces it, NULL
 * ends the confinement. SP_ERR_NOT_FOUND, SP_ERR_INPUT: no such directory. SP_ERR_MEMORY.
 */
sp_status sp_confine_to(const char *directory, sp_error *error);
/* The directory's resolved path; NULL: none. Any thread. */
const char *sp_confine_directory(void);

/* Whether `path` is textually below the directory, by its resolved path or by the given one (made
 * absolute). *out_relative (may be NULL) is the rest of it. Does not access the file system. */
bool sp_is_confined(const char *path, const char **out_relative);

/* open(2), confined where the path is; the directory itself can be opened so. -1 and errno: EXDEV
 * for a path that leads out. */
int sp_confined_open(const char *path, int flags);

#endif

/*
 * version.h: which Sidepath a host was compiled against, and which one it runs with. This is the
 * one place that states the version: the build, the program and the package files read it here.
 *
 * Within one minor version a host that was compiled against older headers runs with a newer
 * library: functions, enumerators and fields are only added, fields at the end of a struct that
 * begins with its size (`struct_bytes`). Another minor version is another library, with a soname
 * (libsidepath.so.0.2) and symbol versions (SIDEPATH_0.2) of its own.
 *
 * Stability: stable.
 */
#ifndef SIDEPATH_VERSION_H
#define SIDEPATH_VERSION_H

#include <stdint.h>

#define SP_VERSION_MAJOR 0
#define SP_VERSION_MINOR 2
#define SP_VERSION_PATCH 0

/* A version as one number that grows: 0.2.0 is 200, 1.12.3 is 11203. */
#define SP_VERSION_NUMBER(major, minor, patch) ((major)*10000 + (minor)*100 + (patch))

/* The version of these headers. */
#define SP_VERSION SP_VERSION_NUMBER(SP_VERSION_MAJOR, SP_VERSION_MINOR, SP_VERSION_PATCH)

/* A host that puts the library into one of its own may define this before, as nothing at all. */
#ifndef SP_API
#if defined(__GNUC__)
#define SP_API __attribute__((visibility("default")))
#else
#define SP_API
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* SP_VERSION of the library in use: at least the host's own SP_VERSION. Any thread. */
SP_API int32_t sp_library_version(void);

/* The same as text, "0.2.0"; static storage. */
SP_API const char *sp_library_version_text(void);

#ifdef __cplusplus
}
#endif
#endif

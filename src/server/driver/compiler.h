/*
 * compiler.h: a thread between the HTTP thread and the driver, for generations whose outputs are
 * constrained: it compiles what is wanted, which may take some tenths of a second, and passes them
 * on. It owns the thread and a cache of what was compiled, by kind and text; what does not compile
 * ends the generation. It must not know: HTTP, JSON, how an output is constrained.
 */
#ifndef SP_SERVER_DRIVER_COMPILER_H
#define SP_SERVER_DRIVER_COMPILER_H

#include "server/driver/driver.h"

typedef struct sp_compiler sp_compiler;

/* Both are borrowed until the stop. *out_compiler is owned by the caller. SP_ERR_MEMORY,
 * SP_ERR_THREAD. */
sp_status sp_compiler_start(const sp_engine *engine, sp_driver *driver, sp_compiler **out_compiler,
                            sp_error *error);
/* After the driver's stop, so that what is left is refused; waits for what is being compiled. NULL
 * is allowed. */
void sp_compiler_stop(sp_compiler *compiler);

/* sp_driver_generate, by way of the thread where something is to be compiled. Any thread. */
sp_status sp_compiler_generate(sp_compiler *compiler, sp_generation *generation, sp_error *error);

#endif

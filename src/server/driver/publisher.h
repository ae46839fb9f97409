/*
 * publisher.h: a thread between the HTTP thread and the driver, for adapters that come in requests:
 * it reads their bytes, copies what is in shared memory, audits and hashes, and passes an adapter
 * on to the driver, which packs it on the stage's thread. What is refused here never reaches the
 * engine, and no step waits for any of it. Where there is a store it also writes the content there
 * before the driver gets it, and records what names mean before anybody is told: by then a version
 * is whole, and stays. It must not know: HTTP, how an adapter is packed.
 */
#ifndef SP_SERVER_DRIVER_PUBLISHER_H
#define SP_SERVER_DRIVER_PUBLISHER_H

#include "server/driver/adapter_store.h"
#include "server/driver/driver.h"

typedef struct sp_publisher sp_publisher;

/* The codes of shared memory that cannot be read: there is none of that name, it is shorter than
 * the request says, it was changed in length while it was copied. */
#define SP_CODE_SHARED_MISSING "shm-missing"
#define SP_CODE_SHARED_BOUNDS  "shm-bounds"
/* And of a client that is on another host. */
#define SP_CODE_SHARED_ELSEWHERE "shm-other-host"

/* All are borrowed until the destroy; `store` may be NULL. *out_publisher is owned by the caller,
 * and has no thread yet, so that the driver can be started with sp_publisher_keep. SP_ERR_MEMORY.
 */
sp_status sp_publisher_create(const sp_engine *engine, sp_adapter_store *store, sp_log *log,
                              sp_publisher **out_publisher, sp_error *error);
/* SP_ERR_THREAD. */
sp_status sp_publisher_start(sp_publisher *publisher, sp_driver *driver, sp_error *error);
/* After the driver's stop, so that what is left is refused; waits for what is being read or
 * written. NULL is allowed. */
void sp_publisher_stop(sp_publisher *publisher);
void sp_publisher_destroy(sp_publisher *publisher); /* NULL is allowed */

/* sp_driver_options.keep; `user` is the publisher. */
bool sp_publisher_keep(void *user, sp_lora_task *task);

/* Any thread: a SP_TASK_LOAD with task->published. SP_ERR_STATE with `shutting-down`. */
sp_status sp_publisher_publish(sp_publisher *publisher, sp_lora_task *task, sp_error *error);

#endif

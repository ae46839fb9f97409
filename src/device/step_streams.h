/*
 * step_streams.h: orders the main stream, on which a pool switches its tables, and the streams on
 * which steps may run: every stream that was created or wrapped. Events are recorded when a pool
 * needs them, which is rare; a step costs nothing. For one device these calls and the creation of
 * streams must not run concurrently. No-ops on the CPU. device may not be NULL.
 */
#ifndef SP_DEVICE_STEP_STREAMS_H
#define SP_DEVICE_STEP_STREAMS_H

#include <sidepath/device.h>

/* Makes the main stream wait for all work now on the others. Does not block. */
sp_status sp_device_main_follows(sp_device *device, sp_error *error);

/* Makes the others wait for all work now on the main stream. Does not block. */
sp_status sp_device_others_follow(sp_device *device, sp_error *error);

/* Blocks until all of them, and the main stream, are idle. */
sp_status sp_device_wait_all(sp_device *device, sp_error *error);

/* Creates a stream outside this order, on which no step runs: for copies concurrent with steps. */
sp_status sp_stream_create_apart(sp_device *device, sp_stream **out_stream, sp_error *error);

#endif

/*
 * step_streams.h: the order between the main stream, on which a pool switches its tables, and the
 * streams of the host on which steps may run: every stream that was created or wrapped. Events are
 * recorded when a pool asks, which is seldom; a step pays nothing. For one device these calls and
 * the making of streams exclude each other. Nothing to do on the CPU.
 */
#ifndef SP_DEVICE_STEP_STREAMS_H
#define SP_DEVICE_STEP_STREAMS_H

#include <sidepath/device.h>

/* The main stream goes on after all that the others hold now. */
sp_status sp_device_main_follows(sp_device *device, sp_error *error);

/* The others go on after all that the main stream holds now. */
sp_status sp_device_others_follow(sp_device *device, sp_error *error);

/* Returns when all of them, and the main stream, are idle. */
sp_status sp_device_wait_all(sp_device *device, sp_error *error);

/* A stream that is none of them, because no step runs there: for copies beside the steps. */
sp_status sp_stream_create_apart(sp_device *device, sp_stream **out_stream, sp_error *error);

#endif

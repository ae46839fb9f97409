/*
 * notify.h: what the service manager is told (sd_notify): that the server takes requests, and that
 * it ends. Without NOTIFY_SOCKET in the environment, which is the manager's, nobody is told.
 */
#ifndef SP_CLI_NOTIFY_H
#define SP_CLI_NOTIFY_H

#define SP_NOTIFY_READY    "READY=1"
#define SP_NOTIFY_STOPPING "STOPPING=1"

/* Waits a second at most; that nobody takes it is no failure. */
void sp_notify(const char *state);

#endif

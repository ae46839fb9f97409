/*
 * tcp.h: what the system knows of a TCP connection. A file of its own because the kernel's header
 * and the C library's, which the others include, define the same names.
 */
#ifndef SP_SERVER_TCP_H
#define SP_SERVER_TCP_H

#include <stdint.h>

/* Bytes that have come in so far, in order, read or not; 0 where the system does not say. The end
 * of the other side counts as one. */
uint64_t sp_tcp_bytes_received(int fd);

#endif

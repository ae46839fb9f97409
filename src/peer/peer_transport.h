/*
 * peer_transport.h: headers and bodies between two hosts, carried by UCX's active messages: bodies
 * beyond a few KiB by its rendezvous protocol, which puts them where the receiver says without a
 * copy on networks that can. The context enables nothing but active messages: UCX's one-sided
 * calls check no bounds over TCP. What messages mean is not known here.
 *
 * UCX reports a peer that has died, and never one that is stopped or cut off. So nothing here
 * waits: the caller has deadlines of its own, and closes a link that is late.
 *
 * libucp is opened at run time. Fabrics may be shared by threads; a port and its links belong to
 * one thread at a time, and their events come on that thread, out of sp_peer_port_progress and
 * sp_peer_port_destroy. Pointers may not be NULL unless said so.
 */
#ifndef SP_PEER_PEER_TRANSPORT_H
#define SP_PEER_PEER_TRANSPORT_H

#include "peer/peer_wire.h"

#include <netinet/in.h>
#include <sys/socket.h>

/* ---- addresses ------------------------------------------------------------------------------- */

typedef struct sp_peer_address {
    struct sockaddr_storage socket;
    socklen_t n_bytes;
} sp_peer_address;

/* Longest text of sp_peer_address_text, its NUL included: "[v6]:port". */
#define SP_PEER_ADDRESS_BYTES 64

/*
 * "host:port" or "[v6]:port". SP_ERR_INPUT with `peer-address`: no such form, or a port that is not
 * 1 to 65535. Does not resolve the host: *out_host [host_bytes] and *out_port are the two parts.
 */
sp_status sp_peer_address_split(const char *text, char *out_host, size_t host_bytes, int *out_port,
                                sp_error *error);
/* Asks the system's resolver, which may block. SP_ERR_PEER_UNREACHABLE with `peer-unreachable`. */
sp_status sp_peer_address_resolve(const char *host, int port, sp_peer_address *out_address,
                                  sp_error *error);
/* Writes at most SP_PEER_ADDRESS_BYTES. */
void sp_peer_address_text(const sp_peer_address *address, char *out_text);
bool sp_peer_address_is_loopback(const sp_peer_address *address);

/* The network device of this host that has the address, as text of at most SP_PEER_DEVICE_BYTES.
 * False: none has, as with an address that means all of them. */
#define SP_PEER_DEVICE_BYTES 64
bool sp_peer_address_device(const sp_peer_address *address, char *out_name);
/* The address of this host from which packets to `peer` go now. False: there is no route. */
bool sp_peer_address_local(const sp_peer_address *peer, sp_peer_address *out_local);
/* Whether two addresses are of the same host, whatever their ports. */
bool sp_peer_address_is_same(const sp_peer_address *a, const sp_peer_address *b);

/* ---- fabrics --------------------------------------------------------------------------------- */

/* UCX's context: the network devices of this host. */
typedef struct sp_peer_fabric sp_peer_fabric;

typedef struct sp_peer_fabric_options {
    const char *devices;    /* UCX_NET_DEVICES; NULL: what follows, or UCX's choice */
    const char *gid_index;  /* UCX_IB_GID_INDEX; NULL: UCX's choice */
    const char *transports; /* UCX_TLS; NULL: UCX's choice */
    bool loopback;          /* peers are on this host: no device but "lo" is opened */
    /*
     * The address of this host at which peers reach it, or from which it reaches them; NULL: any.
     * On a host without RDMA no device but that of the address is opened: UCX 1.13 cannot connect
     * two hosts that share two networks over TCP, and no port is open where none is needed.
     */
    const sp_peer_address *local;
} sp_peer_fabric_options;

/* Whether this build knows UCX and the library can be loaded; *out_why (may be NULL) is a text that
 * lives as long as the process. */
bool sp_peer_fabric_is_built(const char **out_why);

/* *out_fabric is owned by the caller. SP_ERR_UNSUPPORTED with `no-ucx`; SP_ERR_INPUT with
 * `peer-device`: no such device or transport; SP_ERR_MEMORY. */
sp_status sp_peer_fabric_open(const sp_peer_fabric_options *options, sp_peer_fabric **out_fabric,
                              sp_error *error);
void sp_peer_fabric_close(sp_peer_fabric *fabric); /* after its ports; NULL is allowed */

/* Whether bodies may be in a GPU's memory. */
bool sp_peer_fabric_sees_device(const sp_peer_fabric *fabric);

/* Memory that bodies are sent from, made known to the devices once. NULL: it could not be, and then
 * it is sent all the same. */
typedef void sp_peer_memory;
sp_peer_memory *sp_peer_fabric_register(sp_peer_fabric *fabric, void *memory, size_t bytes);
void sp_peer_fabric_unregister(sp_peer_fabric *fabric, sp_peer_memory *handle); /* NULL allowed */

/* ---- ports and links ------------------------------------------------------------------------- */

typedef struct sp_peer_port sp_peer_port;
typedef struct sp_peer_link sp_peer_link; /* to one peer; valid until sp_peer_link_close */

/* A message that has arrived; valid during on_message. */
typedef struct sp_peer_arrival sp_peer_arrival;

typedef struct sp_peer_events {
    void *user;
    /* A listening port: somebody connects. Returns what sp_peer_link_user gives, or NULL: turned
     * away. */
    void *(*on_connect)(void *user, sp_peer_link *link, const sp_peer_address *from);
    /* The body is where sp_peer_arrival_receive puts it, or is dropped where that is not called. */
    void (*on_message)(void *user, sp_peer_link *link, const void *header, size_t header_bytes,
                       uint64_t body_bytes, sp_peer_arrival *arrival);
    /* What sp_peer_arrival_receive and sp_peer_link_send were given has come, or is of no use any
     * more: its memory is not touched again. `token` is not NULL. */
    void (*on_received)(void *user, sp_peer_link *link, void *token, bool whole);
    void (*on_sent)(void *user, sp_peer_link *link, void *token, bool whole);
    /* The link is broken; it is to be closed. Called once, and not for a link that was closed. */
    void (*on_lost)(void *user, sp_peer_link *link, const char *why);
} sp_peer_events;

/* *out_port is owned by the caller. SP_ERR_MEMORY, SP_ERR_IO. */
sp_status sp_peer_port_create(sp_peer_fabric *fabric, const sp_peer_events *events,
                              sp_peer_port **out_port, sp_error *error);
/* Closes what is open, reports all tokens, and waits for UCX at most two seconds. NULL allowed. */
void sp_peer_port_destroy(sp_peer_port *port);

/* Listens; *address gets the port where it was 0. SP_ERR_IO with `peer-port`: taken, or no such
 * address here. */
sp_status sp_peer_port_listen(sp_peer_port *port, sp_peer_address *address, sp_error *error);

/* Connects; on_lost reports a failure. *out_link is closed with the port at the latest. */
sp_status sp_peer_port_connect(sp_peer_port *port, const sp_peer_address *address, void *user,
                               sp_peer_link **out_link, sp_error *error);

/* Does what can be done now, and says whether there was anything. */
bool sp_peer_port_progress(sp_peer_port *port);
/* Whether the caller may sleep until sp_peer_port_fd is readable; else it must call progress. */
bool sp_peer_port_arm(sp_peer_port *port);
int sp_peer_port_fd(const sp_peer_port *port);

void *sp_peer_link_user(const sp_peer_link *link);
/* Bytes of bodies that were handed to UCX and have not left yet. */
uint64_t sp_peer_link_unsent_bytes(const sp_peer_link *link);

/* Bodies of at most so many bytes are copied at once, and may not be received by rendezvous. */
#define SP_PEER_COPIED_BYTES 512

/*
 * Sends a header [SP_PEER_HEADER_BYTES], which is copied, and a body, which must stay until
 * on_sent has reported `token` (NULL: not reported; then the body must be of SP_PEER_COPIED_BYTES
 * or fewer). memory: what the body was registered as, or NULL. SP_ERR_MEMORY, SP_ERR_PEER_LOST;
 * on_sent is not called then.
 */
sp_status sp_peer_link_send(sp_peer_link *link, const void *header, const void *body,
                            uint64_t body_bytes, sp_peer_memory *memory, void *token,
                            sp_error *error);

/* Aborts what is in flight on the link and frees it; tokens are reported in later calls of
 * progress, with false. on_lost is not called any more. May be called within events. */
void sp_peer_link_close(sp_peer_link *link);

/* Within on_message: the body, where it came with its header; NULL: it is to be received. */
const void *sp_peer_arrival_bytes(const sp_peer_arrival *arrival);

/* Within on_message: puts the body, of exactly `bytes` bytes, to `memory` and reports `token`,
 * which may be before this returns. SP_ERR_PEER_PROTOCOL where the body has another length. */
sp_status sp_peer_arrival_receive(sp_peer_arrival *arrival, void *memory, uint64_t bytes,
                                  bool on_device, void *token, sp_error *error);

#endif

/*
 * peer_ucx.c: the transport through libucp.
 *
 * UCX calls back out of ucp_worker_progress, where a worker may not progress and endpoints had
 * better not be created or destroyed. So callbacks only record what happened, and what follows is
 * done after ucp_worker_progress has returned; messages alone are reported at once, because their
 * bodies do not stay.
 *
 * A link is freed when its owner has closed it, UCX has closed its endpoint, and the last operation
 * on it has been reported.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "peer/peer_transport.h"
#include "peer/peer_ucx_load.h"

#include <dirent.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#define AM_ID          1
#define PENDING_MAX    64
#define DESTROY_NS_MAX 2000000000u
#define CLOSE_POLL_MS  5
#define EAGER_BYTES    8192 /* larger bodies go by rendezvous, and so does all DATA */

struct sp_peer_fabric {
    const sp_ucx *ucx;
    ucp_context_h context;
    bool sees_device;
};

typedef struct operation operation;

struct sp_peer_port {
    sp_peer_fabric *fabric;
    sp_peer_events events;
    ucp_worker_h worker;
    ucp_listener_h listener;
    int fd;
    sp_peer_link *links; /* all that are not freed */
    operation *in_flight;
    operation *done; /* to be reported, in order */
    operation **done_end;
    ucp_conn_request_h pending[PENDING_MAX]; /* somebody connects */
    size_t n_pending;
    bool changed; /* a link was lost or closed */
};

struct sp_peer_link {
    sp_peer_port *port;
    sp_peer_link *next;
    ucp_ep_h ep; /* NULL: not connected, or closed */
    void *user;
    void *closing; /* the request of the close that is in progress */
    int32_t n_operations;
    uint64_t unsent_bytes;
    bool lost, reported, closed;
    ucs_status_t why;
};

/* A send or a receive. */
struct operation {
    sp_peer_link *link;
    operation *next, *before; /* in the list that it is in; before: in flight only */
    void *token;
    uint64_t bytes;
    bool is_send, whole;
    uint8_t header[SP_PEER_HEADER_BYTES];
    uint8_t copy[SP_PEER_COPIED_BYTES];
};

struct sp_peer_arrival {
    sp_peer_link *link;
    void *data; /* bytes, or UCX's descriptor of a rendezvous */
    uint64_t bytes;
    bool is_rendezvous, is_taken;
};

/* ---- fabrics --------------------------------------------------------------------------------- */

bool sp_peer_fabric_is_built(const char **out_why)
{
    return sp_ucx_load(out_why) != NULL;
}

static sp_status fail_ucx(const sp_ucx *ucx, ucs_status_t code, sp_status status,
                          const char *reason, const char *what, sp_error *error)
{
    if (code == UCS_ERR_NO_MEMORY)
        return sp_fail_memory(error, 0, what);
    return sp_fail(error, status, reason, what, code, "%s: %s", what, ucx->ucs_status_string(code));
}

/* UCX's own variables, without UCX_. What an operator has chosen must be known to this UCX. */
static sp_status set_option(const sp_ucx *ucx, ucp_config_t *config, const char *name,
                            const char *value, sp_error *error)
{
    ucs_status_t code = value ? ucx->ucp_config_modify(config, name, value) : UCS_OK;

    return code == UCS_OK ? SP_OK
                          : sp_fail(error, SP_ERR_INPUT, "peer-device", value, code,
                                    "UCX_%s=%s: %s", name, value, ucx->ucs_status_string(code));
}

typedef struct option_row {
    const char *name, *value;
} option_row;

/*
 * UCX 1.13 knows the variables of a transport by the names without the transport's, and later ones
 * by the whole names alone. Each ignores or refuses the other form, and those of transports that
 * are not there.
 */
static const option_row our_options[] = {
    /* Else a peer that is started again finds its port taken for minutes. */
    {"CM_REUSEADDR", "y"},
    {"TCP_CM_REUSEADDR", "y"},
    {"RDMA_CM_REUSEADDR", "y"},
    /* The defaults of TCP, 8 and 64 KiB, cost half of what it carries. */
    {"TX_SEG_SIZE", "64k"},
    {"TCP_TX_SEG_SIZE", "64k"},
    {"RX_SEG_SIZE", "128k"},
    {"TCP_RX_SEG_SIZE", "128k"},
};

/* Endpoints that report errors take shared memory only where it says that it reports them. */
static const option_row shared_memory_options[] = {
    {"MM_ERROR_HANDLING", "y"},
    {"POSIX_ERROR_HANDLING", "y"},
    {"SYSV_ERROR_HANDLING", "y"},
};

static void set_ours(const sp_ucx *ucx, ucp_config_t *config, const option_row *rows, size_t n_rows)
{
    for (size_t i = 0; i < n_rows; i++)
        (void)ucx->ucp_config_modify(config, rows[i].name, rows[i].value);
}

static bool has_rdma(void)
{
    DIR *devices = opendir("/sys/class/infiniband");
    bool found = false;

    if (!devices)
        return false;
    for (const struct dirent *entry = readdir(devices); entry && !found; entry = readdir(devices))
        found = entry->d_name[0] != '.';
    closedir(devices);
    return found;
}

/* NULL: UCX's choice. */
static const char *choose_devices(const sp_peer_fabric_options *options, char *name)
{
    if (options->devices)
        return options->devices;
    if (options->loopback)
        return "lo";
    return options->local && !has_rdma() && sp_peer_address_device(options->local, name) ? name
                                                                                         : NULL;
}

static sp_status set_options(const sp_ucx *ucx, ucp_config_t *config,
                             const sp_peer_fabric_options *options, sp_error *error)
{
    char name[SP_PEER_DEVICE_BYTES];
    sp_status status = set_option(ucx, config, "NET_DEVICES", choose_devices(options, name), error);

    if (status == SP_OK)
        status = set_option(ucx, config, "TLS", options->transports, error);
    if (status == SP_OK)
        status = set_option(ucx, config, "IB_GID_INDEX", options->gid_index, error);
    set_ours(ucx, config, our_options, sizeof our_options / sizeof our_options[0]);
    if (options->transports)
        set_ours(ucx, config, shared_memory_options,
                 sizeof shared_memory_options / sizeof shared_memory_options[0]);
    return status;
}

static bool query_device_memory(const sp_ucx *ucx, ucp_context_h context)
{
    ucp_context_attr_t attributes = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};

    return ucx->ucp_context_query(context, &attributes) == UCS_OK &&
           (attributes.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0;
}

static sp_status create_context(const sp_ucx *ucx, const sp_peer_fabric_options *options,
                                ucp_context_h *out_context, sp_error *error)
{
    const ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED,
        .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
        .mt_workers_shared = 1,
    };
    ucp_config_t *config;
    sp_status status;
    ucs_status_t code = ucx->ucp_config_read(NULL, NULL, &config);

    if (code != UCS_OK)
        return fail_ucx(ucx, code, SP_ERR_INPUT, "peer-device", "the settings of UCX", error);
    status = set_options(ucx, config, options, error);
    if (status == SP_OK) {
        code = ucx->ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, out_context);
        if (code != UCS_OK)
            status = fail_ucx(ucx, code, SP_ERR_INPUT, "peer-device",
                              options->devices ? options->devices : "network devices", error);
    }
    ucx->ucp_config_release(config);
    return status;
}

sp_status sp_peer_fabric_open(const sp_peer_fabric_options *options, sp_peer_fabric **out_fabric,
                              sp_error *error)
{
    const char *why;
    const sp_ucx *ucx = sp_ucx_load(&why);
    sp_peer_fabric *fabric;
    sp_status status;

    if (!ucx)
        return sp_fail(error, SP_ERR_UNSUPPORTED, "no-ucx", NULL, -1, "%s", why);
    fabric = sp_calloc(1, sizeof *fabric);
    if (!fabric)
        return sp_fail_memory(error, sizeof *fabric, "a fabric");
    fabric->ucx = ucx;
    status = create_context(ucx, options, &fabric->context, error);
    if (status != SP_OK) {
        sp_free(fabric);
        return status;
    }
    fabric->sees_device = query_device_memory(ucx, fabric->context);
    *out_fabric = fabric;
    return SP_OK;
}

void sp_peer_fabric_close(sp_peer_fabric *fabric)
{
    if (!fabric)
        return;
    fabric->ucx->ucp_cleanup(fabric->context);
    sp_free(fabric);
}

bool sp_peer_fabric_sees_device(const sp_peer_fabric *fabric)
{
    return fabric->sees_device;
}

sp_peer_memory *sp_peer_fabric_register(sp_peer_fabric *fabric, void *memory, size_t bytes)
{
    const ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
        .address = memory,
        .length = bytes,
    };
    ucp_mem_h handle = NULL;

    if (bytes == 0 || fabric->ucx->ucp_mem_map(fabric->context, &params, &handle) != UCS_OK)
        return NULL;
    return handle;
}

void sp_peer_fabric_unregister(sp_peer_fabric *fabric, sp_peer_memory *handle)
{
    if (handle)
        (void)fabric->ucx->ucp_mem_unmap(fabric->context, (ucp_mem_h)handle);
}

/* ---- operations ------------------------------------------------------------------------------ */

static operation *begin_operation(sp_peer_link *link, void *token, uint64_t bytes, bool is_send)
{
    operation *op = sp_malloc(sizeof *op);

    if (!op)
        return NULL;
    op->link = link;
    op->before = NULL;
    op->next = link->port->in_flight;
    if (op->next)
        op->next->before = op;
    link->port->in_flight = op;
    op->token = token;
    op->bytes = bytes;
    op->is_send = is_send;
    op->whole = false;
    link->n_operations++;
    if (is_send)
        link->unsent_bytes += bytes;
    return op;
}

static void take_out(operation *op)
{
    if (op->before)
        op->before->next = op->next;
    else
        op->link->port->in_flight = op->next;
    if (op->next)
        op->next->before = op->before;
    if (op->is_send)
        op->link->unsent_bytes -= op->bytes;
}

/* UCX touches its memory no more; it is reported after progress. */
static void end_operation(operation *op, bool whole)
{
    sp_peer_port *port = op->link->port;

    take_out(op);
    op->whole = whole;
    op->next = NULL;
    *port->done_end = op;
    port->done_end = &op->next;
}

static void abandon_operation(operation *op)
{
    take_out(op);
    op->link->n_operations--;
    sp_free(op);
}

static void on_send_done(void *request, ucs_status_t code, void *user)
{
    operation *op = user;

    op->link->port->fabric->ucx->ucp_request_free(request);
    end_operation(op, code == UCS_OK);
}

static void on_receive_done(void *request, ucs_status_t code, size_t length, void *user)
{
    operation *op = user;

    op->link->port->fabric->ucx->ucp_request_free(request);
    end_operation(op, code == UCS_OK && length == op->bytes);
}

static void tell_operations(sp_peer_port *port)
{
    operation *op;

    while ((op = port->done) != NULL) {
        port->done = op->next;
        if (!port->done)
            port->done_end = &port->done;
        op->link->n_operations--;
        port->changed = true;
        if (op->token && op->is_send)
            port->events.on_sent(port->events.user, op->link, op->token, op->whole);
        else if (op->token)
            port->events.on_received(port->events.user, op->link, op->token, op->whole);
        sp_free(op);
    }
}

/* ---- links ----------------------------------------------------------------------------------- */

static sp_peer_link *create_link(sp_peer_port *port, void *user)
{
    sp_peer_link *link = sp_calloc(1, sizeof *link);

    if (!link)
        return NULL;
    link->port = port;
    link->user = user;
    link->next = port->links;
    port->links = link;
    return link;
}

static void on_ep_error(void *user, ucp_ep_h ep, ucs_status_t code)
{
    sp_peer_link *link = user;

    (void)ep;
    link->lost = true;
    link->why = code;
    link->port->changed = true;
}

static ucs_status_t create_ep(sp_peer_link *link, ucp_ep_params_t *params)
{
    const sp_ucx *ucx = link->port->fabric->ucx;

    params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params->err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params->err_handler.cb = on_ep_error;
    params->err_handler.arg = link;
    return ucx->ucp_ep_create(link->port->worker, params, &link->ep);
}

static void on_ep_closed(void *request, ucs_status_t code, void *user)
{
    sp_peer_link *link = user;

    (void)code;
    link->port->fabric->ucx->ucp_request_free(request);
    link->closing = NULL;
    link->port->changed = true;
}

static void close_ep(sp_peer_link *link)
{
    const ucp_request_param_t param = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .flags = UCP_EP_CLOSE_FLAG_FORCE,
        .cb.send = on_ep_closed,
        .user_data = link,
    };
    ucp_ep_h ep = link->ep;
    void *request;

    link->ep = NULL;
    request = link->port->fabric->ucx->ucp_ep_close_nbx(ep, &param);
    if (UCS_PTR_IS_PTR(request))
        link->closing = request;
}

/* Closes, reports and frees what is due; a link stays in place while another one is reported. */
static void settle_links(sp_peer_port *port)
{
    port->changed = false;
    for (sp_peer_link *link = port->links; link; link = link->next) {
        if (link->lost && !link->reported && !link->closed) {
            link->reported = true;
            port->events.on_lost(port->events.user, link,
                                 port->fabric->ucx->ucs_status_string(link->why));
        }
    }
    for (sp_peer_link **at = &port->links; *at;) {
        sp_peer_link *link = *at;

        if (link->closed && link->ep)
            close_ep(link);
        if (link->closed && !link->ep && !link->closing && link->n_operations == 0) {
            *at = link->next;
            sp_free(link);
        } else {
            at = &link->next;
        }
    }
}

void sp_peer_link_close(sp_peer_link *link)
{
    link->closed = true;
    link->port->changed = true;
}

void *sp_peer_link_user(const sp_peer_link *link)
{
    return link->user;
}

uint64_t sp_peer_link_unsent_bytes(const sp_peer_link *link)
{
    return link->unsent_bytes;
}

/* ---- connecting ------------------------------------------------------------------------------ */

sp_status sp_peer_port_connect(sp_peer_port *port, const sp_peer_address *address, void *user,
                               sp_peer_link **out_link, sp_error *error)
{
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR,
        .flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER,
        .sockaddr = {.addr = (const struct sockaddr *)&address->socket,
                     .addrlen = address->n_bytes},
    };
    sp_peer_link *link = create_link(port, user);
    ucs_status_t code;

    if (!link)
        return sp_fail_memory(error, sizeof *link, "a connection");
    code = create_ep(link, &params);
    if (code != UCS_OK) {
        char text[SP_PEER_ADDRESS_BYTES];

        link->ep = NULL;
        sp_peer_link_close(link);
        sp_peer_address_text(address, text);
        return fail_ucx(port->fabric->ucx, code, SP_ERR_PEER_UNREACHABLE, "peer-unreachable", text,
                        error);
    }
    *out_link = link;
    return SP_OK;
}

static void on_connection(ucp_conn_request_h request, void *user)
{
    sp_peer_port *port = user;

    if (port->n_pending < PENDING_MAX)
        port->pending[port->n_pending++] = request;
    else
        (void)port->fabric->ucx->ucp_listener_reject(port->listener, request);
}

static void query_client(const sp_ucx *ucx, ucp_conn_request_h request,
                         sp_peer_address *out_address)
{
    ucp_conn_request_attr_t attributes = {.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR};

    memset(out_address, 0, sizeof *out_address);
    if (ucx->ucp_conn_request_query(request, &attributes) != UCS_OK)
        return;
    out_address->socket = attributes.client_address;
    out_address->n_bytes = sizeof attributes.client_address;
}

static void accept_one(sp_peer_port *port, ucp_conn_request_h request)
{
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST,
                              .conn_request = request};
    sp_peer_address from;
    sp_peer_link *link = create_link(port, NULL);

    query_client(port->fabric->ucx, request, &from);
    if (link)
        link->user = port->events.on_connect(port->events.user, link, &from);
    if (!link || !link->user) {
        (void)port->fabric->ucx->ucp_listener_reject(port->listener, request);
        if (link)
            sp_peer_link_close(link);
        return;
    }
    if (create_ep(link, &params) != UCS_OK) {
        link->ep = NULL;
        link->lost = true;
        link->why = UCS_ERR_IO_ERROR;
        port->changed = true;
    }
}

static void accept_pending(sp_peer_port *port)
{
    size_t n = port->n_pending;

    port->n_pending = 0;
    for (size_t i = 0; i < n; i++)
        accept_one(port, port->pending[i]);
}

sp_status sp_peer_port_listen(sp_peer_port *port, sp_peer_address *address, sp_error *error)
{
    const sp_ucx *ucx = port->fabric->ucx;
    const ucp_listener_params_t params = {
        .field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
        .sockaddr = {.addr = (const struct sockaddr *)&address->socket,
                     .addrlen = address->n_bytes},
        .conn_handler = {.cb = on_connection, .arg = port},
    };
    ucp_listener_attr_t attributes = {.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR};
    char text[SP_PEER_ADDRESS_BYTES];
    ucs_status_t code = ucx->ucp_listener_create(port->worker, &params, &port->listener);

    if (code == UCS_OK)
        code = ucx->ucp_listener_query(port->listener, &attributes);
    if (code != UCS_OK) {
        sp_peer_address_text(address, text);
        return fail_ucx(ucx, code, SP_ERR_IO, "peer-port", text, error);
    }
    address->socket = attributes.sockaddr;
    return SP_OK;
}

/* ---- messages -------------------------------------------------------------------------------- */

/* A port that listens has many links, and any other one has one. */
static sp_peer_link *find_link(sp_peer_port *port, const ucp_am_recv_param_t *param)
{
    sp_peer_link *link = port->links;

    if (!port->listener)
        return link && !link->closed && !link->lost ? link : NULL;
    if (!(param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP))
        return NULL;
    while (link && (link->closed || link->ep != param->reply_ep))
        link = link->next;
    return link;
}

static ucs_status_t on_message(void *user, const void *header, size_t header_bytes, void *data,
                               size_t length, const ucp_am_recv_param_t *param)
{
    sp_peer_port *port = user;
    sp_peer_link *link = find_link(port, param);
    sp_peer_arrival arrival = {
        .link = link,
        .data = data,
        .bytes = length,
        .is_rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0,
    };

    if (link)
        port->events.on_message(port->events.user, link, header, header_bytes, length, &arrival);
    return arrival.is_rendezvous && !arrival.is_taken ? UCS_ERR_REJECTED : UCS_OK;
}

const void *sp_peer_arrival_bytes(const sp_peer_arrival *arrival)
{
    return arrival->is_rendezvous ? NULL : arrival->data;
}

static sp_status receive_rendezvous(sp_peer_arrival *arrival, operation *op, void *memory,
                                    bool on_device, sp_error *error)
{
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FLAG_NO_IMM_CMPL,
        .cb.recv_am = on_receive_done,
        .user_data = op,
        .memory_type = on_device ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST,
    };
    const sp_peer_port *port = arrival->link->port;
    void *request = port->fabric->ucx->ucp_am_recv_data_nbx(port->worker, arrival->data, memory,
                                                            arrival->bytes, &param);

    arrival->is_taken = true;
    if (UCS_PTR_IS_PTR(request))
        return SP_OK;
    if (request == NULL) {
        end_operation(op, true);
        return SP_OK;
    }
    abandon_operation(op);
    return sp_fail(error, SP_ERR_PEER_LOST, "peer-lost", NULL, -1, "a body cannot be received: %s",
                   port->fabric->ucx->ucs_status_string(UCS_PTR_STATUS(request)));
}

sp_status sp_peer_arrival_receive(sp_peer_arrival *arrival, void *memory, uint64_t bytes,
                                  bool on_device, void *token, sp_error *error)
{
    operation *op;

    if (bytes != arrival->bytes || (on_device && !arrival->is_rendezvous))
        return sp_fail(error, SP_ERR_PEER_PROTOCOL, "peer-protocol", NULL, -1,
                       "a body of %llu bytes where %llu were announced",
                       (unsigned long long)arrival->bytes, (unsigned long long)bytes);
    op = begin_operation(arrival->link, token, bytes, false);
    if (!op)
        return sp_fail_memory(error, sizeof *op, "a message");
    if (arrival->is_rendezvous)
        return receive_rendezvous(arrival, op, memory, on_device, error);
    memcpy(memory, arrival->data, bytes);
    end_operation(op, true);
    return SP_OK;
}

sp_status sp_peer_link_send(sp_peer_link *link, const void *header, const void *body,
                            uint64_t body_bytes, sp_peer_memory *memory, void *token,
                            sp_error *error)
{
    operation *op;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE |
                        UCP_OP_ATTR_FLAG_NO_IMM_CMPL,
        .cb.send = on_send_done,
        .flags = UCP_AM_SEND_FLAG_REPLY |
                 (body_bytes > EAGER_BYTES ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER),
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    void *request;

    if (!link->ep || link->closed || link->lost)
        return sp_fail(error, SP_ERR_PEER_LOST, "peer-lost", NULL, -1, "the connection is broken");
    op = begin_operation(link, token, body_bytes, true);
    if (!op)
        return sp_fail_memory(error, sizeof *op, "a message");
    memcpy(op->header, header, SP_PEER_HEADER_BYTES);
    if (!token && body_bytes > 0) {
        memcpy(op->copy, body, body_bytes);
        body = op->copy;
    }
    if (memory) {
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
        param.memh = (ucp_mem_h)memory;
    }
    param.user_data = op;
    request = link->port->fabric->ucx->ucp_am_send_nbx(link->ep, AM_ID, op->header,
                                                       sizeof op->header, body, body_bytes, &param);
    if (UCS_PTR_IS_PTR(request))
        return SP_OK;
    if (request == NULL) {
        end_operation(op, true);
        return SP_OK;
    }
    abandon_operation(op);
    return sp_fail(error, SP_ERR_PEER_LOST, "peer-lost", NULL, -1, "a message cannot be sent: %s",
                   link->port->fabric->ucx->ucs_status_string(UCS_PTR_STATUS(request)));
}

/* ---- ports ----------------------------------------------------------------------------------- */

static ucs_status_t create_worker(sp_peer_port *port)
{
    const sp_ucx *ucx = port->fabric->ucx;
    const ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                        .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    const ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = AM_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = on_message,
        .arg = port,
    };
    ucs_status_t code = ucx->ucp_worker_create(port->fabric->context, &params, &port->worker);

    if (code != UCS_OK) {
        port->worker = NULL;
        return code;
    }
    code = ucx->ucp_worker_get_efd(port->worker, &port->fd);
    return code == UCS_OK ? ucx->ucp_worker_set_am_recv_handler(port->worker, &handler) : code;
}

sp_status sp_peer_port_create(sp_peer_fabric *fabric, const sp_peer_events *events,
                              sp_peer_port **out_port, sp_error *error)
{
    sp_peer_port *port = sp_calloc(1, sizeof *port);
    ucs_status_t code;

    if (!port)
        return sp_fail_memory(error, sizeof *port, "a port");
    port->fabric = fabric;
    port->events = *events;
    port->done_end = &port->done;
    code = create_worker(port);
    if (code != UCS_OK) {
        sp_peer_port_destroy(port);
        return fail_ucx(fabric->ucx, code, SP_ERR_IO, "peer-port", "a worker of UCX", error);
    }
    *out_port = port;
    return SP_OK;
}

bool sp_peer_port_progress(sp_peer_port *port)
{
    bool progressed = port->fabric->ucx->ucp_worker_progress(port->worker) != 0;

    progressed = progressed || port->done || port->changed || port->n_pending > 0;
    tell_operations(port);
    accept_pending(port);
    if (port->changed)
        settle_links(port);
    return progressed;
}

bool sp_peer_port_arm(sp_peer_port *port)
{
    return !port->done && !port->changed && port->n_pending == 0 &&
           port->fabric->ucx->ucp_worker_arm(port->worker) == UCS_OK;
}

int sp_peer_port_fd(const sp_peer_port *port)
{
    return port->fd;
}

static void close_links(sp_peer_port *port)
{
    const uint64_t end_ns = sp_clock_ns() + DESTROY_NS_MAX;

    for (sp_peer_link *link = port->links; link; link = link->next)
        link->closed = true;
    port->changed = true;
    while (port->links && sp_clock_ns() < end_ns) {
        struct pollfd wait = {.fd = port->fd, .events = POLLIN};

        if (!sp_peer_port_progress(port) && sp_peer_port_arm(port))
            (void)poll(&wait, 1, CLOSE_POLL_MS);
    }
}

/* What UCX has not ended in time has ended with the worker. */
static void free_links(sp_peer_port *port)
{
    while (port->in_flight)
        end_operation(port->in_flight, false);
    tell_operations(port);
    while (port->links) {
        sp_peer_link *link = port->links;

        port->links = link->next;
        sp_free(link);
    }
}

void sp_peer_port_destroy(sp_peer_port *port)
{
    const sp_ucx *ucx;

    if (!port)
        return;
    ucx = port->fabric->ucx;
    if (port->worker) {
        for (size_t i = 0; i < port->n_pending; i++)
            (void)ucx->ucp_listener_reject(port->listener, port->pending[i]);
        port->n_pending = 0;
        if (port->listener)
            ucx->ucp_listener_destroy(port->listener);
        close_links(port);
        ucx->ucp_worker_destroy(port->worker);
    }
    free_links(port);
    sp_free(port);
}

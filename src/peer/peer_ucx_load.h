/*
 * peer_ucx_load.h: the functions of libucp that are used, found at run time, so that a program
 * starts where UCX is missing, and a site's own build of UCX is taken where there is one.
 */
#ifndef SP_PEER_PEER_UCX_LOAD_H
#define SP_PEER_PEER_UCX_LOAD_H

#include <sidepath/status.h>

#include <ucp/api/ucp.h>

#define SP_UCX_LIST(X)                \
    X(ucp_config_read)                \
    X(ucp_config_modify)              \
    X(ucp_config_release)             \
    X(ucp_init_version)               \
    X(ucp_cleanup)                    \
    X(ucp_context_query)              \
    X(ucp_mem_map)                    \
    X(ucp_mem_unmap)                  \
    X(ucp_worker_create)              \
    X(ucp_worker_destroy)             \
    X(ucp_worker_progress)            \
    X(ucp_worker_get_efd)             \
    X(ucp_worker_arm)                 \
    X(ucp_worker_set_am_recv_handler) \
    X(ucp_listener_create)            \
    X(ucp_listener_query)             \
    X(ucp_listener_reject)            \
    X(ucp_listener_destroy)           \
    X(ucp_conn_request_query)         \
    X(ucp_ep_create)                  \
    X(ucp_ep_close_nbx)               \
    X(ucp_am_send_nbx)                \
    X(ucp_am_recv_data_nbx)           \
    X(ucp_request_free)               \
    X(ucs_status_string)

typedef struct sp_ucx {
#define SP_UCX_FIELD(name) __typeof__(&name) name;
    SP_UCX_LIST(SP_UCX_FIELD)
#undef SP_UCX_FIELD
} sp_ucx;

/*
 * The functions, loaded by the first call and never unloaded; any thread. NULL: the library or one
 * of them is missing, and *out_why (may be NULL) says which.
 */
const sp_ucx *sp_ucx_load(const char **out_why);

#endif

/*
 * request_rows.c: the table, and nothing else, so that a test can link its own instead.
 */
#include "engine/request/request_table.h"
#include "engine/sampling/stop.h"

#define JSON_FORMS (SP_FORM_COMPLETION | SP_FORM_CHAT | SP_FORM_LINE)
#define AT(member) offsetof(sp_request, member)

const sp_field sp_request_rows[] = {
#include "engine/request/request_rows.inc"
};
const size_t sp_n_request_rows = sizeof sp_request_rows / sizeof *sp_request_rows;

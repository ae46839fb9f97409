/*
 * status_page.h: the page at "/": one document with its own style and script inside, put together
 * from src/server/page, which the build embeds. It requests /status.json and contains no data
 * itself.
 */
#ifndef SP_SERVER_API_STATUS_PAGE_H
#define SP_SERVER_API_STATUS_PAGE_H

#include "base/text.h"

#define SP_STATUS_PAGE_TYPE "text/html; charset=utf-8"

/* Appends the page. */
void sp_status_page_add(sp_text *out);

/*
 * The value of Content-Security-Policy for it, appended: nothing may be loaded or run but this
 * style and this script, identified by their SHA-256, and it may connect to its own server only.
 */
void sp_status_page_add_policy(sp_text *out);

#endif

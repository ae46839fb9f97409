/*
 * plain_text.h: texts of errors, as clients may see them.
 */
#ifndef SP_SERVER_METRICS_PLAIN_TEXT_H
#define SP_SERVER_METRICS_PLAIN_TEXT_H

#include "base/text.h"

/* A JSON string with the last part only of every path in it: where files are is not disclosed. */
void sp_text_json_without_paths(sp_text *out, const char *text);

#endif

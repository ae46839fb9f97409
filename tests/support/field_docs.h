/*
 * field_docs.h: docs/HTTP.md and docs/SAMPLING.md against the tables of fields: where a field is
 * taken, its default and its range, in both directions.
 */
#ifndef SP_TEST_SUPPORT_FIELD_DOCS_H
#define SP_TEST_SUPPORT_FIELD_DOCS_H

#include "base/text.h"

/*
 * Writes one line for each thing that the text of docs/HTTP.md lacks or has too much; a missing
 * row of its table is written as it should begin. Nothing: the document follows the tables.
 */
void sp_field_docs_http(const char *text, sp_text *out_problems);

/* The ranges in the table of docs/SAMPLING.md. */
void sp_field_docs_sampling(const char *text, sp_text *out_problems);

#endif

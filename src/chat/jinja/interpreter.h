/*
 * interpreter.h: running a parsed template.
 */
#ifndef SP_CHAT_JINJA_INTERPRETER_H
#define SP_CHAT_JINJA_INTERPRETER_H

#include "chat/jinja/node.h"
#include "chat/jinja/value.h"

/* Limits of one rendering. A step is a node evaluated, an item seen, or 64 bytes of text touched:
 * a conversation of 100 messages takes some 10,000. */
#define SP_RENDER_STEPS_MAX ((int64_t)20000000)
#define SP_RENDER_BYTES_MAX ((size_t)256 << 20) /* of the arena */

/*
 * Writes the template's output to *out. `globals` [template->n_names] are its variables, undefined
 * ones included. The result is in render->failed.
 */
void sp_template_run(const sp_template *template, sp_render *render, const sp_value *globals,
                     sp_build *out);

/* operators.c */
sp_value sp_binary(sp_render *render, sp_op op, const sp_value *left, const sp_value *right);
bool sp_compare(sp_render *render, sp_op op, const sp_value *left, const sp_value *right);
sp_value sp_negate(sp_render *render, const sp_value *value);
/* object[begin:end:step]; undefined or none means a bound that is left out. */
sp_value sp_slice(sp_render *render, const sp_value *object, const sp_value *begin,
                  const sp_value *end, const sp_value *step);

#endif

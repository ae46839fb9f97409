/* codes.h: reason codes (sp_error.code) of reading and running a template. */
#ifndef SP_CHAT_JINJA_CODES_H
#define SP_CHAT_JINJA_CODES_H

#define SP_CHAT_MALFORMED   "chat-template-malformed"   /* no template, or broken JSON */
#define SP_CHAT_UNSUPPORTED "chat-template-unsupported" /* a construct, named with its line */
#define SP_CHAT_FAILED      "chat-template-failed"      /* it ran into an error */
#define SP_CHAT_RAISED      "chat-template-raised"      /* it called raise_exception */
#define SP_CHAT_LIMIT       "chat-limit-exceeded"       /* steps, depth, memory, output */

#endif

#include "server/metrics/plain_text.h"

#include <string.h>

void sp_text_json_without_paths(sp_text *out, const char *text)
{
    sp_text plain = {0};

    while (*text) {
        size_t word = strcspn(text, " \"'");
        size_t begin = word;

        while (begin > 0 && text[begin - 1] != '/')
            begin--;
        sp_text_add_bytes(&plain, text + begin, word - begin);
        text += word;
        word = strspn(text, " \"'");
        sp_text_add_bytes(&plain, text, word);
        text += word;
    }
    sp_text_json_string(out, plain.data ? plain.data : "", plain.bytes);
    out->failed |= plain.failed;
    sp_text_free(&plain);
}

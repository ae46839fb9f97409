#include "server/api/status_page.h"

#include "base/hash.h"

#include <string.h>

/* Written by cmake/embed.cmake from src/server/page. */
extern const unsigned char sp_page_html[], sp_page_css[], sp_page_js[];
extern const size_t sp_page_html_bytes, sp_page_css_bytes, sp_page_js_bytes;

#define STYLE_MARK  "<!--STYLE-->"
#define SCRIPT_MARK "<!--SCRIPT-->"

/* Adds the text before the mark, then the part, and returns the text after the mark. */
static const char *add_part(sp_text *out, const char *html, const char *mark,
                            const unsigned char *part, size_t bytes)
{
    const char *at = strstr(html, mark);

    sp_text_add_bytes(out, html, (size_t)(at - html));
    sp_text_add_bytes(out, (const char *)part, bytes);
    return at + strlen(mark);
}

void sp_status_page_add(sp_text *out)
{
    sp_text html = {0};
    const char *rest;

    sp_text_add_bytes(&html, (const char *)sp_page_html, sp_page_html_bytes);
    if (html.failed) {
        out->failed = true;
        return;
    }
    rest = add_part(out, html.data, STYLE_MARK, sp_page_css, sp_page_css_bytes);
    rest = add_part(out, rest, SCRIPT_MARK, sp_page_js, sp_page_js_bytes);
    sp_text_add(out, rest);
    sp_text_free(&html);
}

/* Base 64 of a digest: ten groups of three bytes, and one of two. */
static void add_digest(sp_text *out, const char *directive, const unsigned char *data, size_t bytes)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint8_t digest[SP_SHA256_BYTES + 1] = {0};

    if (sp_sha256_of(data, bytes, digest) != SP_OK) {
        out->failed = true;
        return;
    }
    sp_text_format(out, "; %s 'sha256-", directive);
    for (int i = 0; i < SP_SHA256_BYTES; i += 3) {
        uint32_t group =
            (uint32_t)digest[i] << 16 | (uint32_t)digest[i + 1] << 8 | (uint32_t)digest[i + 2];

        for (int shift = 18; shift >= 0; shift -= 6)
            sp_text_add_bytes(out, &digits[group >> shift & 63], 1);
    }
    out->bytes--; /* the last group has no third byte */
    sp_text_add(out, "='");
}

void sp_status_page_add_policy(sp_text *out)
{
    sp_text_add(out, "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
                     "frame-ancestors 'none'");
    add_digest(out, "style-src", sp_page_css, sp_page_css_bytes);
    add_digest(out, "script-src", sp_page_js, sp_page_js_bytes);
}

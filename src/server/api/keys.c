#include "server/api/keys.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"

#include <string.h>
#include <strings.h>

#define KEY_FILE_BYTES_MAX ((size_t)1 << 20)
#define SCHEME             "Bearer "

struct sp_keys {
    uint8_t (*digests)[SP_SHA256_BYTES]; /* [n] */
    size_t n;
};

static sp_status add_key(sp_keys *keys, const char *key, size_t bytes, sp_error *error)
{
    uint8_t(*grown)[SP_SHA256_BYTES] = sp_realloc(keys->digests, (keys->n + 1) * sizeof *grown);

    if (!grown)
        return sp_fail_memory(error, sizeof *grown, "a key");
    keys->digests = grown;
    if (sp_sha256_of(key, bytes, grown[keys->n]) != SP_OK)
        return sp_fail_memory(error, sizeof *grown, "a key");
    keys->n++;
    return SP_OK;
}

static sp_status add_lines(sp_keys *keys, const char *text, sp_error *error)
{
    sp_status status = SP_OK;

    while (*text && status == SP_OK) {
        size_t line = strcspn(text, "\n"), blank = strspn(text, " \t");
        size_t bytes = line;

        while (bytes > blank && strchr(" \t\r", text[bytes - 1]))
            bytes--;
        if (bytes > blank && text[blank] != '#')
            status = add_key(keys, text + blank, bytes - blank, error);
        text += line + (text[line] == '\n');
    }
    return status;
}

/* A byte order mark before the first key, or a NUL in one, would be invisible in an editor. */
static sp_status check_text(const char *path, const char *text, size_t bytes, sp_error *error)
{
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];

        if ((c < 0x20 && !strchr("\t\r\n", c)) || c >= 0x7f || c == '\0')
            return sp_fail(error, SP_ERR_INPUT, NULL, path, (int64_t)i,
                           "%s: byte %zu is not printable ASCII, which keys are made of", path, i);
    }
    return SP_OK;
}

sp_status sp_keys_open(const char *path, sp_keys **out_keys, sp_error *error)
{
    sp_keys *keys;
    char *text;
    size_t bytes;
    sp_status status = sp_file_read_all(path, KEY_FILE_BYTES_MAX, &text, &bytes, error);

    if (status != SP_OK)
        return status;
    status = check_text(path, text, bytes, error);
    if (status != SP_OK) {
        sp_free(text);
        return status;
    }
    keys = sp_calloc(1, sizeof *keys);
    status = keys ? add_lines(keys, text, error) : sp_fail_memory(error, bytes, path);
    if (status == SP_OK && keys->n == 0)
        status = sp_fail(error, SP_ERR_INPUT, NULL, path, -1, "%s holds no key", path);
    memset(text, 0, bytes);
    sp_free(text);
    if (status != SP_OK)
        sp_keys_close(keys);
    else
        *out_keys = keys;
    return status;
}

void sp_keys_close(sp_keys *keys)
{
    if (!keys)
        return;
    sp_free(keys->digests);
    sp_free(keys);
}

bool sp_keys_accept(const sp_keys *keys, const char *authorization)
{
    uint8_t shown[SP_SHA256_BYTES];
    unsigned found = 0;
    size_t bytes;

    if (!authorization || strncasecmp(authorization, SCHEME, sizeof SCHEME - 1) != 0)
        return false;
    authorization += sizeof SCHEME - 1;
    authorization += strspn(authorization, " ");
    bytes = strlen(authorization);
    while (bytes > 0 && strchr(" \t", authorization[bytes - 1]))
        bytes--; /* blanks around a header's value are not part of it */
    if (sp_sha256_of(authorization, bytes, shown) != SP_OK)
        return false;
    for (size_t i = 0; i < keys->n; i++) {
        unsigned different = 0;

        for (size_t j = 0; j < SP_SHA256_BYTES; j++)
            different |= (unsigned)(shown[j] ^ keys->digests[i][j]);
        found |= different == 0;
    }
    return found != 0;
}

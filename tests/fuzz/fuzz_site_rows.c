/*
 * Rows of sites as a host may give them: any bytes make a geometry that finds every one of its own
 * rows, or an error that names a row and leaves nothing.
 *
 * A line is one row: kind, layer, expert and group as one byte each (less '0'; '/' is -1), the
 * path, and after a space the module, if it has one.
 */
#include "fuzz/target.h"

#include "base/alloc.h"

#include <sidepath/adapter.h>

#include <string.h>

enum { ROWS_MAX = 80, TEXT_MAX = 8192, FIELDS = 4 };

/* Cuts one line into a row, in place. */
static sp_site read_row(char *line)
{
    sp_site site;
    char *module;

    sp_site_default(&site, sizeof site);
    site.k_in = site.n_out = 8;
    if (strlen(line) < FIELDS)
        return site;
    site.kind = (sp_site_kind)(line[0] - '0');
    site.layer = line[1] - '0';
    site.expert = line[2] - '0';
    site.group = line[3] - '0';
    site.path = line + FIELDS;
    module = strchr(line, ' ');
    if (module) {
        *module = '\0';
        site.module = module + 1;
    }
    return site;
}

static void check_rows(const sp_geometry *geometry, int32_t n)
{
    sp_module_set seen = 0;

    FUZZ_CHECK(sp_geometry_n_sites(geometry) == n);
    for (int32_t i = 0; i < n; i++) {
        sp_site site = {.struct_bytes = sizeof site};

        FUZZ_CHECK(sp_geometry_site_at(geometry, i, &site, NULL) == SP_OK);
        FUZZ_CHECK(sp_geometry_find(geometry, site.path) == i);
        FUZZ_CHECK(sp_geometry_find_module(geometry, site.layer, site.module, site.expert) == i);
        FUZZ_CHECK(site.layer < sp_geometry_layers(geometry));
        FUZZ_CHECK(site.expert < sp_geometry_experts(geometry) || site.expert == -1);
        seen |= (sp_module_set)1 << sp_geometry_site_module(geometry, i);
    }
    FUZZ_CHECK(seen == sp_geometry_modules(geometry));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    sp_site rows[ROWS_MAX];
    char text[TEXT_MAX + 1];
    sp_geometry *geometry = NULL;
    size_t n = 0, blocks = sp_alloc_blocks();
    sp_error error = {.position = -1};
    sp_status status;

    if (bytes > TEXT_MAX)
        bytes = TEXT_MAX;
    memcpy(text, data, bytes);
    text[bytes] = '\0';
    for (char *line = text; line && n < ROWS_MAX;) {
        char *end = strchr(line, '\n');

        if (end)
            *end = '\0';
        rows[n++] = read_row(line);
        line = end ? end + 1 : NULL;
    }
    status = sp_geometry_create(rows, n, &geometry, &error);
    if (status == SP_OK) {
        check_rows(geometry, (int32_t)n);
        sp_geometry_release(geometry);
    } else {
        FUZZ_CHECK(status == SP_ERR_ARGUMENT && geometry == NULL);
        FUZZ_CHECK(error.position >= 0 && error.position < (int64_t)n && error.text[0] != '\0');
    }
    FUZZ_CHECK(sp_alloc_blocks() == blocks);
    return 0;
}

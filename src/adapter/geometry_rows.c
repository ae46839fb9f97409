/*
 * geometry_rows.c: a geometry from the host's own rows. A row is checked by itself here, and
 * against the others when it is added.
 */
#include "adapter/geometry.h"
#include "base/error.h"
#include "base/grow.h"

#include <stdio.h>
#include <string.h>

#define NUMBER_MAX 65535 /* of a layer or an expert */

void sp_site_default(sp_site *out_site, size_t struct_bytes)
{
    const sp_site defaults = {
        .struct_bytes = sizeof defaults, .layer = -1, .expert = -1, .group = -1};

    sp_struct_default(out_site, struct_bytes, &defaults, sizeof defaults);
}

static sp_status refuse(const sp_site *site, size_t index, const char *why, sp_error *error)
{
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, site->path, (int64_t)index, "site %zu: %.200s %s",
                   index, site->path ? site->path : "", why);
}

/* Words between dots, of printable ASCII. */
static sp_status check_path(const sp_site *site, size_t index, sp_error *error)
{
    size_t n = site->path ? strnlen(site->path, SP_SITE_PATH_BYTES_MAX) : 0;

    if (n == 0)
        return refuse(site, index, "has no path", error);
    if (n == SP_SITE_PATH_BYTES_MAX)
        return refuse(site, index, "is longer than 511 bytes", error);
    for (size_t i = 0; i < n; i++) {
        bool is_edge = i == 0 || i + 1 == n || site->path[i - 1] == '.';

        if (site->path[i] <= ' ' || site->path[i] > '~')
            return refuse(site, index, "has a byte that is no printable ASCII", error);
        if (site->path[i] == '.' && is_edge)
            return refuse(site, index, "has an empty word between its dots", error);
    }
    if (strncmp(site->path, "base_model.model.", strlen("base_model.model.")) == 0)
        return refuse(site, index, "is PEFT's name; the path is the base model's own", error);
    return SP_OK;
}

static sp_status check_numbers(const sp_site *site, size_t index, sp_error *error)
{
    bool outside = site->kind == SP_SITE_EMBEDDING || site->kind == SP_SITE_HEAD;

    if ((int)site->kind < 0 || site->kind > SP_SITE_EXPERT)
        return refuse(site, index, "is of a kind that does not exist", error);
    if (site->layer < -1 || site->layer > NUMBER_MAX)
        return refuse(site, index, "has a layer that is not from -1 to 65535", error);
    if (outside && site->layer != -1)
        return refuse(site, index, "is an embedding or head in a layer; its layer is -1", error);
    if (site->kind == SP_SITE_EXPERT &&
        (site->layer < 0 || site->expert < 0 || site->expert > NUMBER_MAX))
        return refuse(site, index, "is an expert's without a layer or expert from 0 to 65535",
                      error);
    if (site->kind != SP_SITE_EXPERT && site->expert != -1)
        return refuse(site, index, "is no expert's; its expert is -1", error);
    if (site->k_in < 1 || site->n_out < 1)
        return refuse(site, index, site->k_in < 1 ? "has a k_in below 1" : "has an n_out below 1",
                      error);
    if (site->tied && site->kind != SP_SITE_HEAD)
        return refuse(site, index, "is tied, and no head", error);
    if (site->group < -1)
        return refuse(site, index, "has a group below -1", error);
    return SP_OK;
}

/* Moves *text beyond the first word that is this number; false if there is none. */
static bool skip_number(const char **text, int32_t number)
{
    const char *at = *text;

    for (;;) {
        size_t n = strcspn(at, ".");

        if (at[n] == '\0')
            return false;
        if (sp_path_number(at, n) == number) {
            *text = at + n + 1;
            return true;
        }
        at += n + 1;
    }
}

/*
 * The module's name according to the path: the words after the layer's number without the expert's,
 * or the last word outside the layers.
 */
static sp_status module_of(const sp_site *site, size_t index, char *out_module, sp_error *error)
{
    const char *rest = site->path;
    const char *end;

    if (site->layer < 0) {
        const char *dot = strrchr(site->path, '.');

        snprintf(out_module, SP_SITE_PATH_BYTES_MAX, "%s", dot ? dot + 1 : site->path);
        return SP_OK;
    }
    if (!skip_number(&rest, site->layer))
        return refuse(site, index, "does not have its layer's number before the module", error);
    end = rest;
    if (site->expert >= 0 && !skip_number(&end, site->expert))
        return refuse(site, index, "does not have its expert's number before the last word", error);
    if (site->expert >= 0) {
        const char *number = end - 1;

        while (number > rest && number[-1] != '.')
            number--;
        snprintf(out_module, SP_SITE_PATH_BYTES_MAX, "%.*s%s", (int)(number - rest), rest, end);
        return SP_OK;
    }
    snprintf(out_module, SP_SITE_PATH_BYTES_MAX, "%s", rest);
    return SP_OK;
}

static sp_status add_row(sp_geometry *geometry, const sp_site *sites, size_t index, sp_error *error)
{
    char module[SP_SITE_PATH_BYTES_MAX];
    sp_site site;
    sp_status status;

    sp_site_default(&site, sizeof site);
    status = sp_struct_read_at(&site, sizeof site, sites, index, "sp_site", error);
    if (status == SP_OK)
        status = check_path(&site, index, error);
    if (status == SP_OK)
        status = check_numbers(&site, index, error);
    if (status == SP_OK)
        status = module_of(&site, index, module, error);
    if (status != SP_OK)
        return status;
    if (site.module && (site.module[0] == '\0' ||
                        strnlen(site.module, SP_SITE_PATH_BYTES_MAX) == SP_SITE_PATH_BYTES_MAX))
        return refuse(&site, index, "has a module that is empty or longer than 511 bytes", error);
    if (!site.module)
        site.module = module;
    return sp_geometry_add(geometry, &site, index, error);
}

sp_status sp_geometry_create(const sp_site *sites, size_t n_sites, sp_geometry **out_geometry,
                             sp_error *error)
{
    sp_geometry *geometry;
    sp_status status;

    if (!sites || !out_geometry)
        return sp_fail_null(error, sites ? "out_geometry" : "sites");
    if (n_sites == 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_sites", -1, "a geometry of no sites");
    if (n_sites > SP_SITES_MAX)
        return sp_fail(error, SP_ERR_TOO_LARGE, NULL, "n_sites", -1,
                       "%zu sites; at most %d are taken", n_sites, SP_SITES_MAX);
    status = sp_geometry_start(false, &geometry, error);
    if (status != SP_OK)
        return status;
    for (size_t i = 0; i < n_sites && status == SP_OK; i++)
        status = add_row(geometry, sites, i, error);
    if (status == SP_OK)
        status = sp_geometry_finish(geometry, 0, error);
    if (status != SP_OK) {
        sp_geometry_release(geometry);
        return status;
    }
    *out_geometry = geometry;
    return SP_OK;
}

/*
 * inspect_adapter MODEL_DIR ADAPTER_DIR: reads a base model's config.json and an adapter, and says
 * what the adapter would do to that model, or why it is refused. No weights of the model are read.
 * The exit status is the verdict: 0 accepted, 1 refused, 2 usage.
 */
#include <sidepath/pool.h>

#include <stdio.h>

static int refuse(const char *path, const sp_error *error)
{
    fprintf(stderr, "%s: %s%s%s", path, error->code, error->code[0] != '\0' ? ": " : "",
            error->text);
    if (error->subject[0] != '\0')
        fprintf(stderr, " (%s)", error->subject);
    fputc('\n', stderr);
    return 1;
}

/* One line for each kind of module: how many layers, ranks, and the scale of the first. */
static void print_modules(const sp_adapter *adapter)
{
    const sp_geometry *geometry = sp_adapter_geometry(adapter);

    for (int32_t module = 0; module < sp_geometry_n_modules(geometry); module++) {
        int n = 0, rank_min = 0, rank_max = 0;
        float scale = 0;

        for (size_t i = 0; i < sp_adapter_n_sites(adapter); i++) {
            const sp_adapter_site *site = sp_adapter_site_at(adapter, i);

            if (sp_geometry_site_module(geometry, site->site) != module)
                continue;
            scale = n == 0 ? site->scale : scale;
            rank_min = n == 0 || site->rank < rank_min ? site->rank : rank_min;
            rank_max = site->rank > rank_max ? site->rank : rank_max;
            n++;
        }
        if (n > 0)
            printf("  %-28s %4d sites, rank %d..%d, scale %g\n",
                   sp_geometry_module_name(geometry, module), n, rank_min, rank_max, (double)scale);
    }
}

/* What one slot of a pool takes that has room for this adapter and holds just its modules. */
static void print_slot_bytes(sp_geometry *geometry, const sp_adapter *adapter)
{
    sp_layout_options options;
    size_t slot_bytes;
    sp_error error;

    sp_layout_options_default(&options, sizeof options);
    options.geometry = geometry;
    options.modules = sp_layout_pair_modules(adapter);
    options.rank = sp_adapter_rank_max(adapter);
    if (sp_layout_measure(&options, &slot_bytes, NULL, &error) == SP_OK)
        printf("slot: %zu bytes in bf16\n", slot_bytes);
    else
        printf("slot: %s (%s)\n", error.text, error.subject);
}

int main(int argc, char **argv)
{
    sp_adapter_options options;
    sp_geometry *geometry;
    sp_adapter *adapter;
    sp_digest digest;
    sp_error error;

    if (argc != 3) {
        fprintf(stderr, "usage: inspect_adapter MODEL_DIR ADAPTER_DIR\n");
        return 2;
    }
    if (sp_geometry_open(argv[1], &geometry, &error) != SP_OK)
        return refuse(argv[1], &error);
    sp_adapter_options_default(&options, sizeof options);
    options.geometry = geometry; /* every tensor must fit this model, or the adapter is refused */
    options.base_dir = argv[1];  /* copied tables are compared with the served ones */
    if (sp_adapter_open(argv[2], &options, &adapter, &error) != SP_OK) {
        sp_geometry_release(geometry);
        return refuse(argv[2], &error);
    }
    digest = sp_adapter_digest(adapter);
    printf("%s: accepted\ndigest: ", sp_adapter_name(adapter));
    for (int i = 0; i < SP_DIGEST_BYTES; i++)
        printf("%02x", digest.bytes[i]);
    printf("\nsites: %zu, tables: %zu\n", sp_adapter_n_sites(adapter),
           sp_adapter_n_tables(adapter));
    print_modules(adapter);
    print_slot_bytes(geometry, adapter);
    sp_adapter_release(adapter);
    sp_geometry_release(geometry);
    return 0;
}

#include "adapter/toy.h"

#include "base/alloc.h"
#include "support/known_sites.h"

#include <string.h>

sp_geometry *toy_geometry(void)
{
    static const site_dims sites[] = {
        {-1, SP_MODULE_EMBED_TOKENS, TOY_VOCAB, TOY_HIDDEN},
        {-1, SP_MODULE_LM_HEAD, TOY_HIDDEN, TOY_VOCAB},
        {0, SP_MODULE_Q_PROJ, TOY_HIDDEN, 12},
        {0, SP_MODULE_K_PROJ, TOY_HIDDEN, 6},
        {0, SP_MODULE_V_PROJ, TOY_HIDDEN, 6},
        {0, SP_MODULE_O_PROJ, 12, TOY_HIDDEN},
        {1, SP_MODULE_GDN_IN_QKVZ, TOY_HIDDEN, 10},
        {1, SP_MODULE_GDN_IN_BA, TOY_HIDDEN, 4},
        {1, SP_MODULE_GDN_OUT, 5, TOY_HIDDEN},
        {0, SP_MODULE_ROUTER, TOY_HIDDEN, TOY_EXPERTS},
        {1, SP_MODULE_ROUTER, TOY_HIDDEN, TOY_EXPERTS},
        {0, SP_MODULE_EXPERT_GATE_PROJ, TOY_HIDDEN, TOY_INTERMEDIATE},
        {0, SP_MODULE_EXPERT_UP_PROJ, TOY_HIDDEN, TOY_INTERMEDIATE},
        {0, SP_MODULE_EXPERT_DOWN_PROJ, TOY_INTERMEDIATE, TOY_HIDDEN},
        {1, SP_MODULE_EXPERT_GATE_PROJ, TOY_HIDDEN, TOY_INTERMEDIATE},
        {1, SP_MODULE_EXPERT_UP_PROJ, TOY_HIDDEN, TOY_INTERMEDIATE},
        {1, SP_MODULE_EXPERT_DOWN_PROJ, TOY_INTERMEDIATE, TOY_HIDDEN},
    };
    return known_geometry(TOY_EXPERTS, sites, sizeof sites / sizeof *sites);
}

make_adapter *toy_adapter(void)
{
    make_adapter *adapter = make_adapter_create();

    make_adapter_add_pair(adapter, "base_model.model.model.layers.0.self_attn.q_proj", 2,
                          TOY_HIDDEN, 12, 1);
    make_adapter_add_pair(adapter, "base_model.model.model.layers.0.self_attn.v_proj", 2,
                          TOY_HIDDEN, 6, 2);
    return adapter;
}

sp_adapter_options toy_options(void)
{
    sp_adapter_options options;

    sp_adapter_options_default(&options, sizeof options);
    options.geometry = toy_geometry();
    return options;
}

sp_status toy_open(const make_adapter *adapter, const sp_adapter_options *options,
                   sp_adapter **out_adapter, sp_error *error)
{
    char *folder = make_adapter_folder(adapter);
    sp_status status = sp_adapter_open(folder, options, out_adapter, error);

    sp_test_remove_tree(folder);
    sp_free(folder);
    return status;
}

void toy_refused(const make_adapter *adapter, const sp_adapter_options *options, const char *code,
                 const char *subject, const char *word, const char *what)
{
    sp_adapter *opened = NULL;
    size_t blocks = sp_alloc_blocks();
    sp_error error = {0};
    sp_status status = toy_open(adapter, options, &opened, &error);

    if (status == SP_OK)
        fail_msg("%s: was taken, not refused as %s", what, code);
    if (strcmp(error.code, code) != 0)
        fail_msg("%s: \"%s\" (%s), not %s", what, error.code, error.text, code);
    if (subject && strcmp(error.subject, subject) != 0)
        fail_msg("%s: subject \"%s\", not \"%s\"", what, error.subject, subject);
    if (word && !strstr(error.text, word))
        fail_msg("%s: no \"%s\" in \"%s\"", what, word, error.text);
    assert_null(opened);
    assert_int_equal(sp_alloc_blocks(), blocks);
}

sp_adapter *toy_opened(const make_adapter *adapter, const sp_adapter_options *options)
{
    sp_adapter *opened = NULL;
    sp_error error = {0};

    assert_ok(toy_open(adapter, options, &opened, &error), &error);
    return opened;
}

/* facts.c: the facts about an adapter that are kept after its tensors are packed and freed. */
#include "base/alloc.h"
#include "stage/stage_state.h"

static size_t factor_bytes(const sp_factor *factor)
{
    return (size_t)factor->rows * (size_t)factor->cols * sp_dtype_bytes(factor->dtype);
}

static sp_status copy_receipt(const sp_layout *layout, const sp_adapter *adapter, char **out_json,
                              sp_error *error)
{
    sp_receipt_options options;
    sp_receipt *receipt;
    sp_status status;

    sp_receipt_options_default(&options, sizeof options);
    options.expert_bytes = (int64_t)sp_layout_expert_bytes(adapter, sp_layout_dtype(layout));
    status = sp_receipt_create(adapter, &options, &receipt, error);
    if (status != SP_OK)
        return status;
    *out_json = sp_strdup(sp_receipt_json(receipt));
    sp_receipt_destroy(receipt);
    return *out_json != NULL ? SP_OK : sp_fail_memory(error, 1, "a receipt");
}

sp_status sp_stage_facts_of(const sp_layout *layout, const sp_adapter *adapter,
                            sp_stage_facts *out_facts, sp_error *error)
{
    sp_stage_facts facts = {
        .struct_bytes = sizeof facts,
        .sites = (int32_t)sp_adapter_n_sites(adapter),
        .row_macs = sp_adapter_row_macs(adapter),
    };
    char *receipt;
    sp_status status = copy_receipt(layout, adapter, &receipt, error);

    if (status != SP_OK)
        return status;
    facts.receipt = receipt;
    for (size_t i = 0; i < sp_adapter_n_sites(adapter); i++) {
        const sp_adapter_site *site = sp_adapter_site_at(adapter, i);

        facts.rank = site->rank > facts.rank ? site->rank : facts.rank;
        facts.file_bytes += factor_bytes(&site->a) + factor_bytes(&site->b);
    }
    for (size_t i = 0; i < sp_adapter_n_tables(adapter); i++) {
        const sp_adapter_table *table = sp_adapter_table_at(adapter, i);

        facts.file_bytes += factor_bytes(&table->full) + factor_bytes(&table->trainable);
    }
    *out_facts = facts;
    return SP_OK;
}

void sp_stage_facts_clear(sp_stage_facts *facts)
{
    sp_free((void *)(uintptr_t)facts->receipt);
    *facts = (sp_stage_facts){.struct_bytes = sizeof *facts};
}

/* families.c: the table alone, so that a program can replace it (family.h). */
#include "engine/model/family.h"

const sp_family_row *const sp_families[] = {&sp_family_qwen3,
                                            &sp_family_qwen3_moe,
                                            &sp_family_qwen3_next,
                                            &sp_family_qwen35,
                                            &sp_family_qwen35_moe,
                                            &sp_family_llama,
                                            NULL};

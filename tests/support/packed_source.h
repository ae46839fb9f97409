/*
 * packed_source.h: a source of images that a test packs by hand, for simulators that have no files.
 */
#ifndef SP_TEST_SUPPORT_PACKED_SOURCE_H
#define SP_TEST_SUPPORT_PACKED_SOURCE_H

#include <sidepath/stage.h>

typedef struct packed_source {
    void *user;
    const sp_layout *layout;
    /* The adapter's image, owned by the source from then on, or why there is none. */
    sp_status (*find)(void *user, const sp_source_request *request, sp_image **out_image,
                      sp_error *error);
    /* Asked after the last byte; NULL: all goes well. */
    sp_status (*finish)(void *user, const sp_source_request *request, sp_error *error);
} packed_source;

/* Borrows `source`; the stage must not outlive it. */
sp_stage_source packed_source_table(packed_source *source);

#endif

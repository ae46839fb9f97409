/* One of everything that the library makes, on a small fixture: for tests of its whole surface. */
#ifndef SP_TEST_SUPPORT_LIBRARY_WORLD_H
#define SP_TEST_SUPPORT_LIBRARY_WORLD_H

#include <sidepath/engine.h>
#include <sidepath/intake.h>
#include <sidepath/route.h>
#include <sidepath/stage.h>

#define LIBRARY_WORLD_MODEL   SP_TEST_FIXTURES "/qwen3-tied"
#define LIBRARY_WORLD_ADAPTER LIBRARY_WORLD_MODEL "/adapters/plain-r8"

typedef struct library_world {
    sp_geometry *geometry;
    sp_adapter *adapter;
    sp_layout *layout;
    sp_image *image;
    sp_device *device;
    sp_pool *pool; /* two slots; `handle` is held in one of them */
    sp_slot_handle handle;
    sp_plan *plan; /* built: two rows of the handle */
    sp_exec *exec;
    sp_engine *engine; /* with the adapter, as "a", and places for more */
} library_world;

void library_world_open(library_world *world);
void library_world_close(library_world *world);

#endif

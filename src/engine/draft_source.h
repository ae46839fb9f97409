/*
 * draft_source.h: where an engine's drafts come from, for `bench` and tests, which force how many
 * are accepted; and that their number does not depend on time. It must not know what a source
 * guesses.
 */
#ifndef SP_ENGINE_DRAFT_SOURCE_H
#define SP_ENGINE_DRAFT_SOURCE_H

#include "engine/schedule/scheduler.h"

#include <sidepath/engine.h>

/* From the next step on; the source's user is borrowed until the engine is closed. All NULL: prompt
 * lookup. Engine thread. */
void sp_engine_set_draft_source(sp_engine *engine, sp_draft_source source);

/* From now on what a row costs is not measured: the same requests are the same steps. Engine
 * thread. */
void sp_engine_set_untimed(sp_engine *engine);

#endif

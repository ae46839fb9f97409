/*
 * driver.c: the engine's thread: tasks in, steps, tokens out.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "server/driver/driver_state.h"

#include <string.h>

#define IDLE_POLL_MS         5
#define LOOK_UP_IDLE_MS      250 /* for time-outs of those that wait for it */
#define PAUSED_IDLE_MS       250 /* likewise, where all that run are paused */
#define STEP_FAILURES_MAX    3   /* in a row of a step as a whole */
#define DEADLINE_INTERVAL_NS 500000000u
#define NS_PER_S             1000000000u
#define WAKE_BYTES           (SP_OUTBOX_BYTES_MAX / 4)

/* ---- the batch ----------------------------------------------------------------------------- */

static int32_t find_running(const sp_driver *driver, int64_t id)
{
    int32_t low = 0, high = driver->n_running;

    while (low < high) {
        int32_t middle = low + (high - low) / 2;

        if (driver->running[middle].id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low < driver->n_running && driver->running[low].id == id ? low : -1;
}

static bool add_running(sp_driver *driver, sp_generation *generation, int32_t choice)
{
    if (driver->n_running == driver->running_capacity) {
        int32_t capacity = driver->running_capacity ? driver->running_capacity * 2 : 64;
        sp_running *grown = sp_realloc(driver->running, (size_t)capacity * sizeof *grown);
        sp_generation **touched;

        if (grown)
            driver->running = grown;
        touched = sp_realloc(driver->touched, (size_t)capacity * sizeof *touched);
        if (touched)
            driver->touched = touched;
        if (!grown || !touched)
            return false;
        driver->running_capacity = capacity;
    }
    sp_task_retain(&generation->task);
    driver->running[driver->n_running++] =
        (sp_running){generation->choices[choice].id, generation, choice};
    generation->n_left++;
    return true;
}

/* Takes a choice out of the list, whose engine request has ended. */
static void remove_running(sp_driver *driver, int32_t index)
{
    sp_running removed = driver->running[index];

    memmove(&driver->running[index], &driver->running[index + 1],
            (size_t)(driver->n_running - index - 1) * sizeof *driver->running);
    driver->n_running--;
    removed.generation->choices[removed.choice].id = 0;
    removed.generation->n_left--;
    atomic_fetch_sub(&driver->n_in_flight, 1);
    sp_task_release(&removed.generation->task);
}

/* Removes all its choices from the batch. The caller holds a reference. */
static void drop_choices(sp_driver *driver, sp_generation *generation)
{
    for (int32_t i = driver->n_running - 1; i >= 0; i--) {
        if (driver->running[i].generation != generation)
            continue;
        sp_engine_cancel(driver->engine, driver->running[i].id, NULL);
        remove_running(driver, i);
    }
}

static void fail_generation(sp_driver *driver, sp_generation *generation, sp_status status,
                            const sp_error *error)
{
    sp_task_retain(&generation->task);
    drop_choices(driver, generation);
    sp_task_finish(&generation->task, status, error);
    sp_task_release(&generation->task);
}

/* ---- admission ----------------------------------------------------------------------------- */

void sp_driver_refuse(sp_driver *driver, sp_generation *generation, sp_status status,
                      const sp_error *error)
{
    driver->counts.refused += error != NULL; /* else it was cancelled, and is counted so */
    atomic_fetch_sub(&driver->n_in_flight, generation->n_choices);
    sp_task_finish(&generation->task, status, error);
    sp_task_release(&generation->task);
}

/* Tells the generation which adapter serves it. Its name means that version still. */
static void describe(sp_driver *driver, sp_generation *generation)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    const char *served = NULL;
    sp_digest digest = {{0}};

    sp_engine_request_adapter(driver->engine, generation->choices[0].id, &served, &digest, NULL);
    if (served)
        sp_stage_find(sp_engine_stage(driver->engine), served, &info, NULL);
    pthread_mutex_lock(&generation->task.lock);
    generation->digest = digest;
    generation->served = served ? sp_strdup(served) : NULL;
    generation->version = served ? info.generation : 0;
    pthread_mutex_unlock(&generation->task.lock);
}

static sp_status check_version(const sp_generation *generation, sp_error *error)
{
    const sp_version_wish *wish = &generation->wanted_version;
    bool other =
        wish->has_digest && memcmp(&wish->digest, &generation->digest, sizeof wish->digest) != 0;

    if (!other && generation->version >= wish->min_generation)
        return SP_OK;
    return sp_fail(error, SP_ERR_STATE, SP_CODE_OTHER_VERSION,
                   other ? "adapter_digest" : "min_generation", -1,
                   "the request insists on another version: \"%.200s\" is at generation %llu%s",
                   generation->served ? generation->served : "the base",
                   (unsigned long long)generation->version, other ? ", with another digest" : "");
}

/* Requests of an adapter that is held wait with those that were there before. */
static void pause_if_held(sp_driver *driver, const sp_generation *generation)
{
    if (!sp_driver_is_held(driver, generation->served))
        return;
    for (int32_t i = 0; i < generation->n_choices; i++)
        sp_engine_set_paused(driver->engine, generation->choices[i].id, true, NULL);
}

static sp_status submit_choices(sp_driver *driver, sp_generation *generation, sp_error *error)
{
    for (int32_t i = 0; i < generation->n_choices; i++) {
        sp_choice *choice = &generation->choices[i];
        sp_status status;

        choice->request.adapter = generation->adapter;
        choice->clock.arrived = (double)generation->received_ns / NS_PER_S;
        status = sp_engine_submit(driver->engine, &choice->request, &choice->id, error);
        if (status != SP_OK)
            return status;
        if (!add_running(driver, generation, i)) {
            sp_engine_cancel(driver->engine, choice->id, NULL);
            return sp_fail_memory(error, sizeof(sp_running), "a running request");
        }
    }
    return SP_OK;
}

/* Whether what it was made by is what its adapter says now; else that takes the place. Of an
 * adapter that is not loaded the engine says so. */
static bool is_made_right(sp_driver *driver, sp_generation *generation)
{
    sp_lora_chat *chat;

    if (!sp_lora_chats_find(driver->options.chats, generation->adapter, &chat))
        return true;
    if (!generation->asks && chat == generation->chat) {
        sp_lora_chat_release(chat);
        return true;
    }
    sp_lora_chat_release(generation->chat);
    generation->chat = chat;
    return false;
}

/* It comes back: it was not begun, and is neither answered nor counted. */
static void return_to_be_made(sp_driver *driver, sp_generation *generation)
{
    sp_error error;

    sp_fail(&error, SP_AGAIN, SP_CODE_MAKE_AGAIN, NULL, -1, "the adapter has changed; try again");
    atomic_fetch_sub(&driver->n_in_flight, generation->n_choices);
    sp_task_finish(&generation->task, SP_AGAIN, &error);
    sp_task_release(&generation->task);
}

void sp_driver_admit(sp_driver *driver, sp_generation *generation)
{
    sp_error error = {0};
    int32_t n_in_batch;
    sp_status status;

    if (!is_made_right(driver, generation)) {
        return_to_be_made(driver, generation);
        return;
    }
    status = submit_choices(driver, generation, &error);
    n_in_batch = generation->n_left;

    if (status == SP_OK) {
        describe(driver, generation);
        status = check_version(generation, &error);
    }
    if (status == SP_OK) {
        pause_if_held(driver, generation);
        sp_task_release(&generation->task);
        return;
    }
    if (status == SP_ERR_NOT_FOUND && n_in_batch == 0 &&
        sp_driver_load_for(driver, generation, &error))
        return;
    drop_choices(driver, generation);
    /* Those in the batch were counted down one by one. */
    atomic_fetch_add(&driver->n_in_flight, n_in_batch);
    sp_driver_refuse(driver, generation, status, &error);
}

static bool weights_changed(const sp_driver *driver, sp_error *out_error)
{
    return sp_weights_watch_state(driver->options.weights, out_error) == SP_WEIGHTS_CHANGED;
}

static void run_task(sp_driver *driver, sp_task *task)
{
    sp_error error;

    if (task->kind != SP_TASK_GENERATE) {
        sp_driver_run_lora_task(driver, (sp_lora_task *)(void *)task);
    } else if (atomic_load(&task->cancelled)) {
        driver->counts.cancelled++;
        sp_driver_refuse(driver, (sp_generation *)(void *)task, SP_ERR_STATE, NULL);
    } else if (weights_changed(driver, &error)) {
        sp_driver_refuse(driver, (sp_generation *)(void *)task, error.status, &error);
    } else {
        sp_driver_admit(driver, (sp_generation *)(void *)task);
    }
}

/* ---- tokens out ---------------------------------------------------------------------------- */

/* There is always room: a step has no more generations than running choices. */
static void touch(sp_driver *driver, sp_generation *generation)
{
    if (generation->touched)
        return;
    generation->touched = true;
    sp_task_retain(&generation->task);
    driver->touched[driver->n_touched++] = generation;
}

static void count_token(sp_driver *driver, const sp_running *running, const sp_request_event *event)
{
    sp_generation *generation = running->generation;

    sp_metrics_event(&driver->metrics, &generation->choices[running->choice].clock,
                     generation->served, event, sp_clock_seconds());
    driver->counts.finished_stop += event->finish == SP_FINISH_STOP;
    driver->counts.finished_length += event->finish == SP_FINISH_LENGTH;
}

bool sp_is_non_finite(const sp_error *error)
{
    return error->code && (strcmp(error->code, SP_CODE_ADAPTER_NON_FINITE) == 0 ||
                           strcmp(error->code, SP_CODE_LOGITS_NON_FINITE) == 0);
}

static void note_failure(sp_driver *driver, sp_generation *generation, sp_status status,
                         const sp_error *error)
{
    if (generation->failure != SP_OK)
        return;
    driver->counts.failed++;
    if (sp_is_non_finite(error))
        sp_metrics_non_finite(&driver->metrics, generation->served);
    generation->failure = status;
    generation->error = *error;
}

/* Whether what this step has computed is not to be let out: it may have read other weights. */
static bool is_spoilt(sp_driver *driver, sp_generation *generation)
{
    sp_error error;

    if (!driver->weights_checked)
        sp_weights_watch_look(driver->options.weights);
    driver->weights_checked = true;
    if (!weights_changed(driver, &error))
        return false;
    note_failure(driver, generation, error.status, &error);
    return true;
}

/* Inside a step: nothing may leave the batch here but what the engine itself has ended. */
/* Of the experts that come with a request's last event. */
static uint32_t routed_bytes(const sp_driver *driver, const sp_request_event *event)
{
    int32_t layers, per_token;

    sp_engine_routing(driver->engine, &layers, &per_token);
    return (uint32_t)event->n_routed * (uint32_t)(layers * per_token) *
           (uint32_t)sizeof *event->routed_experts;
}

static void on_event(void *user, const sp_request_event *event)
{
    sp_driver *driver = user;
    int32_t index = find_running(driver, event->request);
    sp_generation *generation;
    sp_produced produced;

    if (index < 0)
        return;
    generation = driver->running[index].generation;
    touch(driver, generation);
    if (is_spoilt(driver, generation) && event->finish == SP_FINISH_NONE)
        return; /* after the step all of its choices are dropped */
    if (event->finish == SP_FINISH_FAILED)
        note_failure(driver, generation, event->failure, event->error);
    if (generation->failure != SP_OK) {
        /* The engine has dropped the choice; its siblings go with it, after the step. */
        remove_running(driver, index);
        return;
    }
    produced = (sp_produced){.choice = driver->running[index].choice,
                             .token = event->token,
                             .finish = event->finish,
                             .text_bytes = (uint32_t)event->text_bytes,
                             .logprob = event->logprob,
                             .processed_logprob = event->processed_logprob,
                             .n_top = event->n_top,
                             .is_prompt = event->is_prompt};
    if (event->finish != SP_FINISH_NONE && event->trace) {
        produced.cached_tokens = event->trace->cached_tokens;
        produced.drafted_tokens = event->trace->drafted_tokens;
        produced.accepted_tokens = event->trace->accepted_tokens;
        produced.verify_steps = event->trace->verify_steps;
    }
    produced.routed_bytes = routed_bytes(driver, event);
    count_token(driver, &driver->running[index], event);
    if (generation->overflowed ||
        !sp_generation_add(generation, &produced, event->top, event->routed_experts, event->text))
        generation->overflowed = true;
    if (event->finish != SP_FINISH_NONE)
        remove_running(driver, index);
}

static bool wants_wake(sp_generation *generation)
{
    bool wants;

    pthread_mutex_lock(&generation->task.lock);
    wants = generation->wake_each || generation->outbox.bytes > WAKE_BYTES;
    pthread_mutex_unlock(&generation->task.lock);
    return wants;
}

static void drop_slow_reader(sp_driver *driver, sp_generation *generation)
{
    sp_error error;

    if (generation->no_room) {
        driver->counts.failed++;
        sp_fail(&error, SP_ERR_MEMORY, SP_CODE_MEMORY_FULL, NULL, -1,
                "clients fill all memory that they may (--client-bytes-max); try again later");
        fail_generation(driver, generation, SP_ERR_MEMORY, &error);
        return;
    }
    driver->counts.slow_readers++;
    sp_fail(&error, SP_ERR_TOO_LARGE, SP_CODE_SLOW_READER, NULL, -1,
            "the client does not read: %zu bytes of its answer wait", SP_OUTBOX_BYTES_MAX);
    fail_generation(driver, generation, SP_ERR_TOO_LARGE, &error);
}

static void wake_one(sp_driver *driver, sp_generation *generation)
{
    if (sp_task_is_done(&generation->task))
        return; /* it has failed, and was told so */
    if (generation->failure != SP_OK) {
        fail_generation(driver, generation, generation->failure, &generation->error);
    } else if (generation->overflowed) {
        drop_slow_reader(driver, generation);
    } else if (generation->n_left == 0) {
        sp_task_finish(&generation->task, SP_OK, NULL);
    } else if (wants_wake(generation)) {
        sp_task_wake(&generation->task);
    }
}

/* A token is on its way as soon as its step is over. A wake of a connection that was not looked at
 * since the last one costs nothing: what waits there is taken together. */
static void wake_touched(sp_driver *driver)
{
    int32_t n = driver->n_touched;

    driver->n_touched = 0;
    for (int32_t i = 0; i < n; i++) {
        sp_generation *generation = driver->touched[i];

        generation->touched = false;
        wake_one(driver, generation);
        sp_task_release(&generation->task);
    }
}

bool sp_driver_device_failed(sp_driver *driver)
{
    return atomic_load(&driver->device_failed);
}

/* ---- one adapter's requests ------------------------------------------------------------------ */

static void add_abort(sp_generation *generation, int32_t choice)
{
    const sp_produced produced = {.choice = choice, .token = -1, .finish = SP_FINISH_ABORT};

    generation->overflowed |= !sp_generation_add(generation, &produced, NULL, NULL, NULL);
}

static bool is_of(const sp_generation *generation, const char *adapter)
{
    return generation->served && strcmp(generation->served, adapter) == 0;
}

int32_t sp_driver_abort(sp_driver *driver, const char *adapter)
{
    int32_t n = 0;

    for (int32_t i = driver->n_running - 1; i >= 0; i--) {
        sp_generation *generation = driver->running[i].generation;

        if (!is_of(generation, adapter))
            continue;
        touch(driver, generation);
        sp_engine_cancel(driver->engine, driver->running[i].id, NULL);
        add_abort(generation, driver->running[i].choice);
        remove_running(driver, i);
        driver->counts.cancelled++;
        n++;
    }
    wake_touched(driver);
    return n;
}

void sp_driver_abort_unbegun(sp_driver *driver, sp_generation *generation)
{
    for (int32_t i = 0; i < generation->n_choices; i++)
        add_abort(generation, i);
    driver->counts.cancelled++;
    atomic_fetch_sub(&driver->n_in_flight, generation->n_choices);
    sp_task_finish(&generation->task, SP_OK, NULL);
    sp_task_release(&generation->task);
}

int32_t sp_driver_set_paused(sp_driver *driver, const char *adapter, bool paused)
{
    int32_t n = 0;

    for (int32_t i = 0; i < driver->n_running; i++) {
        if (!is_of(driver->running[i].generation, adapter))
            continue;
        sp_engine_set_paused(driver->engine, driver->running[i].id, paused, NULL);
        n++;
    }
    return n;
}

/* ---- steps --------------------------------------------------------------------------------- */

/* A step's own failure could come back for ever: after some in a row, all requests are ended. A
 * device that failed does not recover: they are ended at once. */
static void take_failure(sp_driver *driver, sp_status status, const sp_error *error)
{
    if (status == SP_ERR_DEVICE)
        atomic_store(&driver->device_failed, true);
    else if (++driver->n_step_failures < STEP_FAILURES_MAX)
        return;
    driver->n_step_failures = 0;
    while (driver->n_running > 0) {
        driver->counts.failed++;
        fail_generation(driver, driver->running[0].generation, status, error);
    }
}

static void count_step(sp_driver *driver)
{
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    sp_engine_get_stats(driver->engine, &stats, NULL);
    sp_metrics_step(&driver->metrics, &stats, sp_clock_seconds());
}

static void step(sp_driver *driver)
{
    sp_error error;
    double began = sp_clock_seconds();
    sp_status status;
    double seconds;

    driver->weights_checked = false;
    status = sp_engine_step(driver->engine, on_event, driver, &error);
    seconds = sp_clock_seconds() - began;
    count_step(driver);
    driver->all_paused = status == SP_AGAIN;
    if (driver->n_loads > 0 && seconds > driver->counts.step_seconds_max_while_loading)
        driver->counts.step_seconds_max_while_loading = seconds;
    if (status < 0)
        take_failure(driver, status, &error);
    else
        driver->n_step_failures = 0;
    wake_touched(driver);
}

static void drop_cancelled(sp_driver *driver)
{
    if (!atomic_exchange(&driver->has_cancelled, false))
        return;
    for (int32_t i = driver->n_running - 1; i >= 0; i--) {
        if (i >= driver->n_running)
            continue; /* its siblings went with one before */
        if (!atomic_load(&driver->running[i].generation->task.cancelled))
            continue;
        driver->counts.cancelled++;
        fail_generation(driver, driver->running[i].generation, SP_ERR_STATE, NULL);
    }
    sp_driver_drop_cancelled_waiters(driver);
}

static void drop_late(sp_driver *driver)
{
    uint64_t now_ns = sp_clock_ns();
    uint64_t most_ns = (uint64_t)driver->options.request_time_s * NS_PER_S;
    sp_error error;

    if (most_ns == 0 || now_ns < driver->next_deadline_check_ns)
        return;
    driver->next_deadline_check_ns = now_ns + DEADLINE_INTERVAL_NS;
    sp_fail(&error, SP_ERR_STATE, SP_CODE_REQUEST_TIMEOUT, NULL, -1,
            "the request took longer than %d seconds (--request-timeout)",
            driver->options.request_time_s);
    for (int32_t i = driver->n_running - 1; i >= 0; i--) {
        if (i >= driver->n_running || now_ns - driver->running[i].generation->received_ns < most_ns)
            continue;
        driver->counts.failed++;
        fail_generation(driver, driver->running[i].generation, SP_ERR_STATE, &error);
    }
    if (now_ns > most_ns)
        sp_driver_drop_late_waiters(driver, now_ns - most_ns, &error);
}

static void end_all(sp_driver *driver)
{
    sp_error error;

    sp_fail(&error, SP_ERR_STATE, SP_CODE_SHUTTING_DOWN, NULL, -1, "the server is shutting down");
    while (driver->n_running > 0)
        fail_generation(driver, driver->running[0].generation, SP_ERR_STATE, &error);
    sp_driver_end_loads(driver);
    wake_touched(driver);
}

static void save_state(sp_driver *driver)
{
    sp_text text = {0};

    if (!driver->adapters_changed || !driver->options.state_file)
        return;
    sp_saved_state_write(sp_engine_stage(driver->engine), driver->options.restored, driver->hidden,
                         driver->n_hidden, &text);
    driver->adapters_changed = text.failed; /* tried again after the next task */
    if (!text.failed)
        sp_state_file_put(driver->options.state_file, &text);
    sp_text_free(&text);
}

/* How long there is nothing to do but for new tasks; a look-up comes back as one. */
static int32_t idle_ms(const sp_driver *driver)
{
    if ((driver->n_running > 0 && !driver->all_paused) || driver->n_loads > driver->n_looking)
        return 0;
    if (driver->n_running > 0)
        return PAUSED_IDLE_MS;
    return driver->n_looking > 0 ? LOOK_UP_IDLE_MS : -1;
}

static void *run(void *user)
{
    sp_driver *driver = user;
    bool closed = false;

    while (!closed) {
        sp_task *tasks = sp_task_queue_take(&driver->queue, idle_ms(driver), &closed);

        /* First, so that what the table says of a name is what the engine means by it. */
        sp_driver_poll_loads(driver);
        while (tasks) {
            sp_task *task = tasks;

            tasks = task->next;
            run_task(driver, task);
        }
        drop_cancelled(driver);
        drop_late(driver);
        save_state(driver);
        if (driver->n_running > 0)
            step(driver);
        else
            driver->all_paused = true;
        if (driver->all_paused && driver->n_loads > driver->n_looking)
            sp_stage_poll_wait(sp_engine_stage(driver->engine), IDLE_POLL_MS);
    }
    end_all(driver);
    return NULL;
}

/* ---- any thread ---------------------------------------------------------------------------- */

sp_status sp_driver_start(const sp_driver_options *options, sp_driver **out_driver, sp_error *error)
{
    sp_driver *driver = sp_calloc(1, sizeof *driver);
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    if (!driver)
        return sp_fail_memory(error, sizeof *driver, "the engine's thread");
    driver->options = *options;
    driver->engine = options->engine;
    sp_engine_get_stats(driver->engine, &stats, NULL);
    sp_metrics_start(&driver->metrics, sp_engine_base_name(driver->engine), &stats);
    sp_task_queue_open(&driver->queue);
    for (size_t i = 0; options->restored && i < options->restored->n_unloaded; i++)
        if (!sp_driver_hide(driver, options->restored->unloaded[i])) {
            sp_driver_destroy(driver);
            return sp_fail_memory(error, sizeof(char *), "a name");
        }
    if (pthread_create(&driver->thread, NULL, run, driver) != 0) {
        sp_driver_destroy(driver);
        return sp_fail(error, SP_ERR_THREAD, NULL, NULL, -1, "cannot start the engine's thread");
    }
    *out_driver = driver;
    return SP_OK;
}

void sp_driver_stop(sp_driver *driver)
{
    if (!driver)
        return;
    sp_task_queue_close(&driver->queue);
    pthread_join(driver->thread, NULL);
}

void sp_driver_destroy(sp_driver *driver)
{
    if (!driver)
        return;
    sp_task_queue_destroy(&driver->queue);
    for (size_t i = 0; i < driver->n_hidden; i++)
        sp_free(driver->hidden[i]);
    sp_free(driver->hidden);
    sp_driver_free_holds(driver);
    sp_free(driver->running);
    sp_free(driver->touched);
    sp_free(driver);
}

static sp_status shutting_down(sp_error *error)
{
    return sp_fail(error, SP_ERR_STATE, SP_CODE_SHUTTING_DOWN, NULL, -1,
                   "the server is shutting down");
}

sp_status sp_driver_generate(sp_driver *driver, sp_generation *generation, sp_error *error)
{
    int32_t most = driver->options.in_flight_max;
    int32_t before;

    if (generation->n_choices > most)
        return sp_fail(error, SP_ERR_TOO_LARGE, NULL, "n", -1,
                       "%d answers are wanted; at most %d may be in flight", generation->n_choices,
                       most);
    before = atomic_fetch_add(&driver->n_in_flight, generation->n_choices);
    if (before > most - generation->n_choices) {
        atomic_fetch_sub(&driver->n_in_flight, generation->n_choices);
        return sp_fail(error, SP_AGAIN, SP_CODE_QUEUE_FULL, NULL, -1,
                       "%d requests are in flight, which is all that the server takes; try again "
                       "later",
                       before);
    }
    if (sp_task_queue_push(&driver->queue, &generation->task))
        return SP_OK;
    atomic_fetch_sub(&driver->n_in_flight, generation->n_choices);
    return shutting_down(error);
}

sp_status sp_driver_adapter(sp_driver *driver, sp_lora_task *task, sp_error *error)
{
    return sp_task_queue_push(&driver->queue, &task->task) ? SP_OK : shutting_down(error);
}

void sp_driver_cancel(sp_driver *driver, sp_task *task)
{
    sp_task_detach(task, true);
    atomic_store(&driver->has_cancelled, true);
    sp_task_queue_knock(&driver->queue);
}

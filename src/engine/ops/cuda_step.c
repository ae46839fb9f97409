/*
 * cuda_step.c: a step on a GPU. Its rows are described by one copy to fixed addresses; then the
 * pass runs eagerly, or a graph is replayed that was captured for as many rows. Tokens, positions,
 * pages and slots reach the device through these addresses alone, so a graph stays right whatever
 * is loaded, unloaded or scaled.
 */
#include "base/assert.h"
#include "engine/ops/cuda_ops.h"
#include "kernels/cuda/cuda_choose.h"

#include <string.h>

#define TABLE_ALIGN 256
#define SPAN_INTS   (sizeof(sp_cuda_rule_span) / sizeof(int32_t))
#define ITEM_INTS   (sizeof(sp_cuda_rule_item) / sizeof(int32_t))

/* ---- tables -------------------------------------------------------------------------------- */

static int32_t positions_max(const sp_ops_options *options)
{
    return options->rope.positions;
}

static size_t add_array(size_t *bytes, size_t n)
{
    size_t offset = *bytes;

    *bytes += (n * sizeof(int32_t) + TABLE_ALIGN - 1) / TABLE_ALIGN * TABLE_ALIGN;
    return offset;
}

/* `ruled`: some layer has a gated delta rule. */
static sp_cuda_tables lay_out(int32_t rows_max, int32_t spans_max, int32_t positions, bool ruled)
{
    size_t rows = (size_t)rows_max, spans = (size_t)spans_max, at = 0;
    size_t items = ruled ? (size_t)sp_cuda_rule_items(rows_max, spans_max) : 0;
    sp_cuda_tables tables = {
        .pages_max = spans_max * ((positions + SP_CUDA_PAGE - 1) / SP_CUDA_PAGE),
    };

    (void)add_array(&at, 3); /* counts */
    tables.token = add_array(&at, rows);
    tables.position = add_array(&at, rows);
    tables.row_span = add_array(&at, rows);
    tables.span_row = add_array(&at, spans + 1);
    tables.span_page = add_array(&at, spans);
    tables.rule_span = add_array(&at, ruled ? spans * SPAN_INTS : 0);
    tables.rule_item = add_array(&at, items * ITEM_INTS);
    tables.pages = add_array(&at, (size_t)tables.pages_max);
    tables.bytes = at;
    return tables;
}

size_t sp_cuda_tables_bytes(const sp_ops_options *options)
{
    return lay_out(options->rows_max, options->spans_max, positions_max(options),
                   options->delta_rule.layers > 0)
        .bytes;
}

sp_status sp_cuda_tables_create(sp_cuda_ops *cuda, sp_error *error)
{
    sp_cuda_tables *tables = &cuda->tables;
    sp_status status = SP_OK;

    *tables = lay_out(cuda->rows_max, cuda->spans_max, cuda->attention.positions_max,
                      cuda->rule.layers > 0);
    tables->device = sp_cuda_block(cuda, tables->bytes, &status, error);
    for (int i = 0; i < SP_CUDA_TABLES && status == SP_OK; i++) {
        tables->host[i] = sp_cuda_pinned(cuda, tables->bytes, &status, error);
        if (status == SP_OK)
            status = sp_event_create(cuda->device, &tables->read[i], error);
    }
    return status;
}

void sp_cuda_tables_destroy(sp_cuda_ops *cuda)
{
    for (int i = 0; i < SP_CUDA_TABLES; i++)
        sp_event_destroy(cuda->tables.read[i]);
}

static int32_t *array_at(char *block, size_t offset)
{
    return (int32_t *)(void *)(block + offset);
}

static void set_addresses(sp_cuda_ops *cuda, int32_t rows, int32_t spans)
{
    const sp_cuda_tables *tables = &cuda->tables;

    cuda->step = (sp_cuda_step){
        .counts = array_at(tables->device, 0),
        .token = array_at(tables->device, tables->token),
        .position = array_at(tables->device, tables->position),
        .row_span = array_at(tables->device, tables->row_span),
        .span_row = array_at(tables->device, tables->span_row),
        .span_page = array_at(tables->device, tables->span_page),
        .pages = array_at(tables->device, tables->pages),
        .rows = rows,
        .spans = spans,
    };
    cuda->rule.span = (const void *)(tables->device + tables->rule_span);
    cuda->rule.item = (const void *)(tables->device + tables->rule_item);
    cuda->rule.n_items = cuda->step.counts + 2;
}

/* Writes the rows of a span, the s-th, that begin at `row`; *io_page counts the pages so far. */
static void describe_span(const sp_cuda_tables *tables, char *block, const sp_step_span *span,
                          int32_t s, int32_t row, int32_t *io_page)
{
    int32_t *token = array_at(block, tables->token) + row;
    int32_t *position = array_at(block, tables->position) + row;
    int32_t *row_span = array_at(block, tables->row_span) + row;
    int32_t n_pages = (span->position + span->n_rows + SP_CUDA_PAGE - 1) / SP_CUDA_PAGE;

    SP_ASSERT(*io_page + n_pages <= tables->pages_max);
    array_at(block, tables->span_row)[s] = row;
    array_at(block, tables->span_page)[s] = *io_page;
    memcpy(token, span->tokens, (size_t)span->n_rows * sizeof *token);
    for (int32_t i = 0; i < span->n_rows; i++) {
        position[i] = span->position + i;
        row_span[i] = s;
    }
    memcpy(array_at(block, tables->pages) + *io_page, span->pages,
           (size_t)n_pages * sizeof *span->pages);
    *io_page += n_pages;
}

/* The same for the gated delta rule, with spans of no rows beyond the step's. */
static void describe_rule(const sp_cuda_ops *cuda, char *block, const sp_step *step)
{
    sp_cuda_rule_span *spans = (void *)(block + cuda->tables.rule_span);
    sp_cuda_rule_item *items = (void *)(block + cuda->tables.rule_item);

    array_at(block, 0)[2] = sp_cuda_rule_describe(step, spans, items);
    for (int32_t s = step->n_spans; s < cuda->step.spans; s++)
        spans[s] = (sp_cuda_rule_span){.load = -1, .save = -1};
}

/* Writes what the launched rows and spans are, those beyond the step's included; returns how many
 * bytes of the block are used. */
static size_t describe(const sp_cuda_ops *cuda, char *block, const sp_step *step)
{
    const sp_cuda_tables *tables = &cuda->tables;
    int32_t *counts = array_at(block, 0);
    int32_t row = 0, page = 0;

    for (int32_t s = 0; s < step->n_spans; s++) {
        describe_span(tables, block, &step->spans[s], s, row, &page);
        row += step->spans[s].n_rows;
    }
    SP_ASSERT(row == step->n_rows);
    counts[0] = row;
    counts[1] = step->n_spans;
    if (cuda->rule.layers > 0)
        describe_rule(cuda, block, step);
    for (; row < cuda->step.rows; row++) {
        array_at(block, tables->token)[row] = 0;
        array_at(block, tables->position)[row] = -1;
        array_at(block, tables->row_span)[row] = -1;
    }
    for (int32_t s = step->n_spans; s <= cuda->step.spans; s++)
        array_at(block, tables->span_row)[s] = step->n_rows;
    for (int32_t s = step->n_spans; s < cuda->step.spans; s++)
        array_at(block, tables->span_page)[s] = 0;
    return tables->pages + (size_t)page * sizeof(int32_t);
}

static sp_status send(sp_cuda_ops *cuda, const sp_step *step)
{
    sp_cuda_tables *tables = &cuda->tables;
    int32_t turn = tables->turn;
    sp_status status = sp_event_wait(tables->read[turn], NULL);
    size_t bytes;

    if (status != SP_OK)
        return status;
    bytes = describe(cuda, tables->host[turn], step);
    tables->turn = (turn + 1) % SP_CUDA_TABLES;
    status = sp_stream_copy(cuda->stream, tables->device, tables->host[turn], bytes, NULL);
    return status == SP_OK ? sp_event_record(tables->read[turn], cuda->stream, NULL) : status;
}

/* ---- the pass ------------------------------------------------------------------------------ */

/* What is launched is the same for every step of as many rows, or is read on the device. */
static sp_status run_pass(sp_cuda_ops *cuda, sp_pass_fn pass, void *user)
{
    const sp_cuda_attention attention = {
        .shape = cuda->attention,
        .step = cuda->step,
        .scratch = cuda->attention_scratch,
        .wide = cuda->wide,
    };
    size_t fault_bytes = (size_t)cuda->step.spans * sizeof *cuda->fault;
    sp_status status = sp_stream_zero(cuda->stream, cuda->fault, fault_bytes, NULL);

    if (status == SP_OK && cuda->adapted)
        status = sp_delta_start(cuda->delta, cuda->plan, cuda->stream, NULL);
    if (status == SP_OK)
        status = sp_cuda_launched(cuda,
                                  cuda->kernels.attention_plan(cuda->gpu, &attention, cuda->native),
                                  "planning attention");
    if (status != SP_OK)
        return status;
    cuda->moe.n_routed = 0;
    pass(user, &cuda->ops);
    if (cuda->ops.status != SP_OK)
        return cuda->ops.status;
    return sp_stream_copy(cuda->stream, cuda->host_fault, cuda->fault, fault_bytes, NULL);
}

sp_status sp_cuda_op_faults(sp_ops *ops, bool *out_faults, int32_t n_spans)
{
    const sp_cuda_ops *cuda = (const sp_cuda_ops *)ops;
    sp_status status = sp_stream_wait(cuda->stream, NULL);

    for (int32_t s = 0; s < n_spans && status == SP_OK; s++)
        out_faults[s] = cuda->host_fault[s] != 0;
    return status;
}

/* ---- graphs -------------------------------------------------------------------------------- */

/* A power of two, or half of one more: at most a third of the rows are pads. */
static int32_t pad_rows(int32_t rows)
{
    int32_t padded = 1;

    while (padded < rows)
        padded *= 2;
    if (padded >= 8 && rows <= padded / 4 * 3)
        padded = padded / 4 * 3;
    return padded;
}

/* The rows to launch as a graph; 0: this step is not one. */
static int32_t graph_rows(const sp_cuda_ops *cuda, const sp_step *step)
{
    int32_t rows = pad_rows(step->n_rows);

    if (cuda->eager || cuda->wide || rows > SP_CUDA_GRAPH_ROWS || rows > cuda->rows_max ||
        rows > cuda->spans_max)
        return 0;
    return rows;
}

/* NULL: there is no place for another one. */
static sp_cuda_graph *find_graph(sp_cuda_ops *cuda, int32_t rows)
{
    for (int32_t i = 0; i < cuda->n_graphs; i++)
        if (cuda->graphs[i].rows == rows && cuda->graphs[i].adapted == cuda->adapted)
            return &cuda->graphs[i];
    if (cuda->n_graphs == SP_CUDA_GRAPHS_MAX)
        return NULL;
    cuda->graphs[cuda->n_graphs] = (sp_cuda_graph){.rows = rows, .adapted = cuda->adapted};
    return &cuda->graphs[cuda->n_graphs++];
}

/* A plan of as many rows as are launched: those of the step, and more of its first. Its content
 * is not captured. */
static sp_status plan_capture(sp_cuda_ops *cuda, const sp_plan *plan)
{
    int32_t rows[SP_CUDA_GRAPH_ROWS] = {0};

    cuda->plan = cuda->capture_plan;
    return sp_plan_select(cuda->capture_plan, plan, rows, cuda->step.rows, NULL);
}

/* Capturing ends in any case, so that the stream stays usable. */
static sp_status capture(sp_cuda_ops *cuda, const sp_step *step, sp_pass_fn pass, void *user,
                         sp_graph **out_graph)
{
    sp_status status = SP_OK, ended;

    if (cuda->adapted)
        status = plan_capture(cuda, step->plan);
    if (status == SP_OK)
        status = sp_graph_begin(cuda->stream, NULL);
    if (status != SP_OK)
        return status;
    status = run_pass(cuda, pass, user);
    ended = sp_graph_end(cuda->stream, out_graph, NULL);
    cuda->plan = step->plan;
    cuda->ops.captures++;
    if (status == SP_OK || ended != SP_OK)
        return status == SP_OK ? ended : status;
    sp_graph_destroy(*out_graph);
    *out_graph = NULL;
    return status;
}

/* Whether folding pays: many rows, and few passes, which are bounded by one for each cluster and
 * one for each row whose adapter is not that of the row before. */
static bool has_few_passes(const sp_plan_view *view)
{
    int32_t clusters = (view->n_rows + SP_CUDA_FOLD_ROWS - 1) / SP_CUDA_FOLD_ROWS;
    int32_t passes = clusters;

    if (clusters < 2 || view->n_rows > SP_CUDA_FOLD_ROWS_MAX)
        return false;
    for (int32_t i = 1; i < view->n_rows; i++)
        passes += view->seq_slot[i] != view->seq_slot[i - 1];
    return passes <= clusters * SP_CUDA_FOLD_PASSES;
}

/* ---- the step ------------------------------------------------------------------------------ */

static bool has_wide_span(const sp_step *step)
{
    for (int32_t s = 0; s < step->n_spans; s++)
        if (step->spans[s].n_rows > SP_CUDA_NARROW_ROWS)
            return true;
    return false;
}

static sp_status run_graph(sp_cuda_ops *cuda, const sp_step *step, sp_cuda_graph *graph,
                           sp_pass_fn pass, void *user)
{
    sp_status status = SP_OK;

    if (!graph->graph)
        status = capture(cuda, step, pass, user, &graph->graph);
    return status == SP_OK ? sp_graph_launch(graph->graph, cuda->stream, NULL) : status;
}

/* Eagerly the first time, then as a graph. */
static sp_status run_rows(sp_cuda_ops *cuda, const sp_step *step, sp_cuda_graph *graph,
                          sp_pass_fn pass, void *user)
{
    if (graph && graph->seen)
        return run_graph(cuda, step, graph, pass, user);
    if (graph)
        graph->seen = true;
    return run_pass(cuda, pass, user);
}

sp_status sp_cuda_op_step(sp_ops *ops, const sp_step *step, sp_pass_fn pass, void *user)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    sp_cuda_graph *graph = NULL;
    int32_t rows;
    sp_status status;

    SP_ASSERT(step->n_rows > 0 && step->n_rows <= cuda->rows_max);
    SP_ASSERT(step->n_spans <= cuda->spans_max);
    sp_cuda_uploader_destroy(cuda->uploader);
    cuda->uploader = NULL;
    cuda->plan = step->plan;
    cuda->wide = has_wide_span(step);
    cuda->adapted = cuda->delta && sp_plan_get(step->plan)->n_routed > 0;
    cuda->folds = cuda->adapted && has_few_passes(sp_plan_get(step->plan));
    rows = graph_rows(cuda, step);
    if (rows > 0)
        graph = find_graph(cuda, rows);
    if (graph && graph->seen)
        set_addresses(cuda, rows, rows);
    else
        set_addresses(cuda, step->n_rows, step->n_spans);
    status = send(cuda, step);
    if (status == SP_OK && cuda->adapted)
        status = sp_delta_upload(cuda->delta, step->plan, cuda->stream, NULL);
    if (status == SP_OK)
        status = run_rows(cuda, step, graph, pass, user);
    if (status == SP_OK && step->routing)
        status = sp_cuda_fetch_routing(cuda);
    return status;
}

#include "cli/requests.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/json.h"

#include <errno.h>
#include <string.h>

#define LINE_BYTES_MAX ((size_t)64 << 20)
#define HELP_COLUMNS   90

/* ---- one request --------------------------------------------------------------------------- */

static void free_request(sp_cli_request *request)
{
    sp_request_free_lists(&request->request);
    sp_free(request->adapter);
    sp_free(request->prompt);
    sp_free(request->prompt_tokens);
    sp_free(request->tokens);
    sp_text_free(&request->text);
    sp_text_free(&request->scores);
    sp_text_free(&request->prompt_scores);
    sp_text_free(&request->routed);
    *request = (sp_cli_request){0};
}

void sp_cli_requests_free(sp_cli_requests *requests)
{
    for (size_t i = 0; i < requests->n; i++)
        free_request(&requests->items[i]);
    sp_free(requests->items);
    *requests = (sp_cli_requests){0};
}

/* *request is zeroed, to be freed after a failure too. */
static sp_status start_request(const sp_field_flags *flags, sp_cli_request *request,
                               sp_error *error)
{
    const sp_field_flag_set set = sp_request_flag_set(SP_FORM_FLAGS);

    request->request = sp_request_left_out(SP_LEFT_OUT_GENERATE);
    return sp_field_flags_apply(flags, &set, &request->request, error);
}

/* Takes the request over, or frees it. */
static sp_status append(sp_cli_requests *requests, sp_cli_request *request, sp_error *error)
{
    size_t capacity = requests->capacity ? requests->capacity * 2 : 16;

    if (requests->n == requests->capacity) {
        sp_cli_request *grown = sp_realloc(requests->items, capacity * sizeof *grown);

        if (!grown) {
            free_request(request);
            return sp_fail_memory(error, capacity * sizeof *grown, "the list of requests");
        }
        requests->items = grown;
        requests->capacity = capacity;
    }
    requests->items[requests->n++] = *request;
    return SP_OK;
}

static sp_status set_prompt(sp_cli_request *request, const char *text, size_t bytes,
                            sp_error *error)
{
    request->prompt = sp_strndup(text, bytes);
    request->prompt_bytes = bytes;
    return request->prompt ? SP_OK : sp_fail_memory(error, bytes, "a prompt");
}

sp_status sp_cli_requests_add_flag(sp_cli_requests *requests, const char *text,
                                   const sp_field_flags *defaults, sp_error *error)
{
    const char *equals = strchr(text, '=');
    const char *prompt = equals ? equals + 1 : text;
    sp_cli_request request = {.adapter = NULL};
    sp_status status = start_request(defaults, &request, error);

    if (status == SP_OK && equals && equals > text) {
        request.adapter = sp_strndup(text, (size_t)(equals - text));
        if (!request.adapter)
            status = sp_fail_memory(error, (size_t)(equals - text), "an adapter's name");
    }
    if (status == SP_OK)
        status = set_prompt(&request, prompt, strlen(prompt), error);
    if (status != SP_OK) {
        free_request(&request);
        return status;
    }
    return append(requests, &request, error);
}

/* ---- JSON lines ---------------------------------------------------------------------------- */

/* The fields of a line that are not the engine's. */
typedef struct line_fields {
    const char *adapter;
} line_fields;

static const sp_field line_rows[] = {
    {.name = "adapter",
     .type = SP_FIELD_STRING,
     .forms = SP_FORM_LINE,
     .offset = offsetof(line_fields, adapter)},
    {.name = "prompt", .type = SP_FIELD_ELSEWHERE, .forms = SP_FORM_LINE},
    {.name = "prompt_tokens", .type = SP_FIELD_ELSEWHERE, .forms = SP_FORM_LINE},
};
#define N_LINE_ROWS (sizeof line_rows / sizeof *line_rows)

static const json_t *given(const json_t *object, const char *field)
{
    const json_t *value = json_object_get(object, field);

    return json_is_null(value) ? NULL : value;
}

static sp_status read_prompt(const json_t *object, sp_cli_request *request, sp_error *error)
{
    const json_t *tokens = given(object, "prompt_tokens");
    const json_t *prompt = given(object, "prompt");

    if ((tokens != NULL) == (prompt != NULL))
        return sp_fail(error, SP_ERR_INPUT, NULL, "prompt", -1,
                       "give either \"prompt\" or \"prompt_tokens\"");
    if (tokens)
        return sp_field_read_ids(tokens, "prompt_tokens", &request->prompt_tokens,
                                 &request->n_prompt_tokens, error);
    if (!json_is_string(prompt))
        return sp_fail(error, SP_ERR_INPUT, NULL, "prompt", -1, "field \"prompt\" is not a string");
    return set_prompt(request, json_string_value(prompt), json_string_length(prompt), error);
}

static sp_status read_object(const json_t *object, sp_cli_request *request, sp_error *error)
{
    line_fields fields = {.adapter = NULL};
    const sp_field_part own = {line_rows, N_LINE_ROWS, &fields};
    sp_status status = sp_request_read(object, SP_FORM_LINE, &own, 1, &request->request, error);

    if (status == SP_OK && fields.adapter) {
        request->adapter = sp_strdup(fields.adapter);
        if (!request->adapter)
            status = sp_fail_memory(error, strlen(fields.adapter), "an adapter's name");
    }
    return status == SP_OK ? read_prompt(object, request, error) : status;
}

void sp_cli_requests_print_fields(FILE *stream)
{
    const sp_field_part parts[] = {{line_rows, N_LINE_ROWS, NULL}, sp_request_part(NULL)};
    size_t column = 0;

    for (size_t p = 0; p < sizeof parts / sizeof *parts; p++)
        for (size_t i = 0; i < parts[p].n; i++) {
            const char *name = parts[p].rows[i].name;

            if ((parts[p].rows[i].forms & SP_FORM_LINE) == 0)
                continue;
            if (column + strlen(name) + 3 > HELP_COLUMNS) {
                fputs(",\n", stream);
                column = 0;
            }
            column += (size_t)fprintf(stream, "%s%s", column > 0 ? ", " : "  ", name);
        }
    fputc('\n', stream);
}

/* Puts "line N: " before the text of an error. */
static void name_line(sp_error *error, size_t line)
{
    char text[SP_ERROR_TEXT_BYTES];

    if (!error)
        return;
    memcpy(text, error->text, sizeof text);
    snprintf(error->text, sizeof error->text, "line %zu: %.*s", line,
             (int)(sizeof error->text - 32), text);
}

sp_status sp_cli_requests_add_json(sp_cli_requests *requests, const char *bytes, size_t n_bytes,
                                   size_t line, const sp_field_flags *defaults, sp_error *error)
{
    sp_cli_request request = {0};
    json_t *root;
    sp_status status = sp_json_parse(bytes, n_bytes, "request", NULL, NULL, &root, error);

    if (status == SP_OK) {
        status = start_request(defaults, &request, error);
        if (status == SP_OK && !json_is_object(root))
            status =
                sp_fail(error, SP_ERR_INPUT, NULL, "request", -1, "a request is a JSON object");
        if (status == SP_OK)
            status = read_object(root, &request, error);
        json_decref(root);
    }
    if (status != SP_OK) {
        free_request(&request);
        name_line(error, line);
        return status;
    }
    return append(requests, &request, error);
}

static bool is_blank(const char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!strchr(" \t\r\n", bytes[i]))
            return false;
    return true;
}

sp_status sp_cli_requests_read(sp_cli_requests *requests, FILE *stream,
                               const sp_field_flags *defaults, sp_error *error)
{
    sp_text line = {0};
    sp_status status = SP_OK;
    size_t number = 0;
    int c;

    while (status == SP_OK) {
        sp_text_clear(&line);
        while ((c = getc(stream)) != EOF && c != '\n' && line.bytes < LINE_BYTES_MAX) {
            char byte = (char)c;

            sp_text_add_bytes(&line, &byte, 1);
        }
        number++;
        if (line.failed)
            status = sp_fail_memory(error, line.bytes, "a line of standard input");
        else if (line.bytes >= LINE_BYTES_MAX)
            status = sp_fail(error, SP_ERR_TOO_LARGE, NULL, "request", -1,
                             "line %zu is longer than 64 MiB", number);
        else if (line.bytes > 0 && !is_blank(line.data, line.bytes))
            status =
                sp_cli_requests_add_json(requests, line.data, line.bytes, number, defaults, error);
        if (c == EOF)
            break;
    }
    if (status == SP_OK && ferror(stream))
        status = sp_fail(error, SP_ERR_IO, NULL, "stdin", -1, "reading standard input failed: %s",
                         strerror(errno));
    sp_text_free(&line);
    return status;
}

sp_request sp_cli_request_view(const sp_cli_request *request)
{
    sp_request view = request->request;

    view.adapter = request->adapter;
    view.tokens = request->prompt_tokens;
    view.n_tokens = request->n_prompt_tokens;
    return view;
}

#include "server/api/chat_request.h"

#include "base/error.h"

static sp_status read_kwargs(const json_t *body, sp_chat_request *chat, sp_error *error)
{
    chat->template_kwargs = json_object_get(body, "chat_template_kwargs");
    if (chat->template_kwargs && !json_is_null(chat->template_kwargs) &&
        !json_is_object(chat->template_kwargs))
        return sp_fail(error, SP_ERR_INPUT, NULL, "chat_template_kwargs", -1,
                       "field \"chat_template_kwargs\" is not an object");
    return SP_OK;
}

sp_status sp_chat_request_read(const json_t *body, sp_chat_request *out_chat, sp_error *error)
{
    sp_chat_request *chat = out_chat;
    sp_status status;

    sp_chat_request_default(chat);
    chat->messages = json_object_get(body, "messages");
    chat->tools = json_object_get(body, "tools");
    chat->tool_choice = json_object_get(body, "tool_choice");
    status = sp_json_string(body, "reasoning_effort", false, NULL, &chat->effort, error);
    if (status != SP_OK)
        return status;
    if (!json_is_array(chat->messages) || json_array_size(chat->messages) == 0)
        return sp_fail(error, SP_ERR_INPUT, NULL, "messages", -1,
                       "field \"messages\" must be a list of messages");
    status = sp_json_bool(body, "continue_final_message", false, false, NULL,
                          &chat->continue_final_message, error);
    if (status == SP_OK)
        status = sp_json_bool(body, "add_generation_prompt", false, !chat->continue_final_message,
                              NULL, &chat->add_generation_prompt, error);
    if (status == SP_OK && chat->add_generation_prompt && chat->continue_final_message)
        status = sp_fail(error, SP_ERR_INPUT, NULL, "continue_final_message", -1,
                         "\"add_generation_prompt\" and \"continue_final_message\" exclude each "
                         "other");
    return status == SP_OK ? read_kwargs(body, chat, error) : status;
}

sp_status sp_chat_completion_request_read(json_t *body, const sp_request *defaults,
                                          sp_chat_completion_request *out_request, sp_error *error)
{
    sp_chat_completion_request request = {.body = json_incref(body)};
    sp_status status = sp_body_fields_read(body, SP_FIELDS_CHAT, defaults, &request.fields, error);

    if (status == SP_OK)
        status = sp_chat_request_read(body, &request.chat, error);
    if (status == SP_OK && request.fields.request.max_tokens == 0)
        status =
            sp_fail(error, SP_ERR_INPUT, NULL, "max_tokens", -1, "max_tokens must be at least 1");
    if (status != SP_OK) {
        sp_chat_completion_request_free(&request);
        return status;
    }
    *out_request = request;
    return SP_OK;
}

void sp_chat_completion_request_free(sp_chat_completion_request *request)
{
    sp_body_fields_free(&request->fields);
    json_decref(request->body);
    *request = (sp_chat_completion_request){.body = NULL};
}

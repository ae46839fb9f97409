#include "base/json.h"
#include "base/mapped.h"
#include "cli/cli.h"

#include <stdio.h>
#include <string.h>

typedef struct verb {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} verb;

static const verb verbs[] = {
    {"generate", sp_cli_generate, "one batch of prompts, every one with its own adapter"},
    {"logits", sp_cli_logits, "logits of one token list, to a safetensors file"},
    {"inspect", sp_cli_inspect, "what an adapter holds, and whether it would be taken"},
    {"serve", sp_cli_serve, "an HTTP server: the model's name picks the adapter"},
    {"peer", sp_cli_peer, "serves a directory of adapters to other hosts"},
    {"bench", sp_cli_bench, "measure deltas, steps and loading"},
};

static void print_help(FILE *stream)
{
    fputs("sidepath: many LoRA adapters over one base model\n\n"
          "usage: sidepath VERB [FLAGS]\n\n",
          stream);
    for (size_t i = 0; i < sizeof verbs / sizeof verbs[0]; i++)
        fprintf(stream, "  %-10s %s\n", verbs[i].name, verbs[i].help);
    fputs("\n`sidepath VERB --help` lists the flags and the environment variables of settings.\n",
          stream);
}

int sp_cli_fail(const char *verb_name, const sp_error *error)
{
    if (error->code && error->code[0])
        fprintf(stderr, "sidepath %s: %s [%s]\n", verb_name, error->text, error->code);
    else
        fprintf(stderr, "sidepath %s: %s\n", verb_name, error->text);
    return SP_EXIT_FAILED;
}

int sp_cli_usage(const char *verb_name, const sp_error *error)
{
    sp_cli_fail(verb_name, error);
    return SP_EXIT_USAGE;
}

int sp_cli_wants_help(int argc, char **argv)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            return 1;
    return 0;
}

int main(int argc, char **argv)
{
    sp_mapped_handle_faults(SP_FAULT_ENDS);
    /* Else jansson may drop bytes of a string unseen when memory is short. */
    sp_json_own_memory(true);
    if (argc < 2) {
        print_help(stderr);
        return SP_EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        print_help(stdout);
        return SP_EXIT_DONE;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("sidepath %s\n", sp_library_version_text());
        return SP_EXIT_DONE;
    }
    for (size_t i = 0; i < sizeof verbs / sizeof verbs[0]; i++)
        if (strcmp(argv[1], verbs[i].name) == 0)
            return verbs[i].run(argc - 1, argv + 1);
    fprintf(stderr, "sidepath: no verb \"%s\"; `sidepath --help` lists them\n", argv[1]);
    return SP_EXIT_USAGE;
}

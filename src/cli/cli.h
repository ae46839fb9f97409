/*
 * cli: the verbs. It joins the rooms' settings into one command line and prints what they return.
 * Results go to stdout, everything else to stderr; exit 0 done, 1 refused or failed, 2 usage. It
 * must not compute: no tensors here.
 */
#ifndef SP_CLI_CLI_H
#define SP_CLI_CLI_H

#include <sidepath/status.h>

#define SP_EXIT_DONE   0
#define SP_EXIT_FAILED 1
#define SP_EXIT_USAGE  2

/* Each verb takes its own argv, with argv[0] the verb's name, and returns the exit status. */
int sp_cli_generate(int argc, char **argv);
int sp_cli_logits(int argc, char **argv);
int sp_cli_inspect(int argc, char **argv);
int sp_cli_bench(int argc, char **argv);
int sp_cli_serve(int argc, char **argv);
int sp_cli_peer(int argc, char **argv);

/*
 * Prints "sidepath VERB: text [code]" on stderr and returns the exit status that fits: usage for
 * SP_ERR_ARGUMENT out of the command line (`usage` true), else failed.
 */
int sp_cli_fail(const char *verb, const sp_error *error);
int sp_cli_usage(const char *verb, const sp_error *error);

/* True when --help or -h is among the arguments, before a "--". */
int sp_cli_wants_help(int argc, char **argv);

#endif

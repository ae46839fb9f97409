/*
 * Nothing is fetched, whatever the labels say: the program runs with a system call filter that
 * ends it at the first socket, over adapters whose labels are addresses and names to look up.
 */
#include "support/make_adapter.h"
#include "support/shell.h"
#include "support/test.h"

#include "base/alloc.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MODEL    SP_TEST_FIXTURES "/qwen3-tied"
#define ARGS_MAX 16

#ifndef SECCOMP_RET_KILL_PROCESS
#define SECCOMP_RET_KILL_PROCESS 0x80000000U
#endif

/* From here on the process dies of SIGSYS when it asks for a socket of any kind. */
static int forbid_sockets(void)
{
    struct sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_connect, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog filter = {sizeof program / sizeof *program, program};

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
        return -1;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter);
}

/* Runs the program, or with NULL opens a socket; returns the status of wait. */
static int run_filtered(char *const *arguments)
{
    int status;
    pid_t child = fork();

    assert_true(child >= 0);
    if (child == 0) {
        int null = open("/dev/null", O_WRONLY);

        dup2(null, 1);
        if (forbid_sockets() != 0)
            _exit(77);
        if (!arguments)
            _exit(socket(AF_INET, SOCK_STREAM, 0) < 0);
        execv(SP_TEST_BINARY_DIR "/sidepath", arguments);
        _exit(126);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}

/* The filter works here: else nothing below would mean anything. */
static void skip_unless_filtered(void)
{
    int status = run_filtered(NULL);

    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        skip();
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGSYS);
}

static void expect_exit(char *const *arguments, int exit_code)
{
    int status = run_filtered(arguments);

    if (WIFSIGNALED(status))
        fail_msg("sidepath %s died of signal %d", arguments[1], WTERMSIG(status));
    assert_int_equal(WEXITSTATUS(status), exit_code);
}

/* An adapter of the model above, with these members in its config. */
static char *labelled_adapter(const char *members)
{
    make_adapter *adapter = make_adapter_create();
    char *folder;

    make_adapter_config_with(adapter, members);
    make_adapter_add_pair(adapter, "base_model.model.model.layers.0.self_attn.q_proj", 2, 64, 128,
                          1);
    folder = make_adapter_folder(adapter);
    make_adapter_destroy(adapter);
    return folder;
}

static const char *const labels[] = {
    ", \"base_model_name_or_path\": \"someone/some-model\", \"revision\": \"main\"",
    ", \"base_model_name_or_path\": \"https://example.invalid/model\"",
    ", \"base_model_name_or_path\": null",
    ", \"base_model_name_or_path\": \"\", \"revision\": \"https://example.invalid/\"",
    ", \"auto_mapping\": {\"base_model_class\": \"X\", \"parent_library\": \"http://[::1]/x\"}",
};

static void labels_fetch_nothing(void **state)
{
    (void)state;
    skip_unless_filtered();
    for (size_t i = 0; i < sizeof labels / sizeof *labels; i++) {
        char *folder = labelled_adapter(labels[i]);
        char named[600], out[600];
        char *inspect[] = {"sidepath", "inspect", folder, "--model", MODEL, NULL};
        char *alone[] = {"sidepath", "inspect", folder, NULL};
        char *logits[] = {"sidepath", "logits",   "--model", MODEL,   "--adapter", named, "--use",
                          "a",        "--tokens", "1,2,3",   "--out", out,         NULL};

        snprintf(named, sizeof named, "a=%s", folder);
        snprintf(out, sizeof out, "%s/logits.safetensors", folder);
        expect_exit(inspect, 0);
        expect_exit(alone, 0);
        expect_exit(logits, 0);
        sp_test_remove_tree(folder);
        sp_free(folder);
    }
}

/* A missing adapter, also one that is named as an address, is missing: it is looked for nowhere. */
static void missing_files_are_not_fetched(void **state)
{
    static const char *const places[] = {"someone/some-adapter", "https://example.invalid/a",
                                         "file://localhost/tmp"};

    (void)state;
    skip_unless_filtered();
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char place[64];
        char *adapter[] = {"sidepath", "inspect", place, NULL};
        char *model[] = {"sidepath", "inspect", MODEL "/adapters/r1", "--model", place, NULL};

        snprintf(place, sizeof place, "%s", places[i]);
        expect_exit(adapter, 1);
        expect_exit(model, 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(labels_fetch_nothing),
        cmocka_unit_test(missing_files_are_not_fetched),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

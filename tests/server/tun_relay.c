/*
 * tun_relay.c: a link between this network namespace and that of another process, which holds each
 * packet for a time. A TUN device is its end in each of the two; it carries packets for as long as
 * this program runs.
 *
 *     tun_relay PID NEAR NEAR_ADDRESS FAR FAR_ADDRESS MS
 *
 * NEAR and FAR are the names of the devices, here and where PID is. The addresses are written by
 * `ip`, with their prefix ("10.0.0.1/24"). Prints "ready" when the link is up.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define PACKET_BYTES 2048 /* above the devices' 1500 */
#define PACKETS      4096 /* that are held in a direction; others are lost, as in a router */

typedef struct packet {
    uint64_t due_ns;
    size_t n_bytes;
    char bytes[PACKET_BYTES];
} packet;

/* One direction: a ring of packets. */
typedef struct direction {
    int from, to;
    uint64_t begin, end; /* of the packets that are held; both only grow */
    packet packets[PACKETS];
} direction;

static direction directions[2];

static void die(const char *what)
{
    fprintf(stderr, "tun_relay: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* In the namespace that this process is in now. */
static int open_device(const char *name, const char *address)
{
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    char command[512];
    int fd = open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0)
        die("/dev/net/tun");
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    if (ioctl(fd, TUNSETIFF, &request) < 0)
        die(name);
    snprintf(command, sizeof command, "ip address add '%s' dev '%s' && ip link set '%s' up",
             address, name, name);
    if (system(command) != 0)
        die(command);
    return fd;
}

static int open_namespace(const char *process)
{
    char path[64];
    int fd;

    snprintf(path, sizeof path, "/proc/%s/ns/net", process);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        die(path);
    return fd;
}

static void take(direction *d, uint64_t hold_ns)
{
    char lost[PACKET_BYTES];

    for (;;) {
        packet *p = &d->packets[d->end % PACKETS];
        int is_full = d->end - d->begin == PACKETS;
        ssize_t n = read(d->from, is_full ? lost : p->bytes, PACKET_BYTES);

        if (n <= 0)
            return;
        if (is_full)
            continue;
        p->n_bytes = (size_t)n;
        p->due_ns = now_ns() + hold_ns;
        d->end++;
    }
}

/* Returns when the next packet is due; 0: none is held. */
static uint64_t pass_on(direction *d)
{
    while (d->begin < d->end) {
        packet *p = &d->packets[d->begin % PACKETS];

        if (p->due_ns > now_ns())
            return p->due_ns;
        if (write(d->to, p->bytes, p->n_bytes) < 0 && errno != EAGAIN && errno != EIO)
            die("a packet");
        d->begin++;
    }
    return 0;
}

static void wait_for_packets(uint64_t due_ns)
{
    struct pollfd fds[] = {{.fd = directions[0].from, .events = POLLIN},
                           {.fd = directions[1].from, .events = POLLIN}};
    uint64_t now = now_ns(), left = due_ns > now ? due_ns - now : 0;
    struct timespec timeout = {(time_t)(left / 1000000000), (long)(left % 1000000000)};

    (void)ppoll(fds, 2, due_ns ? &timeout : NULL, NULL);
}

int main(int argc, char **argv)
{
    uint64_t hold_ns;
    int far;

    if (argc != 7) {
        fprintf(stderr, "usage: %s PID NEAR NEAR_ADDRESS FAR FAR_ADDRESS MS\n", argv[0]);
        return 2;
    }
    hold_ns = strtoull(argv[6], NULL, 10) * 1000000;
    far = open_namespace(argv[1]);
    directions[0].from = directions[1].to = open_device(argv[2], argv[3]);
    if (setns(far, CLONE_NEWNET) != 0)
        die("the other namespace");
    directions[0].to = directions[1].from = open_device(argv[4], argv[5]);
    puts("ready");
    fflush(stdout);
    for (;;) {
        uint64_t due_ns[2];

        for (int i = 0; i < 2; i++) {
            take(&directions[i], hold_ns);
            due_ns[i] = pass_on(&directions[i]);
        }
        wait_for_packets(!due_ns[0] || (due_ns[1] && due_ns[1] < due_ns[0]) ? due_ns[1]
                                                                            : due_ns[0]);
    }
}

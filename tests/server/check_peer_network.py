#!/usr/bin/env python3
"""A server and its peer in two network namespaces, and what networks do between them: packets that
are lost (nftables), a rate (tbf), a delay (tun_relay), a link that goes down and comes up; a peer
that is stopped or killed in the middle of a transfer, a client that is gone without a word.

Each time the version that was loaded serves on, the load ends with an error by name within its
deadline, a retry brings the new version, and nothing stays open.
    check_peer_network.py SIDEPATH TUN_RELAY [CHECK...]
Skipped by name where namespaces are not permitted, or a tool is missing."""

import contextlib
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import serving
from check_peers import (NAMES, SKIPPED, Peer, complete, has_transport, names, text_of,
                         texts_from_disk)
from serving import post, run_checks, until

SYSFS = "mount -t sysfs sysfs /sys"  # UCX finds the devices of a namespace there
INSIDE = "SIDEPATH_TEST_NAMESPACE"
TOOLS = ("unshare", "nsenter", "ip", "tc", "nft")
NEAR, FAR = "10.77.0.1", "10.77.0.2"             # over veth
NEAR_RELAY, FAR_RELAY = "10.78.0.1", "10.78.0.2"  # over the relay
TIMEOUT_SECONDS = 2
SLOW_SECONDS = 8  # beyond a deadline, on a busy machine
HALF = 400000     # bytes of the new version that have arrived when it is interrupted


def enter_namespace():
    """Runs this script in a network namespace of its own; says why not where it cannot."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        print("skipped: not installed: " + " ".join(missing))
        sys.exit(SKIPPED)
    command = ["unshare", "--net", "--mount"]
    if os.geteuid() != 0:
        command += ["--user", "--map-root-user"]
    probe = SYSFS + " && nft list tables && ip link add name one type veth peer name two"
    done = subprocess.run([*command, "sh", "-c", probe], capture_output=True, text=True,
                          check=False)
    if done.returncode != 0:
        print("skipped: no network namespaces here: " + done.stderr.strip())
        sys.exit(SKIPPED)
    os.environ[INSIDE] = "1"
    command += ["sh", "-c", SYSFS + ' && exec "$@"', "sh", sys.executable, "-B", *sys.argv]
    os.execvp(command[0], command)


def run(*command):
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


class Network:
    """Another namespace, and a link to it. `far` is what a command there begins with."""

    def __init__(self):
        self.host = subprocess.Popen(["unshare", "--net", "--mount", "sh", "-c", SYSFS +
                                      " && echo ready && exec sleep infinity"],
                                     stdout=subprocess.PIPE)
        self.far = ["nsenter", "--net=/proc/%d/ns/net" % self.host.pid,
                    "--mount=/proc/%d/ns/mnt" % self.host.pid]
        try:
            self.connect()
        except BaseException:
            self.__exit__()
            raise

    def connect(self):
        assert self.host.stdout.readline() == b"ready\n"
        run("ip", "link", "set", "lo", "up")
        run(*self.far, "ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "name", "near", "type", "veth", "peer", "name", "far")
        run("ip", "link", "set", "far", "netns", self.host.pid)
        run("ip", "address", "add", NEAR + "/24", "dev", "near")
        run("ip", "link", "set", "near", "gso_max_segs", "1", "up")
        run(*self.far, "ip", "address", "add", FAR + "/24", "dev", "far")
        run(*self.far, "ip", "link", "set", "far", "gso_max_segs", "1", "up")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.host.kill()
        self.host.wait()
        subprocess.run(["nft", "flush", "ruleset"], check=False)
        subprocess.run(["ip", "link", "delete", "near"], check=False, stderr=subprocess.DEVNULL)

    def lose(self, percent):
        """Of the packets in both directions."""
        rules = ["add table inet loss"]
        for hook, side in (("input", "iifname"), ("output", "oifname")):
            some = "numgen random mod 100 < %d" % percent if percent < 100 else ""
            rules += ["add chain inet loss %s { type filter hook %s priority 0; }" % (hook, hook),
                      "add rule inet loss %s %s near %s counter drop" % (hook, side, some)]
        run("nft", "; ".join(rules))

    def lose_nothing(self):
        """Returns how many packets were lost."""
        listed = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True,
                                check=True).stdout
        run("nft", "flush", "ruleset")
        return sum(map(int, re.findall(r"counter packets (\d+)", listed)))

    def limit(self, megabits):
        """What the peer sends; None: no limit."""
        run(*self.far, "tc", "qdisc", "del", "dev", "far", "root") if megabits is None else \
            run(*self.far, "tc", "qdisc", "replace", "dev", "far", "root", "tbf", "rate",
                "%dmbit" % megabits, "burst", "64kb", "latency", "300ms")

    def link(self, state):
        run("ip", "link", "set", "near", state)

    @staticmethod
    def received():
        """Bytes so far."""
        return int(Path("/sys/class/net/near/statistics/rx_bytes").read_text())


def open_files(process):
    return len(os.listdir("/proc/%d/fd" % process.pid))


class Scene:
    """A peer far away that offers one name, whose folder changes, and a server that has it."""

    def __init__(self, binary, network, host, folder):
        self.binary, self.network, self.host = binary, network, host
        self.folder = Path(folder)
        self.wanted = texts_from_disk(binary)
        self.version = "scripture"
        shutil.copytree(serving.ADAPTERS / self.version, self.folder / "house")
        self.peer = self.start(0)
        self.server = None

    def start(self, port):
        return Peer(self.binary, self.folder, "--host", self.host, "--idle-seconds", 1,
                    port=port, prefix=self.network.far)

    def load(self):
        return post(self.server, "/v1/load_lora_adapter",
                    {"lora_name": "house", "load_inplace": True})

    def serves(self, version):
        return text_of(self.server, "house") == self.wanted[version]

    def begin(self, server):
        self.server = server
        until(lambda: "house" in names(server), what="the peer's names")
        assert self.serves(self.version)
        self.files = open_files(server.process)

    def change(self):
        """Other bytes under the name; returns once the peer offers them."""
        offered = counted(self.peer, "is offered")
        self.version = "csource" if self.version == "scripture" else "scripture"
        shutil.copytree(serving.ADAPTERS / self.version, self.folder / ".new")
        os.rename(self.folder / "house", self.folder / ".old")
        os.rename(self.folder / ".new", self.folder / "house")
        shutil.rmtree(self.folder / ".old")
        until(lambda: counted(self.peer, "is offered") > offered, what="the new offer")

    def fail(self, trouble, expected, half=False):
        """A load that must end with one of the errors while the old version serves; `half`: the
        trouble comes when a part of the bytes is here."""
        before = "scripture" if self.version == "csource" else "csource"
        answers = []

        def ask():
            answers.append((self.load(), time.monotonic()))

        if not half:
            trouble()
        began, received = time.monotonic(), self.network.received()
        loading = threading.Thread(target=ask)
        loading.start()
        if half:
            until(lambda: self.network.received() > received + HALF, what="half of the bytes")
            assert not answers, "the transfer ended before it could be interrupted"
            trouble()
        assert self.serves(before)
        loading.join()
        answer, ended = answers[0]
        assert (answer.status, answer.code) in expected, (answer.status, answer.bytes)
        assert ended - began < TIMEOUT_SECONDS + SLOW_SECONDS, ended - began
        assert self.serves(before)
        print("    %s after %.1f s" % (answer.code, ended - began), flush=True)

    def recover(self):
        until(lambda: self.load().status == 200, seconds=60, what="a retry that succeeds")
        assert self.serves(self.version)
        # Connections that are not used are closed by the peer, and by the server at its next list.
        until(lambda: open_files(self.server.process) <= self.files, what="closed connections")


@contextlib.contextmanager
def scene(binary, timeout=TIMEOUT_SECONDS, host=FAR, network=None):
    with contextlib.ExitStack() as stack:
        network = network or stack.enter_context(Network())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        made = Scene(binary, network, host, folder)
        stack.callback(lambda: made.peer.__exit__())
        server = stack.enter_context(serving.serving(binary, "--peer", made.peer.address,
                                                     "--peer-timeout", timeout,
                                                     "--max-lora-rank", 32))
        made.begin(server)
        yield made


LATE = {(504, "peer-timeout")}
LOST = {(502, "peer-lost"), (502, "peer-unreachable")}


def check_network_link_down(binary):
    """Before a load, and in the middle of one."""
    with scene(binary) as one:
        one.change()
        one.fail(lambda: one.network.link("down"), LATE | LOST)
        one.network.link("up")
        one.recover()
        one.network.limit(4)
        one.change()
        one.fail(lambda: one.network.link("down"), LATE, half=True)
        one.network.link("up")
        one.network.limit(None)
        one.recover()


def check_network_comes_up_later(binary):
    """A server that starts without a way to its peer has its adapters once there is one."""
    with Network() as network, Peer(binary, serving.ADAPTERS, "--host", FAR,
                                    prefix=network.far) as peer:
        network.link("down")
        with serving.serving(binary, "--peer", peer.address, "--max-lora-rank", 32) as server:
            until(lambda: any("gives no list" in line for line in server.log), what="a warning")
            network.link("up")
            until(lambda: NAMES <= set(names(server)), what="the peer's names")
            assert complete(server, "csource").status == 200


def check_network_loss(binary):
    """A part of the packets: slower, and the same bytes. All of them: the deadline."""
    with scene(binary, timeout=2 * TIMEOUT_SECONDS) as one:
        for percent in (1, 5):
            one.network.lose(percent)
            one.change()
            began = time.monotonic()
            one.recover()
            lost = one.network.lose_nothing()
            print("    %d %%, %d packets lost: %.1f s" % (percent, lost, time.monotonic() - began))
            assert lost > 0
        one.change()
        one.fail(lambda: one.network.lose(100), LATE)
        one.network.lose_nothing()
        one.recover()


def check_network_rate(binary):
    """1.4 MB at a rate that takes longer than the deadline, and at one that does not."""
    with scene(binary) as one:
        one.change()
        one.fail(lambda: one.network.limit(2), LATE)
        one.network.limit(20)
        one.recover()


def check_network_delay(binary):
    """Over the second of two networks: packets that take 40 ms each way, and then do not come."""
    with Network() as network:
        relay = subprocess.Popen([RELAY, str(network.host.pid), "slow0", NEAR_RELAY + "/24",
                                  "slow1", FAR_RELAY + "/24", "40"], stdout=subprocess.PIPE)
        try:
            assert relay.stdout.readline() == b"ready\n"
            with scene(binary, host=FAR_RELAY, network=network) as one:
                one.change()
                began = time.monotonic()
                one.recover()
                print("    80 ms there and back: %.1f s" % (time.monotonic() - began))
                one.change()
                one.fail(lambda: relay.send_signal(signal.SIGSTOP), LATE)
                relay.send_signal(signal.SIGCONT)
                one.recover()
        finally:
            relay.kill()
            relay.wait()


def check_network_peer_stops(binary):
    """Three times, so that what one time leaves open would be seen."""
    with scene(binary) as one:
        for _ in range(3):
            one.network.limit(4)
            one.change()
            one.fail(lambda: one.peer.process.send_signal(signal.SIGSTOP), LATE, half=True)
            one.peer.process.send_signal(signal.SIGCONT)
            one.network.limit(None)
            one.recover()


def check_network_peer_dies(binary):
    """And starts again on its port."""
    with scene(binary) as one:
        for _ in range(3):
            one.network.limit(4)
            one.change()
            one.fail(one.peer.stop, LOST, half=True)
            one.network.limit(None)
            one.peer = one.start(one.peer.port)
            one.recover()


def load_until_it_breaks(server):
    with contextlib.suppress(OSError, http.client.HTTPException):
        post(server, "/v1/load_lora_adapter", {"lora_name": "csource"})


def check_network_client_vanishes(binary):
    """The link goes down, and the server dies with a transfer under way: the peer hears nothing of
    either, closes that client itself, and serves the next."""
    with Network() as network, tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics"
        with Peer(binary, serving.ADAPTERS, "--host", FAR, "--idle-seconds", 3, "--metrics-file",
                  metrics, prefix=network.far) as peer:
            flags = ("--peer", peer.address, "--max-lora-rank", 32)
            server = serving.Server(binary, *flags)
            until(lambda: NAMES <= set(names(server)), what="the peer's names")
            network.limit(4)
            received = network.received()
            loading = threading.Thread(target=load_until_it_breaks, args=(server,))
            loading.start()
            until(lambda: network.received() > received + HALF, what="half of the bytes")
            assert not any("fetched" in line for line in peer.log)
            network.link("down")
            began = time.monotonic()
            server.stop(signal.SIGKILL)
            loading.join()
            until(lambda: counted(peer, "has gone") == counted(peer, "has connected"), seconds=60,
                  what="the end of its connections")
            print("    gone after %.1f s: %s" % (time.monotonic() - began, peer.log[-1]))
            time.sleep(6)  # the file is written every five seconds
            assert "sidepath_peer_pinned_bytes 0\n" in metrics.read_text()
            network.link("up")
            network.limit(None)
            with serving.serving(binary, *flags) as again:
                until(lambda: NAMES <= set(names(again)), what="the peer's names")
                assert complete(again, "csource").status == 200


def counted(peer, words):
    return sum(words in line for line in peer.log)


CHECKS = (check_network_link_down, check_network_comes_up_later, check_network_loss,
          check_network_rate, check_network_delay, check_network_peer_stops,
          check_network_peer_dies, check_network_client_vanishes)

if __name__ == "__main__":
    sys.argv[1:3] = map(os.path.abspath, sys.argv[1:3])
    if not has_transport(sys.argv[1]):
        print("skipped: this build has no UCX")
        sys.exit(SKIPPED)
    if INSIDE not in os.environ:
        enter_namespace()
    RELAY = sys.argv[2]
    run_checks([c for c in CHECKS if len(sys.argv) < 4 or c.__name__ in sys.argv[3:]], sys.argv[1])

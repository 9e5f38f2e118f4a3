//go:build testbed || outlive

package testbed_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/testbed"
)

// TestNodesAreSeparate: what two machines do not share, two nodes do not.
func TestNodesAreSeparate(t *testing.T) {
	ctx, bed := newBed(t, testbed.Options{})
	nodes := start(ctx, t, bed, "a", "b")
	a, b := nodes[0], nodes[1]

	for _, n := range nodes {
		if got := output(ctx, t, n, "uname -n"); got != n.Name()+"\n" {
			t.Errorf("the host name of %s is %q", n.Name(), got)
		}
		if got := output(ctx, t, n, "cat /proc/1/comm"); !strings.HasPrefix(got, "exe") && !strings.Contains(got, "testbed") {
			t.Errorf("pid 1 of %s is %q", n.Name(), got)
		}
		if got, _ := read(t, n, "/etc/hosts"); !strings.Contains(got, a.Addr().String()+" a\n") || !strings.Contains(got, b.Addr().String()+" b\n") {
			t.Errorf("/etc/hosts of %s is %q", n.Name(), got)
		}
	}
	if x, y := output(ctx, t, a, "cat /proc/sys/kernel/random/boot_id"), output(ctx, t, b, "cat /proc/sys/kernel/random/boot_id"); x == y {
		t.Errorf("two nodes have the boot ID %s", x)
	}
	host := t.TempDir() + "/of-the-host"
	if err := os.WriteFile(host, []byte("host"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"/dev/shm/x", "/tmp/testbed-x", "/run/x", "/srv/x", host} {
		output(ctx, t, a, "echo a >"+name)
		if got, err := read(t, a, name); got != "a\n" {
			t.Errorf("%s on a: %q, %v", name, got, err)
		}
		if got, _ := read(t, b, name); got == "a\n" {
			t.Errorf("%s of a is on b", name)
		}
		if got, _ := os.ReadFile(name); string(got) == "a\n" {
			t.Errorf("%s of a is on the host", name)
		}
	}
}

// TestShm: /dev/shm has the size of the configuration.
func TestShm(t *testing.T) {
	ctx, bed := newBed(t, testbed.Options{})
	n, err := bed.Start(ctx, testbed.Config{Name: "small", Shm: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	out, err := n.Command(ctx, "/bin/sh", "-c", "head -c 2000000 /dev/zero >/dev/shm/big").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "No space left") {
		t.Errorf("2 MB in a /dev/shm of 1 MiB: %v %s", err, out)
	}
}

// TestCommand: a command on a node is an exec.Cmd.
func TestCommand(t *testing.T) {
	ctx, bed := newBed(t, testbed.Options{})
	n, err := bed.Start(ctx, testbed.Config{Name: "a", Env: []string{"COLOR=blue"}})
	if err != nil {
		t.Fatal(err)
	}
	c := n.Command(ctx, "/bin/sh", "-c", "pwd; echo $COLOR $SIZE; cat; echo oops >&2; exit 7")
	c.Dir, c.Env, c.Stdin = "/srv", append(c.Env, "SIZE=big"), strings.NewReader("input\n")
	out, err := c.Output()
	var exit *exec.ExitError
	if string(out) != "/srv\nblue big\ninput\n" || !errors.As(err, &exit) || exit.ExitCode() != 7 || string(exit.Stderr) != "oops\n" {
		t.Errorf("output %q, error %v %+v", out, err, exit)
	}
}

// TestPowerOff: no process of a node survives a power off, and the node can be powered
// on again with its address and without its memory.
func TestPowerOff(t *testing.T) {
	ctx, bed := newBed(t, testbed.Options{})
	nodes := start(ctx, t, bed, "a", "b")
	a := nodes[0]
	output(ctx, t, a, "echo x >/dev/shm/x")
	c := a.Command(ctx, "/bin/sh", "-c", "(setsid sleep 1000 &) ; trap '' TERM INT; sleep 1000")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	before := output(ctx, t, a, "cat /proc/sys/kernel/random/boot_id")
	eventually(t, "the sleeping processes", func() bool { return comms(t, a)["sleep"] == 2 })
	old, err := a.Processes()
	if err != nil {
		t.Fatal(err)
	}
	if err := a.PowerOff(); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err == nil {
		t.Error("a command ended well on a node without power")
	}
	for _, p := range old {
		if _, err := os.Stat("/proc/" + itoa(p.PID)); err == nil {
			t.Errorf("process %d, %s, has survived", p.PID, p.Comm)
		}
	}
	if err := a.Command(ctx, "/bin/true").Run(); !errors.Is(err, testbed.ErrOff) {
		t.Errorf("a command on a node without power: %v", err)
	}
	if err := a.PowerOn(ctx); err != nil {
		t.Fatal(err)
	}
	if after := output(ctx, t, a, "cat /proc/sys/kernel/random/boot_id"); after == before {
		t.Error("the boot ID is that of the last boot")
	}
	if got, err := read(t, a, "/dev/shm/x"); err == nil {
		t.Errorf("/dev/shm has survived: %q", got)
	}
	connect(ctx, t, nodes[1], a)
}

// abandoned is set for a process of this program that waits to be killed.
const abandoned = "TESTBED_ABANDONED"

// abandon starts a frozen node, prints the ID of its process and waits.
func abandon() {
	ctx := context.Background()
	bed, err := testbed.New(testbed.Options{})
	check(err)
	n, err := bed.Start(ctx, testbed.Config{Name: "a"})
	check(err)
	check(n.Command(ctx, "/bin/sleep", "1000").Start())
	check(n.Freeze())
	all, err := n.Processes()
	check(err)
	for _, p := range all {
		if p.NodePID != 1 {
			fmt.Println(p.PID)
		}
	}
	select {}
}

// TestKilledTest: no process of a node survives the process that started the node, not
// even a frozen one.
func TestKilledTest(t *testing.T) {
	newBed(t, testbed.Options{}) // or why not
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), abandoned+"=1", "TMPDIR="+t.TempDir())
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Errorf("the output is %q, %v", line, err)
	}
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait()
	// pid 1 of the node ends after its last process was waited for, by the host's init.
	pid := strings.TrimSpace(line)
	eventually(t, "the end of process "+pid, func() bool {
		status, err := os.ReadFile("/proc/" + pid + "/status")
		return err != nil || strings.Contains(string(status), "State:\tZ")
	})
}

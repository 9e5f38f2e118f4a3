//go:build testbed || outlive

package netfs_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// TestBreak: requests of one node return an error, those of the other do not.
func TestBreak(t *testing.T) {
	nodes := share(t, netfs.Options{}, netfs.Options{})
	a, b := nodes[0], nodes[1]
	a.write("f", "text")
	a.Disk(at).Break(netfs.Fault{Ops: []netfs.Op{netfs.OpOpen}, Err: unix.EIO})
	if _, err := os.ReadFile(a.path("f")); !errors.Is(err, unix.EIO) {
		t.Errorf("an open on the broken disk: %v", err)
	}
	if !a.exists("f") {
		t.Error("a does not find the file")
	}
	if got := b.content("f"); got != "text" {
		t.Errorf("b reads %q", got)
	}
	a.Disk(at).Heal()
	if got := a.content("f"); got != "text" {
		t.Errorf("the healed disk has %q", got)
	}
}

// TestFull: a disk takes as many bytes as it has room for. With WriteBack the close
// returns the error.
func TestFull(t *testing.T) {
	for name, writeBack := range map[string]bool{"write": false, "close": true} {
		t.Run(name, func(t *testing.T) {
			nodes := share(t, netfs.Options{WriteBack: writeBack}, netfs.Options{})
			a, b := nodes[0], nodes[1]
			a.Disk(at).Break(netfs.Full(1000))
			f := a.open("f", os.O_CREATE|os.O_WRONLY)
			_, written := f.WriteString(strings.Repeat("x", 3000))
			closed := f.Close()
			if errors.Is(written, unix.ENOSPC) == writeBack || errors.Is(closed, unix.ENOSPC) != writeBack {
				t.Errorf("write: %v, close: %v", written, closed)
			}
			if got := b.content("f"); len(got) != 1000 {
				t.Errorf("the disk has %d bytes", len(got))
			}
			if n := a.Disk(at).Counters().BytesWritten; n != 1000 {
				t.Errorf("%d bytes are counted", n)
			}
			a.Disk(at).Break(netfs.Full(0))
			if err := os.WriteFile(a.path("g"), []byte("x"), 0o644); !errors.Is(err, unix.ENOSPC) {
				t.Errorf("a disk without room: %v", err)
			}
		})
	}
}

// TestHang: a process that waits for a silent disk ends when it is killed, when the
// disk is healed, or when its node loses power.
func TestHang(t *testing.T) {
	nodes := share(t, netfs.Options{}, netfs.Options{})
	a, b := nodes[0], nodes[1]
	a.write("f", "text")
	ctx := t.Context()
	disk := a.Disk(at)
	disk.Break(netfs.Fault{Hang: true})
	hanging := func(n int) func() bool { return func() bool { return disk.Counters().Hanging == n } }

	victim := a.Command(ctx, "/bin/cat", at+"/f")
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a request that hangs", hanging(1))
	// A signal that is not SIGKILL does not end the wait.
	if err := victim.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if got := b.content("f"); got != "text" {
		t.Errorf("b reads %q while the disk of a is silent", got)
	}
	if disk.Counters().Hanging != 1 {
		t.Error("SIGTERM ended a request")
	}
	if err := victim.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = victim.Wait()
	eventually(t, "the end of the request", hanging(0))

	patient := a.Command(ctx, "/bin/cat", at+"/f")
	var out strings.Builder
	patient.Stdout = &out
	if err := patient.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a request that hangs", hanging(1))
	disk.Heal()
	if err := patient.Wait(); err != nil || out.String() != "text" {
		t.Errorf("after the disk was healed: %q, %v", out.String(), err)
	}

	disk.Break(netfs.Fault{Hang: true})
	lost := a.Command(ctx, "/bin/cat", at+"/f")
	if err := lost.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a request that hangs", hanging(1))
	if err := a.PowerOff(); err != nil {
		t.Fatal(err)
	}
}

// TestDescriptors: a command inherits none of the descriptors that nodes are made of. It
// could keep a mount or an interface of another node alive.
func TestDescriptors(t *testing.T) {
	nodes := share(t, netfs.Options{}, netfs.Options{})
	out, err := nodes[0].Command(t.Context(), "/bin/ls", "-l", "/proc/self/fd").Output()
	if err != nil || strings.Contains(string(out), "fuse") || strings.Contains(string(out), "tun") || strings.Contains(string(out), "netfs") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestPowerOffLosesWrites: what was not written back is lost with its node.
func TestPowerOffLosesWrites(t *testing.T) {
	nodes := share(t, netfs.NFS(), netfs.NFS())
	a, b := nodes[0], nodes[1]
	// A shell that redirects one command only would close a descriptor after it.
	c := a.Command(t.Context(), "/bin/sh", "-c", "echo closed >"+at+"/f; exec >"+at+"/g; echo open; exec sleep 1000")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the write", func() bool { return a.exists("g") && a.content("g") == "open\n" })
	if err := a.PowerOff(); err != nil {
		t.Fatal(err)
	}
	if f, g := b.content("f"), b.content("g"); f != "closed\n" || g != "" {
		t.Errorf("after the power off, the closed file has %q and the open one %q", f, g)
	}
	if err := a.PowerOn(t.Context()); err != nil {
		t.Fatal(err)
	}
	if f := a.content("f"); f != "closed\n" {
		t.Errorf("after the power on, the file has %q", f)
	}
}

// TestCounters: only what the server transfers is counted.
func TestCounters(t *testing.T) {
	nodes := share(t, netfs.NFS(), netfs.NFS())
	a, b := nodes[0], nodes[1]
	a.write("f", strings.Repeat("x", 100_000))
	if n := a.Disk(at).Counters(); n.BytesWritten != 100_000 || n.Ops[netfs.OpWrite] != 1 || n.Ops[netfs.OpCreate] != 1 {
		t.Errorf("a: %+v", n)
	}
	for range 3 {
		b.content("f")
	}
	if n := b.Disk(at).Counters(); n.BytesRead != 100_000 || n.Ops[netfs.OpOpen] != 3 || n.BytesWritten != 0 {
		t.Errorf("b, which has the data in its cache: %+v", n)
	}
}

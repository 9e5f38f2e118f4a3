package logpeers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// diskEnv names the mount point of the process that has a disk of its own.
const diskEnv = "CKPTSTORE_TEST_DISK"

// fillable is a disk that a test fills up, and makes room on again.
type fillable struct {
	fill, clear func() error
}

// The disk of one copy is full. Its server stops, and the log continues with the other two.
// When there is room, the copy is served again and catches up: it is then needed for a majority.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	withDisk(t, func(dir string) fillable {
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=192m"); err != nil {
			t.Fatal(err)
		}
		zeros := filepath.Join(dir, "zeros")
		return fillable{func() error { return fillDisk(zeros) }, func() error { return os.Remove(zeros) }}
	})
}

// The quota of one copy's user is used up, while its disk reports room. The same happens as on a
// full disk.
func TestQuotaUsedUp(t *testing.T) {
	t.Parallel()
	withDisk(t, func(dir string) fillable {
		server, err := netfs.NewServer(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		client, err := server.Mount(dir, netfs.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := errors.Join(client.Unmount(), server.Close()); err != nil {
				t.Error(err)
			}
		})
		fill := func() error {
			client.Break(netfs.Fault{Ops: []netfs.Op{netfs.OpWrite, netfs.OpAllocate}, Err: unix.EDQUOT})
			return nil
		}
		return fillable{fill, func() error { client.Heal(); return nil }}
	})
}

// The server of the leader also writes what the disk of another copy refuses. Only the copy whose disk
// it is stops.
func TestQuotaOfAnotherCopy(t *testing.T) {
	t.Parallel()
	for dir, want := range map[string]int{"/s/log.2": 1, "/s/log.1": 0, "/s/log": 0} {
		l := serverLog{to: slog.New(slog.DiscardHandler), quota: make(chan struct{}, 1), dir: dir}
		l.Warnf("Stream assignment for 'ckpt > CKPT' rejected by assigned member: write /s/log.2/jetstream/meta.sum.tmp: %v (10049)", unix.EDQUOT)
		if got := len(l.quota); got != want {
			t.Errorf("%s: %d stops, want %d", dir, got, want)
		}
	}
}

// withDisk fills the disk of one copy, in a process that can mount it, and makes room again.
func withDisk(t *testing.T, mount func(dir string) fillable) {
	t.Helper()
	disk := os.Getenv(diskEnv)
	if disk == "" {
		cmd := exec.CommandContext(t.Context(), "unshare", "-rm", os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), diskEnv+"="+t.TempDir())
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		t.Logf("%s", out)
		return
	}
	full := mount(disk)
	j := &joined{t: t, store: t.TempDir(), log: slog.NewTextHandler(t.Output(), nil)}
	j.on[2] = filepath.Join(disk, "copy")
	l := j.form()
	want := []string{"created"}
	add := func(size int) error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		f, err := events.NewFact(stamp(fmt.Sprint("event-", len(want))), events.Scope{Run: "run", Trial: "main", Actor: events.Rank(0)},
			events.WriteFailed{Attempt: 1, Checkpoint: "x", Rank: 1, Error: string(slices.Repeat([]byte("x"), size))})
		if err != nil {
			return err
		}
		if _, err := l.Append(ctx, f); err != nil {
			return err
		}
		want = append(want, f.ID)
		return nil
	}
	// Within seconds of a stream's creation, the leader deletes it if a member cannot create its part.
	await(t, "the copy has the log", func() bool { return j.peers[2].settled() })
	if err := full.fill(); err != nil {
		t.Fatal(err)
	}
	await(t, "the copy on the full disk stops", func() bool {
		if err := add(16 << 10); err != nil {
			t.Fatal(err)
		}
		return !j.peers[2].server().JetStreamEnabled()
	})
	if err := full.clear(); err != nil {
		t.Fatal(err)
	}
	await(t, "the copy has caught up", func() bool { return j.peers[2].settled() })
	j.peers[0].Close()
	if err := add(1); err != nil {
		t.Fatal(err)
	}
	if got := ids(t, l); !slices.Equal(got, want) {
		t.Errorf("%d events, want %d", len(got), len(want))
	}
}

// The server of a copy has stopped, as on a full disk, and the files of the copy are gone. The
// empty directory is not served: it would vote without what the copy has acknowledged.
func TestEmptiedCopyStaysLost(t *testing.T) {
	t.Parallel()
	var output output
	j := &joined{t: t, store: t.TempDir(), log: slog.NewTextHandler(&output, nil)}
	j.form()
	p := j.peers[2]
	// The server still writes there, and the peer looks as soon as the server has stopped.
	if err := os.Rename(filepath.Join(p.held.dir, "jetstream"), filepath.Join(j.store, "gone")); err != nil {
		t.Fatal(err)
	}
	if err := p.server().ShutdownJetStream(); err != nil {
		t.Fatal(err)
	}
	await(t, "the peer looks at its copy", func() bool { return strings.Contains(output.String(), "not served again") })
	if p.server().JetStreamEnabled() || !strings.Contains(output.String(), ErrCopyLost.Error()) {
		t.Errorf("the empty copy is served:\n%s", output.String())
	}
}

// output is the text of a log.
type output struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write implements [io.Writer].
func (s *output) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *output) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// fillDisk writes a file until its disk is full.
func fillDisk(path string) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for {
		if _, err := f.Write(make([]byte, 4096)); errors.Is(err, unix.ENOSPC) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

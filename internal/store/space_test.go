package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store/space"
	"golang.org/x/sys/unix"
)

// TestFullDisk fills a real disk, which a user may mount in a name space of
// their own: see fillDisk.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "unshare", "-rm", "/proc/self/exe")
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Args[2] = exe
	cmd.Env = append(os.Environ(), roleEnv+"=disk", "CKPTSTORE_TEST_DIR="+dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}

// fillDisk runs as another process, with a disk of its own, and fills it. Facts are refused with
// their kind, decisions pass as long as the ballast has room for them, and every acknowledged
// event is in the log afterwards, once.
func fillDisk(ctx context.Context) (err error) {
	disk := os.Getenv("CKPTSTORE_TEST_DIR")
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=256m"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Unmount(disk, unix.MNT_DETACH)) }()
	dir, fill := filepath.Join(disk, "store"), filepath.Join(disk, "zeros")
	if _, err := Init(ctx, dir, ""); err != nil {
		return err
	}
	s, err := Open(ctx, Options{Location: dir, Logger: slog.New(slog.NewTextHandler(os.Stdout, nil))})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	other, err := Open(ctx, Options{Location: dir})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, other.Close()) }()
	for path := filepath.Join(dir, space.BallastName); !exists(path); {
		if !sleep(ctx, time.Millisecond) {
			return ctx.Err()
		}
	}
	var acked []string
	n := 0
	say := func(log *jetlog.Log, size int) error {
		n++
		f, err := events.NewFact(Stamp("test"), events.Scope{Run: "run", Trial: trialName, Actor: events.Node(0)},
			events.WriteFailed{Attempt: 1, Checkpoint: "x", Rank: n, Error: strings.Repeat("x", size)})
		if err != nil {
			return err
		}
		within, cancel := context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		if _, err = log.Append(within, f); err == nil {
			acked = append(acked, f.ID)
		}
		return err
	}
	decided := func() error {
		n++
		r, err := decide(ctx, s, "run", begun(fmt.Sprint("step-", n)))
		if err == nil {
			acked = append(acked, r.ID)
		}
		return err
	}
	if err := errors.Join(say(s.Log, 10), decided()); err != nil {
		return fmt.Errorf("with room: %w", err)
	}

	// 90 %: facts are refused with their kind.
	if err := fillTo(fill, disk, 20<<20); err != nil {
		return err
	}
	s.space.Forget()
	err = say(s.Log, 10)
	if full := (*space.NoSpaceError)(nil); !errors.As(err, &full) || !strings.Contains(err.Error(), "append write.failed") {
		return fmt.Errorf("a fact on a disk that is 92 %% full: %w", err)
	}
	if err := decided(); err != nil {
		return fmt.Errorf("a decision on a disk that is 92 %% full: %w", err)
	}

	// To the last byte: the ballast makes room for decisions.
	if err := fillTo(fill, disk, 0); err != nil {
		return err
	}
	s.space.Forget()
	for range 20 {
		if err := decided(); err != nil {
			return fmt.Errorf("a decision on a full disk: %w", err)
		}
	}
	if exists(filepath.Join(dir, space.BallastName)) {
		return errors.New("the ballast is still there")
	}

	// And beyond the gate, until the log itself cannot be written.
	log, err := jetlog.Connect(ctx, jetlog.Options{Dial: s.owner.dialLog})
	if err != nil {
		return err
	}
	defer log.Close()
	if _, _, err := log.Open(ctx); err != nil {
		return err
	}
	before, end := len(acked), time.Now().Add(limit)
	var st unix.Statfs_t
	for err == nil || s.Owns() || other.Owns() || st.Bavail*uint64(st.Bsize) >= space.ToOwn { //nolint:gosec // a size
		if time.Now().After(end) {
			return fmt.Errorf("the log is still written, or owned, with %d blocks free: %w", st.Bavail, err)
		}
		// The error alone may come from views that have failed first.
		err = errors.Join(say(log, 200<<10), unix.Statfs(disk, &st))
	}
	fmt.Printf("%d events were acknowledged, %d of them until %d bytes were free: %v\n", len(acked), len(acked)-before, st.Bavail*uint64(st.Bsize), err) //nolint:gosec // a size
	if len(acked) == before {
		return errors.New("the log took nothing more")
	}

	// An append while the log cannot be written returns the reason, in the owner's process and in
	// others.
	within, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	for _, in := range []*Store{s, other} {
		_, err := decide(within, in, "run", begun("unheard"))
		if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "bytes free and the log needs") {
			return fmt.Errorf("a decision on a log that cannot be written: %w", err)
		}
	}
	// A patient append succeeds once there is room, in processes that have never ended.
	type saying struct {
		id  string
		err error
	}
	patient := make(chan saying)
	for i, in := range []*Store{s, other, s} {
		go func() {
			within, cancel := context.WithTimeout(ctx, limit)
			defer cancel()
			r, err := decide(within, in, fmt.Sprint("patient-", i), begun("step-1"))
			patient <- saying{r.ID, err}
		}()
	}
	if err := os.Remove(fill); err != nil {
		return err
	}
	err = nil
	for range 3 {
		said := <-patient
		if err = errors.Join(err, said.err); said.err == nil {
			acked = append(acked, said.id)
		}
	}
	if err != nil {
		return fmt.Errorf("with room again: %w", err)
	}
	for _, in := range []*Store{s, other} {
		runs, err := query.Ask(ctx, in.Views(), query.Runs, query.Params{})
		if err != nil || len(runs) != 4 {
			return fmt.Errorf("with room again, asked for runs: %v %w", runs, err)
		}
	}
	s.space.Forget()
	if err := say(s.Log, 10); err != nil {
		return fmt.Errorf("a fact with room again: %w", err)
	}

	// Everything is there once, which the next owner confirms.
	text := strings.Join(acked, " ")
	if err := errors.Join(other.Close(), s.Close(), os.WriteFile(fill, []byte(text), 0o600)); err != nil {
		return err
	}
	if err := os.Setenv(roleEnv, "disk again"); err != nil {
		return err
	}
	return syscall.Exec("/proc/self/exe", os.Args[:1], os.Environ())
}

// afterFull owns a store whose disk was full and has room again.
func afterFull(ctx context.Context) (err error) {
	disk := os.Getenv("CKPTSTORE_TEST_DIR")
	acked, err := os.ReadFile(filepath.Join(disk, "zeros"))
	if err != nil {
		return err
	}
	s, err := Open(ctx, Options{Location: filepath.Join(disk, "store")})
	if err != nil {
		return fmt.Errorf("with room again: %w", err)
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	read, err := s.VerifyLog(ctx, nil)
	if err != nil || len(read.Findings) > 0 {
		return fmt.Errorf("the log: %v %w", read.Findings, err)
	}
	ids, err := logged(ctx, s)
	if err != nil {
		return err
	}
	count := map[string]int{}
	for _, id := range ids {
		count[id]++
	}
	for _, id := range strings.Fields(string(acked)) {
		if count[id] != 1 {
			return fmt.Errorf("event %s was acknowledged and is in the log %d times", id, count[id])
		}
	}
	if _, err := decide(ctx, s, "run", begun("again")); err != nil {
		return err
	}
	fmt.Printf("all of them are in the log of %d\n", len(ids))
	return nil
}

// fillTo writes zeros until only free bytes are free.
func fillTo(path, disk string, free uint64) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	zeros := make([]byte, 64<<10)
	for {
		var st unix.Statfs_t
		if err := unix.Statfs(disk, &st); err != nil {
			return errors.Join(err, f.Close())
		}
		left := st.Bavail * uint64(st.Bsize) //nolint:gosec // a size
		if left <= free {
			return f.Close()
		}
		if _, err := f.Write(zeros[:min(uint64(len(zeros)), left-free)]); err != nil {
			return errors.Join(err, f.Close())
		}
	}
}

package store

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/store/space"
)

// TestRollback opens stores whose log has lost the end that a receipt records. The views, which
// would have detected it, are missing.
func TestRollback(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		spoil func(t *testing.T, dir string, early map[string]string)
		says  string
	}{
		{"an older copy", func(t *testing.T, dir string, early map[string]string) {
			put(t, filepath.Join(dir, "log"), early)
		}, "the log ends at event "},
		{"an older copy that continued", func(t *testing.T, dir string, early map[string]string) {
			put(t, filepath.Join(dir, "log"), early)
			remove(t, dir, endName)
			away(t, filepath.Join(dir, "data"), func() {
				s := open(t, dir)
				for range 20 {
					say(t, s, "other", events.WriteFailed{Attempt: 1, Checkpoint: "x", Error: "test"})
				}
				shut(t, s)
			})
		}, "write.failed"},
		{"a flipped bit", func(t *testing.T, dir string, _ map[string]string) {
			blocks := blocksOf(t, dir)
			data := []byte(read(t, blocks[0]))
			data[len(data)/8] ^= 1
			write(t, blocks[0], string(data))
			remove(t, filepath.Dir(blocks[0]), "index.db")
		}, "damaged store"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := made(t)
			s := open(t, dir)
			must(t, s, "run", begun("step-9"))
			shut(t, s)
			early := snapshot(t, filepath.Join(dir, "log"))
			s = open(t, dir)
			committed(t, s, "run", 1)
			newest := committed(t, s, "run", 2)
			shut(t, s)
			remove(t, dir, "views")
			c.spoil(t, dir, early)
			remove(t, dir, "views")
			before := snapshot(t, filepath.Join(dir, "data"))
			was := snapshot(t, filepath.Dir(filepath.Dir(blocksOf(t, dir)[0])))
			for range 2 { // the first open does not change the outcome
				begin := time.Now()
				refused(t, Options{Location: dir}, ErrDamaged, "restore")
				if took := time.Since(begin); took > 10*time.Second {
					t.Errorf("it took %s", took)
				}
			}
			if c.name != "a flipped bit" { // the event that it hits varies
				refused(t, Options{Location: dir}, ErrDamaged, filepath.Join(newest, checkpoint.ReceiptFile), "run@step-2.a1", c.says, "rolled back", "ls --offline")
			}
			if c.name == "a flipped bit" { // the server has truncated its block
				kept := map[string]string{}
				for path, text := range snapshot(t, filepath.Join(dir, damagedName)) {
					kept[strings.Replace(path, filepath.Join(dir, damagedName), filepath.Dir(filepath.Dir(blocksOf(t, dir)[0])), 1)] = text
				}
				if !maps.Equal(kept, was) {
					t.Errorf("kept %d files of %d, or others", len(kept), len(was))
				}
				refused(t, Options{Location: dir}, ErrDamaged, filepath.Join(dir, damagedName))
			}
			if !maps.Equal(before, snapshot(t, filepath.Join(dir, "data"))) {
				t.Error("checkpoints were changed")
			}
			if list := listed(t, dir); list != "step-1.a1step-2.a1" {
				t.Errorf("it lists %s", list)
			}
		})
	}
}

// away moves path away while do runs.
func away(t *testing.T, path string, do func()) {
	t.Helper()
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}
	do()
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".away", path); err != nil {
		t.Fatal(err)
	}
}

// blocksOf returns the files that hold a log's events.
func blocksOf(t *testing.T, dir string) []string {
	t.Helper()
	blocks, err := filepath.Glob(filepath.Join(dir, "log", "jetstream", "*", "streams", "CKPT", "msgs", "*.blk"))
	if err != nil || len(blocks) == 0 {
		t.Fatal(blocks, err)
	}
	return blocks
}

// TestRollbackOfServer restores an older copy of a server's directory.
func TestRollbackOfServer(t *testing.T) {
	t.Parallel()
	log, data := filepath.Join(t.TempDir(), "log"), filepath.Join(t.TempDir(), "shared")
	url, p := serverIn(t, log)
	if _, err := Init(t.Context(), url, data); err != nil {
		t.Fatal(err)
	}
	p.end()
	early := snapshot(t, log)
	url, p = serverIn(t, log)
	s := open(t, url)
	path := committed(t, s, "run", 1)
	shut(t, s)
	p.end()
	put(t, log, early)
	url, p = serverIn(t, log)
	refused(t, Options{Location: url}, ErrDamaged, path, "rolled back", "run@step-1.a1", "stream CKPT from a backup", "ls --offline --store "+data)
	p.end()
}

func TestToCompare(t *testing.T) {
	t.Parallel()
	var all []checkpoint.Receipt
	for i, at := range []string{"a", "a", "b", "other", "c", "d", "a", "b", "b"} {
		r := checkpoint.Receipt{Store: "s", Run: at, Sequence: uint64(i + 1)}
		if at == "other" {
			r.Store = "other"
		}
		all = append(all, r)
	}
	for _, c := range []struct {
		newest, others int
		want           string
	}{{9, 9, "9b 8b 7a 6d 5c 3b 2a 1a"}, {2, 9, "9b 8b 7a 6d 5c"}, {2, 2, "9b 8b 7a 6d"}, {1, 1, "9b 7a"}, {0, 0, ""}} {
		var got []string
		for _, r := range toCompare(all, "s", c.newest, c.others) {
			got = append(got, string('0'+byte(r.Sequence))+r.Run)
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("the newest %d and %d others: %v, want %s", c.newest, c.others, got, c.want)
		}
	}
}

// TestUnrecoveredLog: a log that the server cannot read is reported at once.
func TestUnrecoveredLog(t *testing.T) {
	t.Parallel()
	dir := made(t)
	shut(t, open(t, dir))
	write(t, filepath.Join(filepath.Dir(filepath.Dir(blocksOf(t, dir)[0])), "meta.inf"), "garbage")
	begin := time.Now()
	refused(t, Options{Location: dir}, ErrDamaged, "could not be recovered", "from a backup")
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("it took %s", took)
	}
}

// TestCopyOfLog: the copy made in case of damage is removed if there is none.
func TestCopyOfLog(t *testing.T) {
	t.Parallel()
	dir := made(t)
	owner := actors(t, dir, 1)[0]
	owner.kill()
	// A copy that a kill interrupted.
	write(t, filepath.Join(dir, copyName+".tmp", "msgs", "1.blk"), "half")
	if had, err := keepLog(&Store{opts: Options{}, space: roomy()}, dir, true, maxCopy); err != nil || had != "" {
		t.Fatal(had, err)
	}
	if kept := snapshot(t, filepath.Join(dir, copyName)); len(kept) < 4 {
		t.Errorf("copied %d files", len(kept))
	}
	shut(t, open(t, dir))
	left, err := os.ReadDir(dir)
	if err != nil || strings.Contains(strings.Join(names(left), " "), "copy") {
		t.Errorf("left: %v, %v", names(left), err)
	}
	// Without room there is no copy, and the error reports it.
	_, err = keepLog(&Store{space: &space.Gauge{Usage: func() (data.Usage, error) { return data.Usage{Free: 1 << 20, Size: 1 << 40}, nil }}}, dir, true, maxCopy)
	wrong(t, err, syscall.ENOSPC)
	if exists(filepath.Join(dir, copyName)) {
		t.Error("it was copied")
	}
}

func roomy() *space.Gauge {
	return &space.Gauge{Usage: func() (data.Usage, error) { return data.Usage{Free: 1 << 40, Size: 1 << 40}, nil }}
}

// TestOpenIsCalledOff: the lock is free when Open returns.
func TestOpenIsCalledOff(t *testing.T) {
	t.Parallel()
	dir := made(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Open(ctx, Options{Location: dir})
	wrong(t, err, context.Canceled)
	lock, err := tryLock(dir)
	if err != nil || lock == nil {
		t.Fatalf("the lock is held: %v", err)
	}
	if err := lock.Close(); err != nil {
		t.Error(err)
	}
	shut(t, open(t, dir))
}
